"""What the owner decides about learning: paused or not. In the store, so that it outlives every process."""

from __future__ import annotations

import time

from sqlalchemy import Connection, delete, select
from sqlalchemy.dialects.sqlite import insert

from nextstate.store.schema import meta
from nextstate.store.store import note

_PAUSED = "learning_paused_since"


def pause_learning(db: Connection) -> bool:
    """Let nothing be trained or published until `resume_learning`. False: it was paused already."""
    row = insert(meta).values(key=_PAUSED, value=repr(time.time())).on_conflict_do_nothing()
    if db.execute(row).rowcount == 0:
        return False
    note(db, "learning_paused")
    return True


def resume_learning(db: Connection) -> bool:
    """Train and publish again, what has waited first. False: it was not paused."""
    since = paused_since(db)
    if since is None:
        return False
    db.execute(delete(meta).where(meta.c.key == _PAUSED))
    note(db, "learning_resumed", paused_s=time.time() - since)
    return True


def paused_since(db: Connection) -> float | None:
    """Since when learning is paused, seconds since the epoch; None: it is not."""
    since = db.execute(select(meta.c.value).where(meta.c.key == _PAUSED)).scalar()
    return None if since is None else float(since)
