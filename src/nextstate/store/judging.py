"""Verdicts: claimed and written by the judge loop, overruled by explicit feedback."""

from __future__ import annotations

import time
from dataclasses import dataclass

from sqlalchemy import Connection, delete, func, insert, or_, select, update

from nextstate.store.schema import events, feedback, hints, next_states, samples, turns, verdicts, votes
from nextstate.store.store import note
from nextstate.store.turns import can_be_judged_again, leave_out, load_messages
from nextstate.types import (
    Feedback,
    FinishReason,
    Message,
    SkipReason,
    TurnState,
    TurnToJudge,
    Verdict,
    Vote,
)


def claim_unjudged(db: Connection, *, limit: int, lease_s: float) -> list[TurnToJudge]:
    """Turns that wait for a verdict, oldest first, held for `lease_s` seconds."""
    now = time.time()
    free = or_(turns.c.lease_until.is_(None), turns.c.lease_until < now)
    columns = turns.c.turn_id, turns.c.finish_reason, turns.c.malformed_calls
    waiting = select(*columns).where(turns.c.state == TurnState.CONTINUED, free)
    rows = db.execute(waiting.order_by(turns.c.turn_id).limit(limit)).all()
    ids = [row.turn_id for row in rows]
    lease_until = now + lease_s
    db.execute(update(turns).where(turns.c.turn_id.in_(ids)).values(lease_until=lease_until))
    claimed = []
    for row in rows:
        conversation = load_messages(db, row.turn_id)
        after = db.execute(select(next_states.c.messages).where(next_states.c.turn_id == row.turn_id)).scalar()
        claimed.append(
            TurnToJudge(
                turn_id=row.turn_id,
                history=conversation[:-1],
                answer=_as_text(conversation[-1]),
                next_state=tuple(after or ()),
                finish_reason=FinishReason(row.finish_reason),
                malformed_calls=row.malformed_calls,
                feedback=_newest_feedback(db, row.turn_id),
                lease_until=lease_until,
            )
        )
    return claimed


def _as_text(answer: Message) -> str:
    calls = (call["function"] for call in answer.get("tool_calls", ()))
    return "\n".join(filter(None, [answer["content"], *(f"{call['name']}({call['arguments']})" for call in calls)]))


def release_claims(db: Connection) -> None:
    """At start: what a server that died had claimed need not wait until its lease runs out."""
    claimed = update(turns).where(turns.c.state == TurnState.CONTINUED, turns.c.lease_until.is_not(None))
    db.execute(claimed.values(lease_until=None))


def _newest_feedback(db: Connection, turn_id: int) -> Feedback | None:
    newest = select(feedback.c.value, feedback.c.words).where(feedback.c.turn_id == turn_id)
    row = db.execute(newest.order_by(feedback.c.feedback_id.desc()).limit(1)).first()
    return Feedback(value=Vote(row.value), words=row.words) if row else None


def write_verdict(db: Connection, verdict: Verdict, lease_until: float | None = None) -> bool:
    """Add a verdict; a signed one makes the turn a sample, any other leaves it out with the reason.

    Returns False, and changes nothing, when the turn no longer waits for one: another judge was quicker, or what the
    judge was shown has been replaced since.

    Args:
        lease_until: of the claim under which the turn was judged; None: any.
    """
    waiting = update(turns).where(turns.c.turn_id == verdict.turn_id, turns.c.state == TurnState.CONTINUED)
    if lease_until is not None:
        waiting = waiting.where(turns.c.lease_until == lease_until)
    if db.execute(waiting.values(state=TurnState.JUDGED, lease_until=None)).rowcount == 0:
        return False
    now = time.time()
    row = {
        "turn_id": verdict.turn_id,
        "judge": verdict.judge,
        "value": verdict.value,
        "probabilities": dict(verdict.probabilities) if verdict.probabilities is not None else None,
        "reason": verdict.reason,
        "created_at": now,
    }
    verdict_id = db.execute(insert(verdicts).values(row).returning(verdicts.c.verdict_id)).scalar_one()
    for n, vote in enumerate(verdict.votes):
        db.execute(insert(votes).values(verdict_id=verdict_id, n=n, value=vote))
    for n, hint in enumerate(verdict.hints):
        db.execute(insert(hints).values(verdict_id=verdict_id, n=n, text=hint.text, source=hint.source))
    if verdict.value is None:
        leave_out(db, [verdict.turn_id], SkipReason.ABSTAINED, verdict.reason)
    elif verdict.value is Vote.NEUTRAL:
        leave_out(db, [verdict.turn_id], SkipReason.NEUTRAL, verdict.reason)
    else:
        chosen = verdict.hints[0].text if verdict.hints else None
        sample = {"turn_id": verdict.turn_id, "verdict_id": verdict_id, "reward": verdict.value, "hint": chosen}
        db.execute(insert(samples).values(created_at=now, **sample))
    return True


def judge_failed(db: Connection, turn_id: int, why: str, *, max_attempts: int, retry_s: float) -> None:
    """A judge broke over a turn: the turn waits and is tried again, up to a limit. Never a vote of 0."""
    tried = (
        update(turns)
        .where(turns.c.turn_id == turn_id)
        .values(judge_attempts=turns.c.judge_attempts + 1, lease_until=time.time() + retry_s)
    )
    attempts = db.execute(tried.returning(turns.c.judge_attempts)).scalar_one()
    note(db, "judge_failed", turn_id, why=why, attempt=attempts)
    if attempts >= max_attempts:
        leave_out(db, [turn_id], SkipReason.JUDGE_GAVE_UP, f"The judge failed {attempts} times; the last time: {why}")


JUDGE_LEFT_ALONE = "judge_left_alone"
JUDGE_IS_BACK = "judge_is_back"
"""Events: the judge failed so often in a row that it is left alone for a while, and it has voted again."""


def judge_away(db: Connection, turn_id: int, why: str, *, max_wait_s: float, retry_s: float) -> None:
    """A judge could not be asked, or did not answer in time: the turn waits, at no cost to it, up to a limit of age.

    Args:
        max_wait_s: since the first event of this kind about the turn.
        retry_s: for which the turn is not claimed again.
    """
    now = time.time()
    since = db.execute(
        select(func.min(events.c.at)).where(events.c.kind == "judge_away", events.c.turn_id == turn_id)
    ).scalar()
    # Noted once for a turn and outage, however often it is tried.
    if since is None:
        note(db, "judge_away", turn_id, why=why)
    db.execute(update(turns).where(turns.c.turn_id == turn_id).values(lease_until=now + retry_s))
    if since is not None and now - since >= max_wait_s:
        detail = f"The judge could not be asked for {(now - since) / 3600:.1f} hours; the last time: {why}"
        leave_out(db, [turn_id], SkipReason.JUDGE_GAVE_UP, detail)


def judge_left_alone(db: Connection) -> float | None:
    """Since when the judge has been left alone, seconds since the epoch; None: it is not."""
    kinds = events.c.kind.in_((JUDGE_LEFT_ALONE, JUDGE_IS_BACK, "server_started"))
    last_back = select(func.max(events.c.event_id)).where(kinds, events.c.kind != JUDGE_LEFT_ALONE).scalar_subquery()
    first_since = select(func.min(events.c.at)).where(
        events.c.kind == JUDGE_LEFT_ALONE, events.c.event_id > func.coalesce(last_back, 0)
    )
    return db.execute(first_since).scalar()


def add_feedback(db: Connection, turn_id: int, given: Feedback) -> str:
    """Keep explicit feedback. A turn that is not in an update yet is judged again, by it.

    Returns what came of it: 'will_be_judged', 'kept' (the turn cannot be trained, or is being answered), or
    'already_trained'.

    Raises:
        LookupError: no such turn.
    """
    row = db.execute(select(turns.c.state, turns.c.reason).where(turns.c.turn_id == turn_id)).first()
    if row is None:
        raise LookupError(f"there is no turn {turn_id}")
    values = {"turn_id": turn_id, "value": given.value, "words": given.words, "created_at": time.time()}
    db.execute(insert(feedback).values(values))
    if row.state in (TurnState.TRAINING, TurnState.TRAINED):
        return "already_trained"
    if not can_be_judged_again(row):
        return "kept"
    db.execute(delete(samples).where(samples.c.turn_id == turn_id))
    again = {"state": TurnState.CONTINUED, "reason": None, "detail": None, "lease_until": None, "judge_attempts": 0}
    db.execute(update(turns).where(turns.c.turn_id == turn_id).values(again))
    return "will_be_judged"


def judge_against_feedback(db: Connection) -> dict[str, int]:
    """How the judge's own last verdict on a turn compares with what the user said about it through /v1/feedback.

    Only turns on which the judge had voted before it knew the feedback; evidence, which includes feedback, is no vote.
    """
    newest = select(func.max(feedback.c.feedback_id)).group_by(feedback.c.turn_id)
    voted = select(func.max(verdicts.c.verdict_id)).where(verdicts.c.judge != "evidence").group_by(verdicts.c.turn_id)
    both = (
        select(feedback.c.value, verdicts.c.value)
        .join(verdicts, verdicts.c.turn_id == feedback.c.turn_id)
        .where(feedback.c.feedback_id.in_(newest), verdicts.c.verdict_id.in_(voted))
        .where(verdicts.c.created_at <= feedback.c.created_at)
    )
    found = {"right": 0, "wrong": 0, "opposite": 0, "abstained": 0}
    for said, judged in db.execute(both):
        if judged is None:
            found["abstained"] += 1
        else:
            found["right" if said == judged else "wrong"] += 1
            found["opposite"] += said * judged < 0
    return found


def turns_with_feedback(db: Connection, *, newest: int) -> list[tuple[TurnToJudge, Vote]]:
    """The newest turns that have explicit feedback and a next state, oldest first, each with the feedback's value."""
    latest = select(func.max(feedback.c.feedback_id)).group_by(feedback.c.turn_id)
    query = (
        select(feedback.c.turn_id, feedback.c.value, turns.c.finish_reason, next_states.c.messages)
        .join(turns, turns.c.turn_id == feedback.c.turn_id)
        .join(next_states, next_states.c.turn_id == feedback.c.turn_id)
        .where(feedback.c.feedback_id.in_(latest), turns.c.finish_reason.is_not(None))
        .order_by(feedback.c.feedback_id.desc())
        .limit(newest)
    )
    found = []
    for row in db.execute(query).all():
        conversation = load_messages(db, row.turn_id)
        turn = TurnToJudge(
            turn_id=row.turn_id,
            history=conversation[:-1],
            answer=_as_text(conversation[-1]),
            next_state=tuple(row.messages),
            finish_reason=FinishReason(row.finish_reason),
        )
        found.append((turn, Vote(row.value)))
    return found[::-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredVerdict:
    """A verdict as a person or a report reads it."""

    judge: str
    value: Vote | None
    reason: str
    votes: tuple[Vote | None, ...]
    hints: tuple[str, ...]


def list_verdicts(db: Connection, turn_id: int) -> list[StoredVerdict]:
    """All verdicts on a turn, oldest first."""
    found = []
    for row in db.execute(select(verdicts).where(verdicts.c.turn_id == turn_id).order_by(verdicts.c.verdict_id)):
        cast = db.execute(select(votes.c.value).where(votes.c.verdict_id == row.verdict_id).order_by(votes.c.n))
        texts = db.execute(select(hints.c.text).where(hints.c.verdict_id == row.verdict_id).order_by(hints.c.n))
        found.append(
            StoredVerdict(
                judge=row.judge,
                value=None if row.value is None else Vote(row.value),
                reason=row.reason,
                votes=tuple(None if v is None else Vote(v) for v in cast.scalars()),
                hints=tuple(texts.scalars()),
            )
        )
    return found
