"""Where a request belongs: which session, after which answer, and whether it tells us what came of that answer."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection

from nextstate.collect.spine import answer_prefixes, request_spine
from nextstate.store.store import AnyRow
from nextstate.store.turns import Placement, find_by_answer, find_by_request, find_session, newest_turn
from nextstate.types import Message, SkipReason, Source, TurnState

_UNFINISHED = (SkipReason.ABORTED, SkipReason.ENGINE_FAULT, SkipReason.SERVER_STOPPED)


def place(
    db: Connection,
    user: str,
    messages: Sequence[Message],
    session_key: str | None,
    side: bool,
    retry_count: int,
) -> Placement:
    """Decide where a request belongs. The first line that applies decides:

    | case                                             | kind         | session      | parent         | next state |
    | ------------------------------------------------ | ------------ | ------------ | -------------- | ---------- |
    | marked as side request                           | side         | key, content | none           | none       |
    | a key that no session has yet                    | new          | a new one    | none           | none       |
    | repeats an answer that nothing has followed yet  | continuation | the answer's | the answer     | what follows it |
    | the same request, unfinished or sent as a retry  | retry        | the same     | the same       | none       |
    | the same request, finished; has history or a key | regeneration | the same     | the same       | none       |
    | repeats an answer that something has followed    | continuation | the answer's | the answer     | what follows it; the store keeps the first |
    | a known key, and a history nobody recognises     | continuation | the key's    | its newest turn | after the last answer |
    | a known key, no history                          | new          | the key's    | none           | none       |
    | anything else                                    | new          | a new one    | none           | none       |

    Answers are looked for from the last assistant message backwards: a client that shortens or rewrites the beginning
    of its history still meets its last answer. With a key, only that session's turns are looked at.

    Args:
        user: turns of other users are never looked at.
        session_key: the client's own id of the conversation, when it names one.
        side: the client says that this is not part of the conversation: a title, a summary.
        retry_count: how often the client has sent this very request before, as it says itself.
    """  # noqa: E501
    session_id = find_session(db, user, session_key) if session_key is not None else None
    unknown_key = session_key is not None and session_id is None
    answered = None if unknown_key else _last_known_answer(db, user, messages, session_id)
    if side:
        if session_id is None and answered is not None:
            session_id = answered[0].session_id
        because = "The client marked this request as a side request."
        return _placement(session_id, session_key, None, "side", because)
    if unknown_key:
        return _placement(None, session_key, None, "new", "The client named a session that is new here.")

    has_history = any(message["role"] == "assistant" for message in messages)
    if answered is not None and not answered[0].continued and retry_count == 0:
        return _continuation(session_key, messages, *answered)
    earlier = find_by_request(db, user, request_spine(messages), session_id)
    if earlier is not None:
        same = f"the same request as turn {earlier.turn_id}"
        if retry_count > 0:
            because = f"The client says that it sends {same} again."
            return _placement(earlier.session_id, session_key, earlier.parent_turn_id, "retry", because)
        known_conversation = has_history or session_id is not None
        # Two people may open with the same words at the same moment: that alone makes no retry.
        generating = earlier.state == TurnState.GENERATING and known_conversation
        if generating or earlier.reason in _UNFINISHED:
            because = f"This is {same}, which was not answered to its end."
            return _placement(earlier.session_id, session_key, earlier.parent_turn_id, "retry", because)
        if known_conversation and earlier.state != TurnState.GENERATING:
            because = f"This is {same}, which has an answer: the client wants another."
            return _placement(earlier.session_id, session_key, earlier.parent_turn_id, "regeneration", because)
    if answered is not None:
        return _continuation(session_key, messages, *answered)
    if session_id is None:
        because = "No answer of ours was recognised in it." if has_history else "It has no history."
        return _placement(None, None, None, "new", because)
    if not has_history:
        return _placement(session_id, session_key, None, "new", "The client named the session; it has no history.")
    newest = newest_turn(db, session_id)
    if newest is None:
        because = "The client named the session, which has no finished turn yet."
        return _placement(session_id, session_key, None, "new", because)
    last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
    because = f"The client named the session and rewrote its history; its newest turn is {newest.turn_id}."
    after = tuple(messages[last + 1 :])
    return _placement(session_id, session_key, newest.turn_id, "continuation", because, after)


def _last_known_answer(
    db: Connection, user: str, messages: Sequence[Message], session_id: int | None
) -> tuple[AnyRow, int] | None:
    """The turn that gave the last answer in the request which is ours, and where in the request that answer is."""
    for index, spine in reversed(answer_prefixes(messages)):
        row = find_by_answer(db, user, spine, session_id)
        if row is not None:
            return row, index
    return None


def _continuation(session_key: str | None, messages: Sequence[Message], row: AnyRow, index: int) -> Placement:
    after = list(messages[index + 1 :])
    # Behind an answer that somebody else gave or edited, nothing says anything about ours.
    later = [i for i, message in enumerate(after) if message["role"] == "assistant"]
    because = f"It repeats the conversation up to the answer of turn {row.turn_id} and adds to it."
    if later:
        after = after[: later[0]]
        because = f"It repeats the conversation up to the answer of turn {row.turn_id}; later answers are not ours."
    return _placement(row.session_id, session_key, row.turn_id, "continuation", because, tuple(after))


def _placement(
    session_id: int | None,
    session_key: str | None,
    parent_turn_id: int | None,
    kind: str,
    because: str,
    next_state: tuple[Message, ...] = (),
) -> Placement:
    return Placement(
        session_id=session_id,
        session_key=session_key,
        parent_turn_id=parent_turn_id,
        kind=kind,
        because=because,
        next_state=next_state,
        source=_source(next_state),
    )


def _source(next_state: Sequence[Message]) -> Source | None:
    """The most trusted of those who speak in a next state."""
    roles = {message["role"] for message in next_state}
    if not roles:
        return None
    if "user" in roles:
        return Source.USER
    return Source.TOOL if "tool" in roles else Source.ENVIRONMENT
