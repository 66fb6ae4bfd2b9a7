"""How long it takes from a user's words to a version that has learned from them."""

from __future__ import annotations

from sqlalchemy import Connection, func, select

from nextstate.store.schema import next_states, policy_versions, turns
from nextstate.types import TurnState


def correction_to_behaviour(db: Connection) -> list[float]:
    """For each trained turn: seconds from the arrival of what followed it to the first answer, to anyone, that began
    after a version trained on it had started to serve. Turns whose version has answered nothing yet are left out."""
    served = (
        select(turns.c.turn_id, next_states.c.created_at, policy_versions.c.served_at)
        .join(next_states, next_states.c.turn_id == turns.c.turn_id)
        .join(policy_versions, policy_versions.c.update_id == turns.c.update_id)
        .where(turns.c.state == TurnState.TRAINED, policy_versions.c.served_at.is_not(None))
    )
    waits = []
    for row in db.execute(served):
        after = select(func.min(turns.c.created_at)).where(turns.c.created_at >= row.served_at)
        first = db.execute(after).scalar()
        if first is not None:
            waits.append(first - row.created_at)
    return waits
