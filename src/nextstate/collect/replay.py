"""Recorded traffic, placed as the server would have placed it, without a model.

A recording is a file of JSON lines. `request` lines hold what a client sent, `scripted_response` lines what the server
answered to the request with the same `seq`, and `event` lines what happened meanwhile: a client that left, a stream
that was cut. Other lines are passed over. The answers are written to the store as if they had been sampled.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha1
from pathlib import Path
from typing import Any

from sqlalchemy import Connection

from nextstate.collect.placement import place
from nextstate.collect.request import Incoming
from nextstate.collect.spine import answer_spine, request_spine
from nextstate.dialects import chat, messages, responses
from nextstate.dialects.reading import Read
from nextstate.errors import NextstateError
from nextstate.store.finding import load_next_state
from nextstate.store.store import Store
from nextstate.store.turns import NewTurn, Placement, finish_turn, leave_out, open_turn
from nextstate.types import FinishReason, Sampling, SkipReason

_DIALECTS = {
    "/chat/completions": ("chat", chat.read_messages, "messages"),
    "/completions": ("completions", chat.read_prompt, "prompt"),
    "/responses": ("responses", responses.read_messages, "input"),
    "/messages": ("messages", messages.read_messages, "messages"),
}
_READ_FIELDS = ("model", "messages", "input", "instructions", "system", "prompt", "tools", "functions")
ID_FIELDS = (
    *("session_id", "conversation_id", "conversation", "thread_id", "prompt_cache_key", "metadata", "client_metadata"),
    *("user", "safety_identifier", "turn_type", "session_done", "previous_response_id"),
)
"""Fields of a body that name a session, a user or a kind of turn."""

NOT_A_TURN = "not_a_turn"
_SAME_MOMENT_S = 0.05
"""A client may send its next request before a recorder has noted the end of the last answer."""
_REFUSED = (400, 401, 402, 403, 404, 405, 406, 410, 411, 413, 414, 415, 422)
"""Statuses after which no client sends the same again; a server that answers so writes nothing down."""


class BadRecording(NextstateError, ValueError):
    """A file that is no recording."""


@dataclass(kw_only=True)
class Recorded:
    """One request of a recording, with what became of it."""

    line: int
    seq: int
    at: float
    """Seconds; never before those of an earlier request."""
    method: str
    path: str
    headers: Mapping[str, str]
    """Names in lower case."""
    body: Mapping[str, Any]
    response: Mapping[str, Any] = field(default_factory=dict)
    events: list[Mapping[str, Any]] = field(default_factory=list)

    took_s: float = 0.0
    """Until its answer ended, however it ended."""

    @property
    def finished_at(self) -> float:
        return self.at + self.took_s

    @property
    def status(self) -> int:
        told = self.response.get("status")
        said = next((event.get("status") for event in self.events if event.get("status")), None)
        return next((status for status in (told, said) if isinstance(status, int)), 200)

    @property
    def aborted(self) -> bool:
        """Whether the client left before the answer was complete."""
        return any(event.get("event") == "client_disconnect" for event in self.events)

    @property
    def failed(self) -> bool:
        """Whether the client got no complete answer for a fault of the server."""
        faults = ("drop", "cut_after", "error_event", "no_finish")
        cut = any(event.get("event") in ("cut", "drop", "error") for event in self.events)
        return cut or self.status >= 400 or any(self.response.get(name) for name in faults)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """Where a request of a recording was placed."""

    seq: int
    session: str | None
    """A label: the same for all requests of a session, and of no other in this recording."""
    kind: str
    parent: int | None
    """`seq` of the request whose answer it continues."""
    next_state: tuple[Mapping[str, str], ...]
    """{"role", "text"} of each message that is kept for its parent: those of the first that follows an answer."""
    reason: str


def replay(path: Path, *, without_ids: bool = False) -> list[Replayed]:
    """Place every request of a recording, in order.

    Args:
        without_ids: first take away all headers, and the fields of bodies that name sessions, users and kinds of turns.

    Raises:
        BadRecording: the file cannot be read, or a line is not what it should be; says which.
    """
    recording = read_recording(path)
    return replay_requests([without_names(request) for request in recording] if without_ids else recording)


def replay_requests(recording: Sequence[Recorded]) -> list[Replayed]:
    """Place requests in order, in a store of their own."""
    with tempfile.TemporaryDirectory(prefix="nextstate-replay-") as folder:
        store = Store.open(f"sqlite:///{folder}/replay.db")
        try:
            return store.write_now(_replay, recording)
        finally:
            store.close()


def _replay(db: Connection, recording: Sequence[Recorded]) -> list[Replayed]:
    replaying = _Replaying(db)
    return [replaying.request(recorded) for recorded in recording]


def without_names(request: Recorded) -> Recorded:
    """A request as a client would send it that names nothing."""
    body = {name: value for name, value in request.body.items() if name not in ID_FIELDS}
    return replace(request, headers={}, body=body)


def incoming_of(request: Recorded, continues: int | None = None) -> Incoming | str:
    """A recorded request as `place` takes it, or why it is no turn: no answer was asked for, or none would be given."""
    path = request.path.partition("?")[0].rstrip("/")
    dialect = next((found for end, found in _DIALECTS.items() if path.endswith(end)), None)
    if request.method != "POST" or dialect is None:
        return f"{request.method} {request.path} asks for no answer of a model."
    name, reader, param = dialect
    given = request.body.get(param)
    if not isinstance(given, list if param == "messages" else list | str):
        kinds = "a list" if param == "messages" else "a list or a text"
        return f"The server would refuse it: '{param}' must be {kinds}; got {_kind(given)}."
    if param == "messages" and (wrong := next((m for m in given if not isinstance(m, Mapping)), None)) is not None:
        return f"The server would refuse it: each of 'messages' must be an object; got {_kind(wrong)}."
    read: Read = reader(request.body)
    if read.unreadable and param != "prompt":  # a prompt may also be given as token ids
        return f"The server would refuse it: '{param}' holds {', '.join(read.unreadable)}; it takes text only."
    if name == "messages" and read.messages and read.messages[-1]["role"] == "assistant":
        return "The server would refuse it: 'messages' ends with one of the assistant."
    if not read.messages:
        return f"The server would refuse it: '{param}' is empty."
    retries = request.headers.get("x-stainless-retry-count", "")
    return Incoming(
        user=_owner(request),
        messages=read.messages,
        tools=read.tools,
        model=str(request.body.get("model") or "policy"),
        headers=request.headers,
        body={key: value for key, value in request.body.items() if key not in _READ_FIELDS},
        dialect=name,
        continues=continues,
        retry_count=int(retries) if retries.isdecimal() else 0,
        received_at=request.at,
    )


class _Replaying:
    """A recording on its way through a store: each request is placed when it came, each answer ends when it ended."""

    def __init__(self, db: Connection) -> None:
        self._db = db
        self._answering: list[tuple[int, Incoming, Recorded]] = []
        self._seqs: dict[int, int] = {}
        self._labels: dict[int, str] = {}
        self._refused: dict[tuple[str, str], str] = {}
        self._responses: dict[str, int] = {}
        self._newest_response: dict[str, int] = {}

    def request(self, recorded: Recorded) -> Replayed:
        self._finish_until(recorded.at)
        incoming = incoming_of(recorded, self._continued(recorded))
        if isinstance(incoming, str):
            return Replayed(
                seq=recorded.seq, session=None, kind=NOT_A_TURN, parent=None, next_state=(), reason=incoming
            )
        placement = place(self._db, incoming)
        session = self._write(recorded, incoming, placement)
        parent = placement.parent_turn_id
        kept = None if parent is None else load_next_state(self._db, parent)
        brought = kept is not None and self._seqs.get(kept[0]) == recorded.seq
        return Replayed(
            seq=recorded.seq,
            session=session,
            kind=placement.kind,
            parent=None if parent is None else self._seqs[parent],
            next_state=tuple(
                {"role": message["role"], "text": str(message.get("content") or "")}
                for message in (placement.next_state if brought else ())
            ),
            reason=re.sub(
                r"\bturn (\d+)", lambda turn: f"request {self._seqs.get(int(turn[1]), '?')}", placement.because
            ),
        )

    def _continued(self, recorded: Recorded) -> int | None:
        """The turn that a request names. Ids of responses are not recorded: one that is new here is the newest's."""
        named, newest = recorded.body.get("previous_response_id"), self._newest_response.get(_owner(recorded))
        if not isinstance(named, str) or newest is None:
            return None
        return self._responses.setdefault(named, newest)

    def _write(self, recorded: Recorded, incoming: Incoming, placement: Placement) -> str:
        """Write a request down; returns the label of its session."""
        if recorded.status in _REFUSED:
            # A server that refuses writes nothing. Whoever comes back to that session gets its label all the same.
            if placement.session_id is not None:
                return self._labels[placement.session_id]
            name = incoming.user, placement.session_key or f"request {recorded.seq}"
            return self._refused.setdefault(name, self._new_label())
        new = NewTurn(
            user=incoming.user,
            placement=placement,
            messages=incoming.messages,
            dialect=incoming.dialect,
            tools=(),
            prompt_ids=(0,),
            request_spine=request_spine(incoming.messages),
            sampling=Sampling(max_tokens=1),
            learn=True,
            received_at=incoming.received_at,
        )
        turn_id, session_id, key = open_turn(self._db, new)
        self._seqs[turn_id] = recorded.seq
        self._answering.append((turn_id, incoming, recorded))
        if session_id not in self._labels:
            self._labels[session_id] = self._refused.get((incoming.user, key)) or self._new_label()
        return self._labels[session_id]

    def _new_label(self) -> str:
        return f"s{len({*self._labels.values(), *self._refused.values()}) + 1}"

    def _finish_until(self, at: float) -> None:
        due = sorted(
            (entry for entry in self._answering if entry[2].finished_at <= at + _SAME_MOMENT_S),
            key=lambda entry: entry[2].finished_at,
        )
        for entry in due:
            self._answering.remove(entry)
            self._finish(*entry)

    def _finish(self, turn_id: int, incoming: Incoming, recorded: Recorded) -> None:
        """Write down what became of a request."""
        if recorded.failed and not recorded.aborted:
            detail = f"The recorded answer failed, with status {recorded.status}."
            leave_out(self._db, [turn_id], SkipReason.ENGINE_FAULT, detail, at=recorded.finished_at)
            return
        said = _said(recorded.response)
        finish = FinishReason.LENGTH if recorded.response.get("finish") == "length" else FinishReason.STOP
        finish_turn(
            self._db,
            turn_id,
            answer=said,
            malformed_calls=0,
            answer_spine=answer_spine(incoming.messages, said),
            reply_ids=(0,),
            reply_logprobs=(0.0,),
            reply_versions=(0,),
            finish_reason=FinishReason.ABORTED if recorded.aborted else finish,
            counted_tokens=1,
            finished_at=recorded.finished_at,
        )
        if incoming.dialect == "responses" and not recorded.aborted:
            self._newest_response[incoming.user] = turn_id


def _kind(value: Any) -> str:
    return "nothing" if value is None else type(value).__name__


def _owner(recorded: Recorded) -> str:
    """Whose request it is: that of a key."""
    return recorded.headers.get("authorization") or recorded.headers.get("x-api-key") or ""


def _said(response: Mapping[str, Any]) -> dict[str, Any]:
    """A scripted answer as a message."""
    message: dict[str, Any] = {"role": "assistant", "content": _text(response.get("text"))}
    if isinstance(response.get("reasoning"), str):
        message["reasoning_content"] = response["reasoning"]
    calls = []
    for call in response.get("tool_calls") or ():
        if isinstance(call, Mapping):
            function = {"name": str(call.get("name") or ""), "arguments": _text(call.get("arguments"))}
            calls.append({"id": str(call.get("id") or ""), "type": "function", "function": function})
    if calls:
        message["tool_calls"] = calls
    return message


# -- reading a file ----------------------------------------------------------------------------------------------------


def read_recording(path: Path) -> list[Recorded]:
    """The requests of a recording, in order, each with its answer and its events.

    Raises:
        BadRecording: the file cannot be read, or a line is not what it should be; says which.
    """
    requests: dict[int, Recorded] = {}
    clock = _Clock()
    for n, line in _lines(path):
        kind = line.get("type")
        if kind not in ("request", "scripted_response", "event"):
            continue
        seq = line.get("seq")
        if not isinstance(seq, int):
            raise BadRecording(f"{path}, line {n}: a line of type '{kind}' needs a whole number 'seq'; got {seq!r}.")
        if kind == "request":
            if seq in requests:
                raise BadRecording(f"{path}, line {n}: there is a request {seq} already, in line {requests[seq].line}.")
            requests[seq] = _request(path, n, seq, line, clock)
            continue
        if seq not in requests:
            raise BadRecording(f"{path}, line {n}: there is no request {seq} before this line of type '{kind}'.")
        if kind == "event":
            requests[seq].events.append(line)
            requests[seq].took_s = max(requests[seq].took_s, _number(line.get("dt")))
        elif isinstance(line.get("response"), dict):
            requests[seq].response = line["response"]
        else:
            raise BadRecording(f"{path}, line {n}: a scripted_response needs an object 'response'.")
    if not requests:
        raise BadRecording(
            f"{path} holds no request, so there is nothing to place. A recording has JSON lines of type request, "
            "scripted_response and event; see docs/sessions.md."
        )
    _make_cuts_alike(requests.values())
    return list(requests.values())


def _lines(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    try:
        with path.open(encoding="utf-8") as file:
            for n, text in enumerate(file, 1):
                if not text.strip():
                    continue
                try:
                    line = json.loads(text)
                except (ValueError, RecursionError) as error:
                    raise BadRecording(f"{path}, line {n}: this is no JSON: {error}.") from error
                if not isinstance(line, dict):
                    raise BadRecording(f"{path}, line {n}: a line must be a JSON object; got {type(line).__name__}.")
                yield n, _mapped(line, _whole) if _HALF.search(text) else line
    except (OSError, UnicodeDecodeError) as error:
        raise BadRecording(f"{path} cannot be read: {error}. It should be a file of JSON lines in UTF-8.") from error


_HALF = re.compile(r"\\u[dD][89a-fA-F]")


def _whole(text: str) -> str:
    """Text without halves of characters, which JSON can spell and a database does not take."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class _Clock:
    """Seconds that never run backwards, though recordings that were made in several goes do."""

    _PAUSE_S = 3600.0

    def __init__(self) -> None:
        self._before, self._offset = 0.0, 0.0

    def at(self, seconds: float) -> float:
        if seconds + self._offset < self._before:
            self._offset = self._before + self._PAUSE_S - seconds
        self._before = seconds + self._offset
        return self._before


def _request(path: Path, n: int, seq: int, line: Mapping[str, Any], clock: _Clock) -> Recorded:
    headers, body = line.get("headers") or {}, line.get("body")
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    try:
        named = {str(name).lower(): str(value) for name, value in pairs}
    except (TypeError, ValueError):
        raise BadRecording(f"{path}, line {n}: 'headers' must be an object or a list of pairs.") from None
    if not isinstance(line.get("path"), str):
        raise BadRecording(f"{path}, line {n}: a request needs a 'path'; got {line.get('path')!r}.")
    if body is not None and not isinstance(body, dict | str):
        raise BadRecording(f"{path}, line {n}: 'body' must be an object; got {type(body).__name__}.")
    return Recorded(
        line=n,
        seq=seq,
        at=clock.at(_number(line.get("t"))),
        method=str(line.get("method") or "POST").upper(),
        path=line["path"],
        headers=named,
        body=body if isinstance(body, dict) else {},
    )


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


_CUT = re.compile(r"\A(.*?)…\[trimmed \d+ chars; full sha1 ([0-9a-f]{6,40})\]…(.*)\Z", re.DOTALL)
_RUNTIME_BEGUN = re.compile(r"\s*\bRuntime: [^\n]*\Z")
_RUNTIME_REST = re.compile(r"\bsession(?:Id)?=[^|\n]+ \| [^\n]*\Z")


def _make_cuts_alike(requests: Collection[Recorded]) -> None:
    """Give texts that were shortened in a recording one form.

    The same text is cut at different places where it was sent and where it came back, or in one of them not at all. A
    cut names the hash of the whole text, so the beginning and that hash stand for it everywhere. OpenClaw's runtime
    line stays behind it, since it belongs to the client and not to the text.
    """
    heads: dict[str, str] = {}

    def note(text: str) -> None:
        if (cut := _CUT.match(text)) is not None:
            heads[cut[2]] = min(heads.get(cut[2], cut[1]), cut[1], key=len)

    for request in requests:
        _walk(request.body, note)
        _walk(request.response, note)
    if not heads:
        return
    widths = {len(name) for name in heads}
    shortest = min(map(len, heads.values()))

    def alike(text: str) -> str:
        cut = _CUT.match(text)
        if cut is not None:
            rest = _RUNTIME_REST.search(cut[3])
            runtime = f"\n\nRuntime: agent=cut | {rest[0]}" if rest else ""
            begun = _RUNTIME_BEGUN.search(cut[1]) if rest else None
            return (cut[1][: begun.start()] if begun else f"{heads[cut[2]]}…{cut[2]}…") + runtime
        if len(text) > shortest:
            whole = sha1(text.encode("utf-8", "surrogatepass")).hexdigest()
            name = next((whole[:width] for width in widths if whole[:width] in heads), None)
            return text if name is None else f"{heads[name]}…{name}…"
        return text

    for request in requests:
        request.body = _mapped(request.body, alike)
        request.response = _mapped(request.response, alike)


def _walk(value: Any, see: Callable[[str], None]) -> None:
    if isinstance(value, str):
        see(value)
    elif isinstance(value, dict):
        for inner in value.values():
            _walk(inner, see)
    elif isinstance(value, list):
        for inner in value:
            _walk(inner, see)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(inner, change) for key, inner in value.items()}
    return [_mapped(inner, change) for inner in value] if isinstance(value, list) else value
