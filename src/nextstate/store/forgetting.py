"""Taking turns back: their texts and tokens go, a tombstone stays, and the versions trained on them are known.

    choose_* ─▶ turn ids ─▶ forget ─▶ Store.scrub ─▶ start_over, if asked for
                            texts     the file       back to a version without them, and the other turns again

A later prompt is stored as what it adds to an earlier one, and repeats it in any case: so with a turn goes whatever in
its session was said with it in view. What came before it stays, but without the evidence that the turn brought.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    Column,
    Connection,
    Integer,
    MetaData,
    Table,
    delete,
    func,
    insert,
    or_,
    select,
    update,
)

from nextstate.store import learning
from nextstate.store.schema import (
    events,
    feedback,
    hints,
    next_states,
    policy_versions,
    samples,
    sessions,
    tool_sets,
    turns,
    updates,
    verdicts,
)
from nextstate.store.store import AnyRow, note
from nextstate.store.turns import JUDGED_AGAIN, leave_out
from nextstate.types import Sampling, SkipReason, Source, TurnState, VersionState

NOBODY = "%forgotten"
"""Whose the tombstones are. No user: in an owner, a percent sign is followed by two digits (serve/auth.py)."""

GONE = "Forgotten."
"""Stands where a text was that must not be null."""

_QUOTE_CHARS = 24
"""A text so long is hardly said twice by chance; where another turn has it, that turn quotes it."""

_chosen = Table("forgetting", MetaData(), Column("turn_id", Integer, primary_key=True), prefixes=["TEMPORARY"])
_TURN_IDS = select(_chosen.c.turn_id)


# -- which turns -------------------------------------------------------------------------------------------------------


def choose_session(db: Connection, key: str, user: str | None = None) -> list[int]:
    """The turns of a session.

    Args:
        user: whose; needed only where several users have a session of that key.

    Raises:
        LookupError: there is none, or several users have one.
    """
    query = select(sessions.c.session_id, sessions.c.user).where(sessions.c.key == key, sessions.c.user != NOBODY)
    found = db.execute(query if user is None else query.where(_of(user))).all()
    if not found:
        raise LookupError(f"there is no session '{key}'")
    if len(found) > 1:
        users = ", ".join(f"'{row.user}'" for row in found)
        raise LookupError(f"{len(found)} users have a session '{key}': {users}; say which with --user")
    of_session = select(turns.c.turn_id).where(turns.c.session_id == found[0].session_id)
    return list(db.execute(of_session.order_by(turns.c.turn_id)).scalars())


def choose_user(db: Connection, user: str) -> list[int]:
    """All turns of a key's user, whatever the requests called theirs; or those of one owner, 'ann/bob'.

    Raises:
        LookupError: there are none.
    """
    theirs = select(sessions.c.session_id).where(_of(user), sessions.c.user != NOBODY)
    query = select(turns.c.turn_id).where(turns.c.session_id.in_(theirs)).order_by(turns.c.turn_id)
    found = list(db.execute(query).scalars())
    if not found:
        raise LookupError(f"there is no turn of a user '{user}'")
    return found


def _of(user: str) -> Any:
    names = {user, user.replace("%", "%25").replace("/", "%2F")}
    below = (func.substr(sessions.c.user, 1, len(name) + 1) == f"{name}/" for name in names)
    return or_(sessions.c.user.in_(names), *below)


def choose_turn(db: Connection, turn_id: int) -> list[int]:
    """A turn, and what in its session holds its words: what followed it, other answers to the same request, work on
    the side, and whatever quotes it.

    Raises:
        LookupError: there is no such turn, or it has been forgotten.
    """
    columns = turns.c.turn_id, turns.c.parent_turn_id, turns.c.kind, turns.c.request_spine
    own = db.execute(select(turns.c.session_id).where(turns.c.turn_id == turn_id, turns.c.user != NOBODY)).scalar()
    if own is None:
        raise LookupError(f"there is no turn {turn_id}, or it has been forgotten")
    of_session = select(*columns).where(turns.c.session_id == own).order_by(turns.c.turn_id)
    rows = {row.turn_id: row for row in db.execute(of_session)}
    before: set[int] = set()
    above = rows[turn_id].parent_turn_id
    while above is not None and above in rows:
        before.add(above)
        above = rows[above].parent_turn_id
    found, texts = {turn_id}, {number: _texts(db, number) for number in rows if number not in before}
    while True:
        spines = {rows[number].request_spine for number in found}
        quotable = {text for number in found for text in texts[number] if len(text) >= _QUOTE_CHARS}
        more = {
            number
            for number, said in texts.items()
            if number not in found
            and (
                rows[number].kind == "side"
                or rows[number].parent_turn_id in found
                or rows[number].request_spine in spines
                or any(quote in text for quote in quotable for text in said)
            )
        }
        if not more:
            return sorted(found)
        found |= more


def _texts(db: Connection, turn_id: int) -> list[str]:
    """What a turn itself adds to its conversation, without system text, which is no single turn's."""
    columns = turns.c.messages, turns.c.answer, turns.c.reasoning, turns.c.tool_calls
    row = db.execute(select(*columns).where(turns.c.turn_id == turn_id)).one()
    said = [message for message in row.messages if message.get("role") not in ("system", "developer")]
    calls = [call for message in said for call in message.get("tool_calls") or ()] + (row.tool_calls or [])
    texts = [message.get("content") for message in said] + [row.answer, row.reasoning]
    return [text for text in [*texts, *(call["function"]["arguments"] for call in calls)] if text]


# -- what it means -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Forgetting:
    """What goes, and what it was part of."""

    turns: int
    trained: int
    """Of these, those that an update was made with."""
    without_evidence: int
    """Turns that stay, without the words that followed them."""
    stopped_updates: tuple[int, ...]
    """Updates that are training on some of them now: nothing comes of those."""
    versions: tuple[int, ...]
    """Versions on whose line there is an update that was made with any of these words."""


def preview(db: Connection, turn_ids: Sequence[int]) -> Forgetting:
    """What `forget` would do. Writes nothing that lasts."""
    _choose(db, turn_ids)
    trained = select(turns.c.update_id, func.count()).where(turns.c.state == TurnState.TRAINED)
    by_update: dict[int, int] = {}
    for which in (turns.c.turn_id.in_(_TURN_IDS), turns.c.turn_id.in_(_losing_evidence())):
        for update_id, count in db.execute(trained.where(which).group_by(turns.c.update_id)):
            by_update[update_id] = by_update.get(update_id, 0) + count
    running = select(turns.c.update_id).where(
        turns.c.state == TurnState.TRAINING,
        or_(turns.c.turn_id.in_(_TURN_IDS), turns.c.turn_id.in_(_losing_evidence())),
    )
    gone = select(func.count()).where(turns.c.turn_id.in_(_TURN_IDS))
    lost = select(func.count()).select_from(_losing_evidence().subquery())
    found = Forgetting(
        turns=db.execute(gone).scalar_one(),
        trained=db.execute(gone.where(turns.c.state == TurnState.TRAINED)).scalar_one(),
        without_evidence=db.execute(lost).scalar_one(),
        stopped_updates=tuple(sorted(set(db.execute(running).scalars()))),
        versions=_built_on(db, by_update),
    )
    _chosen.drop(db)
    return found


def _choose(db: Connection, turn_ids: Iterable[int]) -> None:
    """Put the ids where queries can name them all at once; there may be a hundred thousand."""
    _chosen.create(db)
    db.execute(insert(_chosen), [{"turn_id": turn_id} for turn_id in turn_ids])
    # A server may have taken a request that goes on from one of them since they were chosen.
    in_their_sessions = turns.c.session_id.in_(select(turns.c.session_id).where(turns.c.turn_id.in_(_TURN_IDS)))
    children = select(turns.c.turn_id).where(
        in_their_sessions, turns.c.parent_turn_id.in_(_TURN_IDS), turns.c.turn_id.not_in(_TURN_IDS)
    )
    while db.execute(insert(_chosen).from_select(["turn_id"], children)).rowcount:
        continue


def _losing_evidence() -> Any:
    """Turns that stay, and whose next state one of the chosen turns brought."""
    return select(next_states.c.turn_id).where(
        next_states.c.from_turn_id.in_(_TURN_IDS), next_states.c.turn_id.not_in(_TURN_IDS)
    )


def _built_on(db: Connection, update_ids: Iterable[int]) -> tuple[int, ...]:
    """Versions that these updates made, and all that were built on those."""
    wanted, found = set(update_ids), set()
    columns = policy_versions.c.version, policy_versions.c.parent_version, policy_versions.c.update_id
    # A version's number is higher than its parent's.
    for row in db.execute(select(*columns).order_by(policy_versions.c.version)):
        if row.update_id in wanted or row.parent_version in found:
            found.add(row.version)
    return tuple(sorted(found))


def marked_versions(db: Connection) -> tuple[int, ...]:
    """Versions on whose line there is an update that was made with turns forgotten since."""
    query = select(updates.c.update_id).where(updates.c.metrics["forgotten_turns"].as_integer() > 0)
    return _built_on(db, db.execute(query).scalars())


# -- forgetting --------------------------------------------------------------------------------------------------------


def forget(db: Connection, turn_ids: Sequence[int]) -> Forgetting:
    """Remove the texts and tokens of turns everywhere, and leave a counted tombstone of each.

    An update that is training on one of them is stopped: nothing comes of it, and its other turns wait for the next.
    The pages of the file keep what was deleted until `Store.scrub`.
    """
    db.exec_driver_sql("PRAGMA secure_delete = ON")
    found = preview(db, turn_ids)
    for update_id in found.stopped_updates:
        learning.abandon_update(db, update_id, "a turn of it was forgotten", state="stopped")
    _choose(db, turn_ids)
    _mark_updates(db)
    _take_evidence_away(db)
    _clear(db)
    ended = {
        "state": TurnState.LEFT_OUT,
        "reason": SkipReason.FORGOTTEN,
        "detail": "Its texts and tokens were removed.",
    }
    db.execute(update(turns).where(turns.c.turn_id.in_(_TURN_IDS)).values(ended))
    _chosen.drop(db)
    note(db, "forgotten", turns=found.turns, trained=found.trained, versions=list(found.versions))
    return found


def _mark_updates(db: Connection) -> None:
    """Count, in an update's metrics, the turns it was made with whose words are going."""
    words = or_(turns.c.turn_id.in_(_TURN_IDS), turns.c.turn_id.in_(_losing_evidence()))
    query = select(turns.c.update_id, func.count()).where(turns.c.state == TurnState.TRAINED, words)
    for update_id, count in db.execute(query.group_by(turns.c.update_id)).all():
        made = updates.c.update_id == update_id
        metrics = dict(db.execute(select(updates.c.metrics).where(made)).scalar_one())
        metrics["forgotten_turns"] = metrics.get("forgotten_turns", 0) + count
        db.execute(update(updates).where(made).values(metrics=metrics))


def _take_evidence_away(db: Connection) -> None:
    """Turns that stay lose the words that followed them, and what a judge made of those; feedback on them is theirs."""
    columns = turns.c.turn_id, turns.c.state, turns.c.reason
    for row in db.execute(select(*columns).where(turns.c.turn_id.in_(_losing_evidence()))).all():
        about = verdicts.c.turn_id == row.turn_id
        numbers = select(verdicts.c.verdict_id).where(about)
        db.execute(delete(hints).where(hints.c.verdict_id.in_(numbers), hints.c.source != Source.FEEDBACK))
        db.execute(update(verdicts).where(about).values(reason=GONE))
        told = db.execute(select(feedback.c.feedback_id).where(feedback.c.turn_id == row.turn_id).limit(1)).first()
        if told is not None:  # the verdict rests on that
            left = select(hints.c.text).where(hints.c.verdict_id == samples.c.verdict_id).order_by(hints.c.n).limit(1)
            its = update(samples).where(samples.c.turn_id == row.turn_id)
            db.execute(its.values(hint=left.scalar_subquery()))
            continue
        db.execute(delete(samples).where(samples.c.turn_id == row.turn_id))
        open_still = row.state in (TurnState.CONTINUED, TurnState.JUDGED)
        if open_still or row.reason in (*JUDGED_AGAIN, SkipReason.HELD_OUT):
            _end_without_evidence(db, [row.turn_id])
    db.execute(delete(next_states).where(next_states.c.from_turn_id.in_(_TURN_IDS)))


def _end_without_evidence(db: Connection, turn_ids: Sequence[int]) -> None:
    values = {"state": TurnState.LEFT_OUT, "reason": SkipReason.NO_NEXT_STATE, "update_id": None, "lease_until": None}
    chosen = update(turns).where(turns.c.turn_id.in_(turn_ids))
    db.execute(chosen.values(detail="What followed this answer was forgotten.", **values))


def _clear(db: Connection) -> None:
    """Remove the texts and tokens of the chosen turns, and move what is left to the session that holds tombstones."""
    theirs = turns.c.turn_id.in_(_TURN_IDS)
    judged = select(verdicts.c.verdict_id).where(verdicts.c.turn_id.in_(_TURN_IDS))
    for table in (next_states, samples):
        db.execute(delete(table).where(table.c.turn_id.in_(_TURN_IDS)))
    db.execute(delete(hints).where(hints.c.verdict_id.in_(judged)))
    # Their values stay: what the watch has counted, it goes on counting.
    db.execute(update(verdicts).where(verdicts.c.turn_id.in_(_TURN_IDS)).values(reason=GONE))
    db.execute(update(feedback).where(feedback.c.turn_id.in_(_TURN_IDS)).values(words=""))
    db.execute(update(events).where(events.c.turn_id.in_(_TURN_IDS)).values(data={}))
    db.execute(
        update(turns)
        .where(theirs)
        .values(
            session_id=_graveyard(db),
            user=NOBODY,
            parent_turn_id=None,
            placed_because=GONE,
            tool_set=None,
            messages_kept=0,
            messages=[],
            prompt_kept=0,
            prompt_suffix=b"",
            request_spine="",
            answer_spine=None,
            heard_spine="",
            block_spine="",
            opening="",
            setting="",
            wording="",
            trace=None,
            # Stop strings and grammars are text too.
            sampling=Sampling(max_tokens=0).as_json(),
            answer=None,
            reasoning=None,
            tool_calls=None,
            reply_ids=None,
            reply_logprobs=None,
            lease_until=None,
        )
    )
    db.execute(delete(sessions).where(sessions.c.session_id.not_in(select(turns.c.session_id))))
    used = select(turns.c.tool_set).where(turns.c.tool_set.is_not(None))
    db.execute(delete(tool_sets).where(tool_sets.c.tool_set.not_in(used)))


def _graveyard(db: Connection) -> int:
    """The session of all tombstones: no search among a session's turns, or a user's, meets one."""
    known = db.execute(select(sessions.c.session_id).where(sessions.c.user == NOBODY)).scalar()
    if known is not None:
        return int(known)
    values = {"user": NOBODY, "key": "forgotten", "started_at": 0.0, "last_at": 0.0, "ended_at": 0.0}
    return int(db.execute(insert(sessions).values(values).returning(sessions.c.session_id)).scalar_one())


# -- keeping no more than asked for ------------------------------------------------------------------------------------


_EXPIRED = "Its texts and tokens were removed when they had been kept as long as they may be, before it was trained."


def expire_old(db: Connection, *, quiet_since: float, limit: int) -> int:
    """Clear the sessions without a request since then, longest quiet first, at most `limit`. Returns how many turns.

    What is trained stays trained, and what was left out keeps its reason: nobody takes anything back. A session that is
    being answered or trained on waits for the next time.
    """
    quiet = select(sessions.c.session_id).where(sessions.c.user != NOBODY, sessions.c.last_at < quiet_since)
    busy = select(turns.c.session_id).where(turns.c.state.in_((TurnState.GENERATING, TurnState.TRAINING)))
    oldest = quiet.where(sessions.c.session_id.not_in(busy)).order_by(sessions.c.last_at, sessions.c.session_id)
    of_these = select(turns.c.turn_id).where(turns.c.session_id.in_(oldest.limit(limit)))
    found = list(db.execute(of_these).scalars())
    if not found:
        return 0
    # The freed pages are overwritten, and used again by what comes; to write the file anew each time would be too much.
    db.exec_driver_sql("PRAGMA secure_delete = ON")
    _choose(db, found)
    _clear(db)
    waiting = turns.c.state.in_((TurnState.FINISHED, TurnState.CONTINUED, TurnState.JUDGED))
    ended = update(turns).where(turns.c.turn_id.in_(_TURN_IDS), waiting)
    untrained = db.execute(ended.values(state=TurnState.LEFT_OUT, reason=SkipReason.EXPIRED, detail=_EXPIRED)).rowcount
    _chosen.drop(db)
    note(db, "expired", turns=len(found), untrained=untrained)
    return len(found)


def stored_bytes(db: Connection) -> int:
    """Size of what is stored, without the pages of the file that are free."""
    pages, free, size = (
        int(db.exec_driver_sql(f"PRAGMA {name}").scalar_one()) for name in ("page_count", "freelist_count", "page_size")
    )
    return (pages - free) * size


def is_forgotten(db: Connection, turn_id: int) -> bool:
    return db.execute(select(turns.c.reason).where(turns.c.turn_id == turn_id)).scalar() == SkipReason.FORGOTTEN


# -- going back to before ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Retraining:
    version: int
    """The one that is asked to serve: the newest on the line that was made without what is forgotten."""
    retired: tuple[int, ...]
    """Versions that never serve again."""
    turns: int
    """Turns of theirs that wait to be trained again."""


def start_over(db: Connection) -> Retraining | None:
    """Go back to before the first update that was made with forgotten turns, and train the others again.

    The marked versions on the line that serves, and those elsewhere that somebody could go back to, never serve again.
    The clean one becomes a candidate and passes the gate like any other; until then the last one goes on. The other
    turns of the line's marked versions are judged turns that wait, as they did before: they are trained in the order in
    which they were asked, in new batches, unless they have become too stale or too far off policy.

    Returns None, and changes nothing, when the version that serves is not marked, or is being replaced already.

    Raises:
        LookupError: another version waits for the gate; nothing has changed.
    """
    marked = set(marked_versions(db))
    serving = learning.serving_version(db)
    if serving not in marked or learning.goes_back(db):
        return None
    if (waiting := learning.candidate(db)) is not None:
        raise LookupError(f"version {waiting.version} waits for the gate")
    line: list[AnyRow] = []
    next_up: int | None = serving
    while next_up in marked:
        line.append(learning.version_row(db, next_up))
        next_up = line[-1].parent_version
    put_back = sum(_put_back(db, row.update_id) for row in line)
    retired = _retire(db, marked)
    note(db, "retraining", versions=list(retired), turns=put_back)
    version = learning.go_back(db)
    assert version is not None, "there is a candidate"
    return Retraining(version=version, retired=retired, turns=put_back)


def _retire(db: Connection, marked: set[int]) -> tuple[int, ...]:
    rows = db.execute(select(policy_versions).order_by(policy_versions.c.version)).all()
    could_serve = (VersionState.SERVING, VersionState.RETIRED)
    retired = [row for row in rows if row.version in marked and row.state in could_serve]
    why = "turns that it was trained on, or that a version before it was, have been forgotten"
    for row in retired:
        # The one that serves has to stay that until another can; `promote` then changes its state.
        state = row.state if row.state == VersionState.SERVING else VersionState.ROLLED_BACK
        values = {"state": state, "gate": {**(row.gate or {}), "why": why, "forgotten": True}}
        db.execute(update(policy_versions).where(policy_versions.c.version == row.version).values(values))
    return tuple(row.version for row in retired)


def _put_back(db: Connection, update_id: int) -> int:
    """Let an update's turns wait again, but for those whose evidence is gone. Returns how many wait."""
    took = list(db.execute(select(turns.c.turn_id).where(turns.c.update_id == update_id)).scalars())
    db.execute(update(updates).where(updates.c.update_id == update_id).values(turn_ids=took))
    trained = (turns.c.update_id == update_id) & (turns.c.state == TurnState.TRAINED)
    without = select(turns.c.turn_id).where(trained, turns.c.turn_id.not_in(select(samples.c.turn_id)))
    no_longer_stored = db.execute(without.where(turns.c.user == NOBODY)).scalars()
    leave_out(db, list(no_longer_stored), SkipReason.EXPIRED, _EXPIRED)
    _end_without_evidence(db, list(db.execute(without).scalars()))
    return db.execute(update(turns).where(trained).values(state=TurnState.JUDGED, update_id=None)).rowcount


def dead_artifacts(db: Connection) -> list[AnyRow]:
    """`version` and `artifact` of what was retired for forgotten turns and no longer serves: its weights go too."""
    query = select(policy_versions.c.version, policy_versions.c.artifact, policy_versions.c.gate).where(
        policy_versions.c.state == VersionState.ROLLED_BACK, policy_versions.c.artifact.is_not(None)
    )
    return [row for row in db.execute(query) if "forgotten" in (row.gate or {})]


def artifact_removed(db: Connection, version: int) -> None:
    db.execute(update(policy_versions).where(policy_versions.c.version == version).values(artifact=None))
