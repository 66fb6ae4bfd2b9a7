"""The text that a model writes into what a client reads: text, reasoning, tool calls; while it is written.

An answer is a row of runs with markers between them:

    <think>⏎reasoning⏎</think>⏎⏎text⏎<tool_call>⏎{...}⏎</tool_call>⏎<tool_call>⏎{...}⏎</tool_call>

* Line ends next to a marker belong to the marker, and so does a run of nothing but whitespace; neither is shown. All
  other text is shown to the letter. What turns out to be no call is text, and its markers are no markers.
* `<think>` opens reasoning where a run begins and nowhere else: whoever writes about the marker is not thinking.
  Reasoning goes on until `</think>`, whatever else it holds, or to the end of the answer.
* `</think>` outside of reasoning is text: what came before it has been shown as text already.
* A bare call in the llama form is one where a run begins and nowhere else: JSON in the midst of an answer is an answer.

Whatever is decided is decided by the text alone and never by how it was cut into pieces.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import NoReturn

from nextstate.chat.events import AnswerEvent, ReasoningDelta, TextDelta, ToolCall
from nextstate.chat.formats import CLOSE_CALL, CLOSE_THINK, OPEN_CALL, OPEN_THINK, PYTHON_TAG, OutputFormat
from nextstate.chat.stops import overlap

_LINE_ENDS = "\r\n"
_BLANK = re.compile(r"\s*+")
_BLANK_BEHIND_CALL = re.compile(r"\s*+(?:;\s*+)?")
"""Calls in the llama form have a semicolon between them."""
_CALL_MARKER = re.compile(f"{OPEN_CALL}|{CLOSE_CALL}")
_BARE_CALLS = ('{"name":', '{"parameters":{', '{"arguments":{', '{"type":"function"')
"""How a call without a marker begins, whitespace left out. JSON that begins otherwise is an answer in JSON."""
_ARGUMENTS = re.compile(r'"(?:parameters|arguments)"\s*:')
_ID_LETTERS = string.ascii_letters + string.digits


def new_call_id() -> str:
    """28 letters and digits; some clients drop everything else and cut at 40."""
    return "call" + "".join(secrets.choice(_ID_LETTERS) for _ in range(24))


class _Mode(Enum):
    TEXT = auto()
    REASONING = auto()
    CALL = auto()
    """The held text begins with what may be a call."""


class OutputParser:
    """Takes the text of an answer piece by piece and gives what of it is certain."""

    def __init__(
        self,
        form: OutputFormat,
        *,
        parse_tools: bool,
        in_reasoning: bool = False,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        """Args:
        parse_tools: whether the request offers tools; else a call is text like any other.
        in_reasoning: whether the prompt has opened the reasoning, as `opens_reasoning` tells.
        new_id: makes the ids of calls; none may come twice.
        """
        self._think = form.reasoning == "think"
        self._llama = parse_tools and form.tools == "llama"
        self._call_markers = () if not parse_tools else (PYTHON_TAG,) if self._llama else (OPEN_CALL,)
        self._new_id = new_id
        self.malformed: list[str] = []
        """Attempts at a call that were none, as written; they are in the text too."""

        self._mode = _Mode.REASONING if self._think and in_reasoning else _Mode.TEXT
        self._behind_marker = self._mode is _Mode.REASONING
        """Whether a marker stands before this run."""
        self._run_begins = True
        """Whether nothing of this run has been shown yet."""
        self._blank = _BLANK
        """What counts as a run of nothing."""
        self._held = ""
        """Text that is not decided."""
        self._gap = ""
        """Text before a call that is shown if the call turns out to be none."""
        self._scanned = 0
        """How much of the held text has been searched for the call's end."""
        self._braces: _ObjectEnd | None = None
        self._calls = 0
        self._events: list[AnswerEvent] = []

    def add(self, text: str) -> list[AnswerEvent]:
        """What is certain now and was not before."""
        self._held += text
        return self._advance(ended=False)

    def finish(self) -> list[AnswerEvent]:
        """The rest, now that no more text comes."""
        return self._advance(ended=True)

    def _advance(self, *, ended: bool) -> list[AnswerEvent]:
        self._events = []
        going = True
        while going:
            if self._mode is _Mode.TEXT:
                going = self._read_text(ended)
            elif self._mode is _Mode.REASONING:
                going = self._read_reasoning(ended)
            else:
                going = self._read_llama_call(ended) if self._llama else self._read_hermes_call(ended)
        return self._events

    # Each of these takes what is certain from the held text and says whether another one may go on.

    def _read_reasoning(self, ended: bool) -> bool:
        if not self._pass_run((CLOSE_THINK,), ended):
            return False
        self._held = self._held[len(CLOSE_THINK) :]
        self._begin_run(_Mode.TEXT)
        return True

    def _read_text(self, ended: bool) -> bool:
        if self._run_begins:
            match = self._blank.match(self._held)
            blank = match.group() if match else ""
            rest = self._held[len(blank) :]
            squeezed = "".join(rest.split()) if self._llama else ""
            if self._think and rest.startswith(OPEN_THINK):
                self._held = rest[len(OPEN_THINK) :]
                self._begin_run(_Mode.REASONING)
                return True
            if self._llama and squeezed.startswith(_BARE_CALLS):
                self._gap, self._held = blank, rest
                self._begin_call()
                return True
            undecided = (self._think and OPEN_THINK.startswith(rest)) or (
                self._llama and any(begin.startswith(squeezed) for begin in _BARE_CALLS)
            )
            if undecided and not ended:
                return False
        if not self._pass_run(self._call_markers, ended):
            return False
        self._begin_call()
        return True

    def _read_hermes_call(self, ended: bool) -> bool:
        start = len(OPEN_CALL)
        for marker in _CALL_MARKER.finditer(self._held, max(start, self._scanned)):
            body = self._held[start : marker.start()]
            if _ends_inside_string(body):  # the marker is in an argument
                self._scanned = marker.end()
                continue
            call = _parse_call(body) if marker.group() == CLOSE_CALL else None
            if call is None:
                self._refuse_hermes_call()
            else:
                self._accept(call, marker.end())
            return True
        self._scanned = max(self._scanned, len(self._held) - len(CLOSE_CALL) + 1)
        if ended:
            self._refuse_hermes_call()
        return ended

    def _refuse_hermes_call(self) -> None:
        # Up to the nearest marker, whatever the strings in it look like: a later call may be a good one.
        marker = _CALL_MARKER.search(self._held, len(OPEN_CALL))
        end = len(self._held)
        if marker is not None:
            end = marker.end() if marker.group() == CLOSE_CALL else marker.start()
        self.malformed.append(self._held[:end])
        self._show_refused(end)

    def _read_llama_call(self, ended: bool) -> bool:
        start = len(PYTHON_TAG) if self._held.startswith(PYTHON_TAG) else 0
        if self._braces is None:
            body = self._held[start:].lstrip()
            if not body and not ended:
                return False
            if body.startswith("{"):
                self._braces = _ObjectEnd(len(self._held) - len(body))
        end = self._braces.find(self._held) if self._braces is not None else None
        if end is None:
            # An object that is still open may hold the tag in a string; without an object the next tag decides.
            tag = self._held.find(PYTHON_TAG, start) if ended or self._braces is None else -1
            if tag < 0 and not ended:
                return False
            end = tag if tag >= 0 else len(self._held)
            call = None
        else:
            call = _parse_call(self._held[start:end])
        if call is not None:
            self._accept(call, end)
            return True
        attempt = self._held[:end]
        if start > 0 or _ARGUMENTS.search(attempt):
            self.malformed.append(attempt)
        self._show_refused(end)
        return True

    def _begin_run(self, mode: _Mode) -> None:
        """A marker has been passed, and something new begins behind it."""
        self._mode, self._behind_marker, self._run_begins = mode, True, True
        self._blank, self._gap = _BLANK, ""

    def _begin_call(self) -> None:
        self._mode, self._scanned, self._braces = _Mode.CALL, 0, None

    def _accept(self, call: tuple[str, str], end: int) -> None:
        self._events.append(ToolCall(self._calls, self._new_id(), *call))
        self._calls += 1
        self._held = self._held[end:]
        self._begin_run(_Mode.TEXT)
        if self._llama:
            self._blank = _BLANK_BEHIND_CALL

    def _show_refused(self, end: int) -> None:
        """Show the held text up to `end`, which is no call, and go on as text behind it."""
        self._mode = _Mode.TEXT
        self._show(self._gap + self._held[:end])
        self._held, self._gap = self._held[end:], ""

    def _pass_run(self, markers: Sequence[str], ended: bool) -> bool:
        """Show what certainly belongs to the run. True: the held text now begins with one of the markers."""
        found = min((at for marker in markers if (at := self._held.find(marker)) >= 0), default=-1)
        if found < 0 and ended:
            if not (self._run_begins and self._behind_marker and self._held.isspace()):
                self._show(self._held)
            self._held = ""
            return False
        if found >= 0:
            body = self._held[:found]
        else:
            body = self._held[: len(self._held) - max((overlap(self._held, marker) for marker in markers), default=0)]
        # Line ends wait: whether they are shown depends on what comes next.
        shown = "" if self._run_begins and self._blank.fullmatch(body) else body.rstrip(_LINE_ENDS)
        self._show(shown)
        self._gap, self._held = (
            (body[len(shown) :], self._held[found:]) if found >= 0 else ("", self._held[len(shown) :])
        )
        return found >= 0

    def _show(self, text: str) -> None:
        if self._run_begins and self._behind_marker:
            text = text.lstrip(_LINE_ENDS)
        if not text:
            return
        self._run_begins = False
        delta = ReasoningDelta if self._mode is _Mode.REASONING else TextDelta
        last = self._events[-1] if self._events else None
        if isinstance(last, delta):
            self._events[-1] = delta(last.text + text)
        else:
            self._events.append(delta(text))


class _ObjectEnd:
    """Finds the brace that closes a JSON object in a text that grows; every character is looked at once."""

    def __init__(self, start: int) -> None:
        """Args:
        start: where the object's first brace is.
        """
        self._at = start
        self._depth = 0
        self._in_string = self._escaped = False

    def find(self, text: str) -> int | None:
        """The place behind the closing brace; None as long as there is none. No more calls once it is found."""
        for at in range(self._at, len(text)):
            char = text[at]
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._in_string, self._escaped = char != '"', char == "\\"
            elif char == '"':
                self._in_string = True
            elif char == "{":
                self._depth += 1
            elif char == "}":
                self._depth -= 1
                if self._depth == 0:
                    return at + 1
        self._at = len(text)
        return None


def _parse_call(text: str) -> tuple[str, str] | None:
    """Name and compact arguments of a call, markers left out; None when it is not one."""
    try:
        call = _loads(text)
        if not isinstance(call, dict):
            return None
        name, arguments = call.get("name"), call.get("arguments", call.get("parameters"))
        if isinstance(arguments, str):
            arguments = _loads(arguments)
        if not (isinstance(name, str) and name and isinstance(arguments, dict)):
            return None
        compact = json.dumps(arguments, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        (name + compact).encode()  # half a surrogate pair cannot be sent
    except (ValueError, RecursionError):
        return None
    return name, compact


def _loads(text: str) -> object:
    return json.loads(text, parse_constant=_not_json)


def _not_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _ends_inside_string(text: str) -> bool:
    """Whether the beginning of a JSON text, which is right so far, stops inside a string."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return error.msg.startswith("Unterminated string")
    except (ValueError, RecursionError):
        return False
    return False
