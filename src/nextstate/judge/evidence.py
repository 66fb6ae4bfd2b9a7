"""Hard facts about a turn, which need no model: feedback, statuses, notices, degenerate answers.

    feedback ─▶ lost answer ─▶ loop ─▶ user's action ─▶ (user's words: votes decide) ─▶ statuses of tool results
                 neutral        bad     neutral, bad                                       bad, good, neutral

Everything here looks at form and never at opinion: a status field, an exit code, a line that a program always prints in
the same way. Prose inside a tool result, whatever it claims or asks for, signs nothing, because whoever wrote the
web page or the file that the tool read would otherwise be handing out rewards.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from nextstate.types import FinishReason, Message, TurnToJudge, Verdict, Vote

NAME = "evidence"

Fact = tuple[Vote, str]
"""A vote and the sentence that explains it."""


def evidence(turn: TurnToJudge, *, data_results: bool = True) -> Verdict | None:
    """The verdict that facts alone give, or None where they decide nothing.

    Args:
        data_results: count a tool result that is data and shows no error as good, see `returned_data`.
    """
    fact = (
        explicit_feedback(turn)
        or lost_answer(turn)
        or degenerate_answer(turn.answer)
        or malformed_call(turn)
        or user_action(turn)
        or (None if user_words(turn) else tool_status(turn, data_results=data_results))
    )
    if fact is None:
        return None
    value, reason = fact
    return Verdict(turn_id=turn.turn_id, judge=NAME, value=value, reason=reason)


def explicit_feedback(turn: TurnToJudge) -> Fact | None:
    """What the user sent to /v1/feedback; it outranks everything else."""
    if turn.feedback is None:
        return None
    return turn.feedback.value, f"The user gave feedback: {turn.feedback.value.name.lower()}."


def lost_answer(turn: TurnToJudge) -> Fact | None:
    """An answer that broke off or was replaced by a fault of the service: evidence of nothing."""
    if turn.finish_reason is FinishReason.ABORTED:
        return Vote.NEUTRAL, "The answer was cut off from outside, so it shows nothing."
    if _SERVICE_FAULT_ANSWER.match(turn.answer):
        return Vote.NEUTRAL, "The answer is an error message of the service, not of the model."
    return None


# --- the answer itself ---

_LETTER = re.compile(r"[^\W\d_]")
_MIN_LOOP_CHARS = 60
_MIN_REPEATS = 4


def degenerate_answer(answer: str) -> Fact | None:
    """An empty answer, or one that says the same thing over and over."""
    if not answer.strip():
        return Vote.BAD, "The answer is empty."
    if _repeats_a_sentence(answer) or _ends_in_a_cycle(answer):
        return Vote.BAD, "The answer repeats itself over and over."
    return None


def malformed_call(turn: TurnToJudge) -> Fact | None:
    """A tool call that is not valid was never made, whatever follows."""
    if turn.malformed_calls:
        return Vote.BAD, "The answer holds a tool call that is not valid, so no tool was called."
    return None


def _repeats_a_sentence(answer: str) -> bool:
    """One sentence of 12 characters or more, at least four times, and at least half of the whole answer."""
    sentences = [" ".join(part.lower().split()) for part in re.split(r"(?<=[.!?。！？])\s*|\n+", answer)]
    counts: dict[str, int] = {}
    for sentence in sentences:
        if len(sentence) >= 12 and _LETTER.search(sentence):
            counts[sentence] = counts.get(sentence, 0) + 1
    total = sum(map(len, sentences))
    return any(n >= _MIN_REPEATS and n * len(sentence) >= total / 2 for sentence, n in counts.items())


def _ends_in_a_cycle(answer: str) -> bool:
    """The last words are one phrase of 1 to 24 words, at least four times in a row and 60 characters or more."""
    words = answer.lower().split()
    # The last phrase may be incomplete where the token limit fell, so the period is sought by comparing words with
    # those one period earlier, from the end backwards.
    for period in range(1, 25):
        run = 0
        while run + period < len(words) and words[-1 - run] == words[-1 - run - period]:
            run += 1
        tail = words[len(words) - run - period :]
        long_enough = sum(map(len, tail)) >= _MIN_LOOP_CHARS and run + period >= max(_MIN_REPEATS * period, 8)
        if long_enough and _LETTER.search("".join(tail[:period])):
            return True
    return False


# --- what the user did, apart from words ---

# Clients put these in the user's place, whole messages in brackets or angle brackets.
_NOTICE = re.compile(
    r"^\s*(?:[\[<](?:\w+: )?[^\]>\n]{0,20}\b(?:request|generation|turn|response|task|run|execution|tool|context|"
    r"conversation|history|messages?)\b[^\]>\n]{0,40}"
    r"\b(?:interrupted|aborted|cancell?ed|stopped|rejected|compacted|truncated|summari[sz]ed)\b"
    r"|(?:\^C\b.*\s*)+$"
    r"|the user (?:rejected|declined|denied|doesn't want|does not want) (?:this|to)\b"
    r"|tool (?:use|call) (?:was )?(?:rejected|denied|cancell?ed)\b"
    r"|this session is being continued from a previous conversation"
    r"|conversation history was (?:truncated|compacted|summari[sz]ed))",
    re.IGNORECASE,
)
_UNDO = re.compile(r"^\s*/(?:undo|revert|rewind|rollback)\s*$", re.IGNORECASE)
_THUMBS = {"👎": Vote.BAD, "👍": Vote.GOOD}
_SKIN_TONES = re.compile("[\U0001f3fb-\U0001f3ff\ufe0f\\s]")


# Sentences that speak to a judge and not to the assistant: a label in the form of a label, or an order to give one.
# They come with pasted pages and files, and whoever wrote those has no say.
_TO_THE_JUDGE = re.compile(
    r"\\?boxed\s*\{|<\|?/?(?:im_start|im_end|system|assistant|user|score|verdict|reward)\b"
    r"|(?:\b|_)(?:verdict|scores?|label|rating|reward|grade|vote)\W{0,3}(?:[:=]|is|of|to be)\W{0,3}"
    r"(?:[+-]?\d|good|bad|neutral|positive|negative|excellent|perfect|high|max)"
    r"|\b(?:note|message|instructions?|memo|attention|hint|hints|reminder)s? (?:to|for) (?:the |any |all )?(?:\w+ )?"
    r"(?:judges?|evaluators?|graders?|raters?|teachers?|reviewers?|reward model|scorers?|ai)\b"
    r"|\b(?:judges?|evaluators?|graders?|raters?|scorers?|reward model)\b[^.!?\n]{0,12}[:,]"
    r"|\b(?:you are|as) (?:the |an? )?(?:\w+ )?(?:judge|evaluator|grader|rater|reward model)\b"
    r"|\b(?:score|rate|grade|label|mark|judge|classify|treat)\b[^.!?\n]{0,30}"
    r"\b(?:assistant|answer|response|turn|reply|model|conversation)\b[^.!?\n]{0,20}(?:\b(?:as|with|at)\b|[+-]?\d)"
    r"|\b(?:give|assign|award|output|return|emit)\b[^.!?\n]{0,30}\b(?:reward|verdict|full marks|top marks"
    r"|(?:highest|best|top|maximum|perfect|lowest|good|bad) (?:score|rating|grade|label))\b"
    r"|\b(?:ignore|disregard) (?:all |the |any )?(?:previous|prior|above|user|rubric)\b",
    re.IGNORECASE,
)
_PART_END = re.compile(r"(?<=[.!?。！？;])\s+|\n+")
# A role marker at the start of a line: whatever stands from there on poses as somebody else's message.
_FAKE_ROLE = re.compile(
    r"^\W{0,6}(?:assistant|system|user|human|ai|tool|judge|evaluator)\W{0,3}:", re.IGNORECASE | re.MULTILINE
)


def user_words(turn: TurnToJudge) -> list[str]:
    """What the user wrote after the answer, in order.

    Without notices that the client put into the user's mouth, without sentences that speak to a judge, and without what
    follows a line that poses as another message.
    """
    texts = [text_of(message) for message in turn.next_state if message.get("role") == "user"]
    own = (_own_words(text) for text in texts if not _NOTICE.match(text))
    return [text for text in own if text.strip()]


def _own_words(text: str) -> str:
    role = _FAKE_ROLE.search(text)
    text = text[: role.start()] if role else text
    if not _TO_THE_JUDGE.search(text):
        return text
    return "\n".join(part for part in _PART_END.split(text) if part and not _TO_THE_JUDGE.search(part))


def user_action(turn: TurnToJudge) -> Fact | None:
    """A thumb, an undo command, the same request sent again, or nothing but notices of the client."""
    words = user_words(turn)
    if words:
        thumbs = [_THUMBS.get("".join(dict.fromkeys(_SKIN_TONES.sub("", text)))) for text in words]
        if thumbs[-1] is not None and all(thumb == thumbs[-1] for thumb in thumbs):
            return thumbs[-1], f"The user sent a thumb: {thumbs[-1].name.lower()}."
        if _UNDO.match(words[-1]):
            return Vote.BAD, "The user undid the turn."
        request = _last_request(turn.history)
        if request and all(_folded(text) == _folded(request) for text in words):
            return Vote.NEUTRAL, "The same request was sent again, word for word, as clients do after a fault."
        return None
    notices = [message for message in turn.next_state if _NOTICE.match(text_of(message))]
    if notices and not any(_status_fact(message, turn.answer) for message in _tool_messages(turn.next_state)):
        return Vote.NEUTRAL, "The turn was interrupted, or its history was shortened; neither says how good it was."
    return None


def _last_request(history: Iterable[Message]) -> str:
    texts = [text_of(message) for message in history if message.get("role") == "user"]
    return texts[-1] if texts else ""


def _folded(text: str) -> str:
    return " ".join(text.split()).casefold()


# --- what tools reported ---

# Faults of services and machines. They come before statuses: a fault is never a reward, whatever code it carries.
_INFRASTRUCTURE = re.compile(
    r"\b50[0234]\b[ :]*(?:internal server error|bad gateway|service (?:temporarily )?unavailable|gateway time-?out)"
    r"|\b(?:bad gateway|gateway time-?out|service unavailable|temporarily unavailable)\b"
    r"|\b429\b[ :]*too many requests|\btoo many requests\b|\brate[ _-]?limit(?:ed|error| exceeded| reached)?\b"
    r"|\bquota (?:\w+ ){0,5}exceeded|\boverloaded(?:_error)?\b"
    r"|\bconnection (?:refused|reset|aborted|timed out|to server was lost|closed mid-response)\b"
    r"|\b(?:ECONNREFUSED|ECONNRESET|ETIMEDOUT|EAI_AGAIN|ENOSPC)\b|no space left on device"
    r"|\bno such host\b|\btemporary failure in name resolution\b|\bcould not resolve host\b"
    r"|\bnetwork is unreachable\b|administrator command|under maintenance|being migrated"
    r"|\b(?:sandbox|container|pod|kernel|node|host|worker|instance|session)\b[^\n]{0,40}"
    r"\b(?:evicted|drained|preempted|killed|died|terminated|expired|offline|restarted|was lost)\b"
    r"|\b(?:read|request|upstream|service|server|api|http)[ _-]?time(?:d[ -]?)?out\b",
    re.IGNORECASE,
)
_SERVICE_FAULT_ANSWER = re.compile(r"^\s*(?:API|AI|Internal|Server|Upstream) error\b[.:]", re.IGNORECASE)
# The call itself took too long: that is the turn's doing, unlike a service that does not answer.
_CALL_TIMED_OUT = re.compile(
    r"^\W{0,3}(?:error: )?(?:the )?(?:command|execution|process|script|program|code|tool call) (?:has )?timed out\b"
    r"|^KilledByTimeout\b|^\W{0,3}exceeded \d+ ?s(?:econds)? (?:of )?CPU\b|\bsubprocess\.TimeoutExpired\b",
    re.IGNORECASE | re.MULTILINE,
)

_EXIT_LINE = re.compile(
    r"^\W{0,3}(?:(?:process |command |program |script )?(?:(?:exited|finished|failed|completed)\s+with\s+)?"
    r"(?:exit[ _-]?(?:code|status)|return[ _-]?code|returncode|rc)\s*(?:is|was|of)?\s*[:=]?"
    r"|(?:process|command|program|script) (?:exited|finished|failed|completed) with (?:code|status))"
    r"\s*(-?\d{1,4})\b",
    re.IGNORECASE,
)
# codex writes this before the status.
_ABOVE_STATUS = re.compile(r"\A(?:Chunk ID: \w+\n)?Wall time: [\d.]+ seconds\n")
_OUTSIDE_KILLS = {130: "interrupt", 137: "kill", 143: "terminate", -2: "interrupt", -9: "kill", -15: "terminate"}
# These answer a question with their exit status: 1 means "no" or "different", not "wrong".
_ASKS_BY_STATUS = re.compile(r"(?:^|[|;&(\n\]$])\s*(?:\w*grep|rg|diff|cmp|test|which|pgrep)\b[^|;&\n]*$")

_TESTS_FAILED = re.compile(
    r"^=*\s*(?:[1-9]\d* (?:failed|errors?)\b.* in [\d.:]+\s*(?:s|seconds|$)|.*\b[1-9]\d* failed, \d+ passed\b.*)"
    r"|^Tests:\s+(?:\d+ \w+, )*[1-9]\d* failed\b|^test result: FAILED\b|^FAILED \((?:failures|errors)=\d+"
    r"|^\s*[1-9]\d* failing\b|^--- FAIL: |^FAIL\s+\S+|^FAILED \S+::\S+|^not ok \d+\b",
    re.MULTILINE,
)
_TESTS_PASSED = re.compile(
    r"^=*\s*\d+ passed\b.* in [\d.:]+\s*(?:s|seconds)|^Tests:\s+(?:\d+ (?:skipped|todo), )*\d+ passed, \d+ total"
    r"|^test result: ok\. [1-9]|^\s*[1-9]\d* passing \(|^ok\s+\S+\s+(?:\(cached\)|[\d.]+s)\s*$|^PASS(?:ED)?\s+\S+$"
    r"|^Ran [1-9]\d* tests? in [\d.]+s\s+OK\b|\ball checks (?:have )?passed\W*$",
    re.MULTILINE,
)

_TRACEBACK = re.compile(
    r"^Traceback \(most recent call last\):|^\s+at \S+ \(\S+:\d+:\d+\)|^panic: |^thread '.*' panicked at", re.MULTILINE
)
# How software begins the line that names its own failure: 'Error: ', 'fatal: ', 'SomeError: ', 'main.c:9:5: error: '.
_ERROR_LINE = re.compile(
    r"^(?:error|fatal|fatal error|uncaught exception|unexpected error)(?:\[\w+\])?:\s"
    r"|^(?:\w+\.)*[A-Z]\w*(?:Error|Exception)\b(?: \w+){0,5}:\s"
    r"|^\S+:\d+(?::\d+)?:? (?:fatal )?error\b|^\S*(?:ba|z|c|da)?sh: .*(?:command )?not found$|^\S*(?:ba|z|da)?sh: .*: "
    r"|^YAML parse error|^# \d+ SEARCH/REPLACE block(?:s)? failed|^ERRORS?:\s*$",
    re.IGNORECASE | re.MULTILINE,
)
# How a program that knows no exit codes says in one line that it did not do what it was asked.
_REFUSAL = re.compile(
    r"\W{0,3}(?:unknown|invalid|unrecogni[sz]ed|unsupported|no such|cannot|could not|failed to|unable to"
    r"|permission denied|access denied)\b",
    re.IGNORECASE,
)
_CALLED = re.compile(r"(?:^|[|;&(\n\]$`]|\bsudo |\bxargs |-exec )\s*([a-z][\w.+-]{1,20})\b")

_STATUS_KEYS = ("returncode", "return_code", "exit_code", "exitCode", "exit_status", "exitStatus", "rc")
_FLAG_KEYS = {"is_error": Vote.BAD, "isError": Vote.BAD, "ok": Vote.GOOD, "success": Vote.GOOD, "passed": Vote.GOOD}
_GOOD_WORDS = {"ok", "success", "succeeded", "successful", "confirmed", "completed", "done", "passed"}
_BAD_WORDS = {"error", "failed", "failure", "invalid", "rejected", "denied"}


def tool_status(turn: TurnToJudge, *, data_results: bool = True) -> Fact | None:
    """What the statuses of the tool results say together: one failure is bad, else one success is good.

    Only for a next state in which the user says nothing; a user's words outrank any status.
    """
    messages = _tool_messages(turn.next_state)
    facts = [_status_fact(message, turn.answer) for message in messages]
    for vote in (Vote.BAD, Vote.GOOD):
        for fact in facts:
            if fact is not None and fact[0] is vote:
                return fact
    known = next((fact for fact in facts if fact is not None), None)
    if known is not None:
        return known
    if messages and not any(text_of(message).strip() for message in messages):
        return Vote.NEUTRAL, "The tool returned nothing, and no status."
    if data_results and messages and all(returned_data(text_of(message)) for message in messages):
        if _called_before(turn):
            return Vote.NEUTRAL, "The same call was made before, so its result shows nothing new."
        return Vote.GOOD, "The call returned data without an error."
    return None


# Five words in a row, or five letters of a script without blanks, are somebody's sentence.
_PROSE = re.compile(
    r"(?:[^\W\d_]['’\w]*[ ,;:]+){4}[^\W\d_]|[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]{5}|[^\W\d_\x00-\x7f]{14}"
)
# Whoever wants to reach a judge has to speak to it, and in fewer words than a sentence has.
_SPEAKS_OF_JUDGING = re.compile(
    r"\b(?:scor(?:e|es|ed|ing)|rewards?|rat(?:e|ing)s?|grad(?:e|es|ing)|verdicts?|judg\w*|evaluat\w+|labels?|boxed|hints?"
    r"|feedback|thumbs?|praise\w*|assistant|the (?:answer|model|user|ai)|teacher|reviewer|well done"
    r"|(?:good|bad) (?:job|work|answer)|perfect|excellent|great|thank\w*|terrible|wrong|ignore|instructions?"
    r"|system prompt|vote)\b|[👍👎]",
    re.IGNORECASE,
)
_SAYS_NO = re.compile(
    r"\b(?:no|not|none|never|nothing|unknown|invalid|unable|cannot|could ?n[o']t|can'?t|fail\w*|error\w*|exception"
    r"|denied|refused|rejected|missing|unavailable|incorrect|wrong|warning|timed? ?out|timeout|forbidden"
    r"|unauthori[sz]ed|unsupported|unrecogni[sz]ed|undefined|null|empty|sorry|conflict|aborted|cancell?ed)\b",
    re.IGNORECASE,
)


def returned_data(text: str) -> bool:
    """Whether a tool result is data, such as a number, a record, a table, a listing or code, and shows no error.

    Data says that the call returned what calls of its kind return. It is told by its form: nothing in it reads like a
    sentence or speaks of judging, and it neither begins nor ends by saying no. So a web page, a mail or a planted
    instruction is none. In a listing of five lines or more, such as a source file, one line in three may be prose: then
    the rest decides, and would decide the same without it.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines or _exit_status(text) is not None or any(_SAYS_NO.search(line) for line in (lines[0], lines[-1])):
        return False
    if _TO_THE_JUDGE.search(text):
        return False
    if len(lines) >= 5 and 3 * sum(1 for line in lines if _PROSE.search(line)) <= len(lines):
        return True
    return not _PROSE.search(text) and not _SPEAKS_OF_JUDGING.search(text)


def _called_before(turn: TurnToJudge) -> bool:
    """Whether the conversation holds an earlier answer with the same words and calls."""
    said = _folded(turn.answer)
    return any(_folded(as_answer(message)) == said for message in turn.history if message.get("role") == "assistant")


def as_answer(message: Message) -> str:
    """An assistant's message as one text: what it says, and its tool calls as lines `name(arguments)` behind it."""
    calls = (call["function"] for call in message.get("tool_calls") or ())
    return "\n".join(filter(None, [text_of(message), *(f"{call['name']}({call['arguments']})" for call in calls)]))


def _tool_messages(messages: Iterable[Message]) -> list[Message]:
    return [message for message in messages if message.get("role") in ("tool", "function")]


def _status_fact(message: Message, answer: str) -> Fact | None:
    """What one tool result reports about itself: faults of the machinery, flags, exit status, tests, error lines."""
    text = text_of(message)
    if _NOTICE.match(text):
        return Vote.NEUTRAL, "The call was interrupted or refused before it could show anything."
    fields = _json_object(text)
    ends = _ends(text)
    if fields is None or _reports_failure(fields):
        if _CALL_TIMED_OUT.search(ends):
            return Vote.BAD, "The call ran into its time limit."
        if ends is text and _INFRASTRUCTURE.search(ends) and not _is_listing(text):
            return Vote.NEUTRAL, "A service or the sandbox failed, which is not the turn's doing."
    if message.get("is_error") is True:
        return Vote.BAD, "The tool flagged an error."
    if fields is not None:
        return _json_fact(fields, answer)
    status = _exit_status(text)
    if status is not None:
        return _exit_fact(status, answer, text)
    return _text_fact(ends, answer)


def _json_fact(fields: Mapping[str, Any], answer: str) -> Fact | None:
    for key in _STATUS_KEYS:
        status = fields.get(key)
        if isinstance(status, int) and not isinstance(status, bool):
            output = "".join(str(fields.get(name) or "") for name in ("output", "stdout", "stderr"))
            return _exit_fact(status, answer, output)
    if _reports_failure(fields):
        return Vote.BAD, "The tool returned an error."
    for key, vote in _FLAG_KEYS.items():
        if vote is Vote.GOOD and fields.get(key) is True:
            return Vote.GOOD, f"The tool reported {key}: true."
    word = fields.get("status")
    if isinstance(word, str) and word.lower() in _GOOD_WORDS:
        return Vote.GOOD, f"The tool reported status: {word.lower()}."
    return None


def _reports_failure(fields: Mapping[str, Any]) -> bool:
    if fields.get("error") or any(fields.get(key) is (vote is Vote.BAD) for key, vote in _FLAG_KEYS.items()):
        return True
    word = fields.get("status")
    if isinstance(word, str) and word.lower() in _BAD_WORDS:
        return True
    # The usual shape of an API's refusal: {"code": "invalid_amount", "message": "..."}, with a name for a code.
    code = fields.get("code")
    return isinstance(code, str) and not code.isdigit() and "message" in fields and len(fields) <= 4


def _exit_status(text: str) -> int | None:
    """The status that a harness writes on the first or the last line, and nowhere else."""
    lines = [line for line in _ABOVE_STATUS.sub("", text).splitlines() if line.strip()]
    for line in (lines[-1], lines[0]) if lines else ():
        match = _EXIT_LINE.match(line)
        if match:
            return int(match[1])
    return None


def _exit_fact(status: int, answer: str, output: str) -> Fact | None:
    if status == 0:
        if _TESTS_FAILED.search(_ends(output)):
            return Vote.BAD, "Tests failed."
        return Vote.GOOD, "The call ended with status 0."
    if status in _OUTSIDE_KILLS:
        return Vote.NEUTRAL, f"The call was stopped from outside (status {status}, {_OUTSIDE_KILLS[status]})."
    if status == 1 and _ASKS_BY_STATUS.search(answer.strip()):
        return None
    return Vote.BAD, f"The call ended with status {status}."


def _text_fact(text: str, answer: str) -> Fact | None:
    if _TESTS_FAILED.search(text):
        return Vote.BAD, "Tests failed."
    if _TESTS_PASSED.search(text):
        return Vote.GOOD, "Tests passed."
    if _TRACEBACK.search(text):
        return Vote.BAD, "The call ended in a traceback."
    if _ERROR_LINE.search(text) or (len(text) <= 200 and _REFUSAL.match(text)):
        return Vote.BAD, "The call ended in an error."
    called = set(_CALLED.findall(answer))
    first = text.lstrip().split("\n", 1)[0]
    program = re.match(r"([a-z][\w.+-]{1,20})(?: \(\w+\))?: ", first)
    if program and program[1] in called:
        return Vote.BAD, f"{program[1]} reported a problem."
    return None


def _ends(text: str) -> str:
    """Of a long output the two ends: a harness and a program report there, and between may stand a file or a page that
    tells of outages and errors."""
    return text if len(text) <= 1600 else text[:600] + "\n" + text[-1000:]


def _is_listing(text: str) -> bool:
    """Many lines of output in which a fault is merely mentioned, e.g. a log that the turn asked for."""
    return sum(1 for line in text.splitlines() if line.strip()) > 12


def _json_object(text: str) -> Mapping[str, Any] | None:
    if not text.lstrip().startswith("{"):
        return None
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None


def text_of(message: Message) -> str:
    """A message's content as text; a message without content, such as a bare tool call, is empty."""
    content = message.get("content")
    return content if isinstance(content, str) else ""
