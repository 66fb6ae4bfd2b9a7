"""What is known of single clients: the texts that they put beside, around or in place of their users' words.

Everything that is true of one client only is in this file, as tables where it can be. The rest of `collect` knows
kinds of text, not clients. Facts and versions: spec/clients.md; a text that no client sends any more costs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from nextstate.types import Message


class Said(StrEnum):
    """Who speaks in a message that has the user's role."""

    HUMAN = "human"
    CARRIER = "carrier"
    """Facts for the model alone, moved or dropped in the next request: they are no part of the conversation."""
    RETRY = "retry"
    """The client tells the model to go on after a fault; the next request shows what the human had said instead."""
    UNSEEN = "unseen"
    """The client says that the answer showed the user nothing; no part of later history, but evidence."""
    REPORT = "report"
    """A program speaks: a format error, a result of other work. Part of the conversation, but not the human's words."""
    POLL = "poll"
    """A timer speaks, and nobody waits for the answer."""
    SUMMARY = "summary"
    """Stands in place of the beginning of a conversation that grew too long."""


@dataclass(frozen=True, slots=True)
class UserText:
    """A text of the user's role, taken apart."""

    said: Said
    text: str
    """Without date prefix, runtime suffix and wrapping; what the conversation is recognised by."""
    stamped: str
    """The same with its date prefix, which tells two conversations apart that begin with the same words."""
    retry: bool = False
    """The client wrapped the human's words to send them again after a fault."""


# -- wrapping ----------------------------------------------------------------------------------------------------------

_DATE = re.compile(r"\A\[[A-Z][a-z]{2} \d{4}-\d\d-\d\d \d\d:\d\d(?: [^\]\n]{1,40})?\] ?")
# At the end of the first message of the user; with other APIs a line of the system text.
_RUNTIME_SUFFIX = re.compile(r"\bRuntime: agent=[^\n]*\Z")
_RUNTIME_LINE = re.compile(r"(?:^|[\n>])[ \t]*Runtime: (agent=[^\n]*)")
# Mostly a message of its own; where the API joins messages in a row, a part of one.
_CARRIER = "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>", "<<<END_OPENCLAW_INTERNAL_CONTEXT>>>"
# The last of them is Cline's, Roo's and Kilo's: the time, open files, what runs.
_REMINDERS = ("system-reminder", "ide_opened_file", "ide_selection", "environment_details")
# How the same three hand over what a tool gave where they do without tool calls, and what the user said to it.
_TOOL_RESULT = re.compile(r"\A\[[a-z_]+(?: for '[^\n]*')?\] Result:")
_WRAPPED = re.compile(r"\A<(task|feedback|answer|user_message)>(.*)</\1>\Z", re.DOTALL)
_SAID_TO_A_RESULT = ("feedback", "answer", "user_message")

# How mini-swe-agent hands over what its user typed.
_HANDED_OVER = re.compile(
    r"\A(?:The user added a new task|Interrupted by user"
    r"|Commands not executed\. The user rejected your commands with the following message): (?=\S)"
)

_QUEUED = "[Queued user message from a previous active turn; preserved as context only."
_GO_ON = "Continue the current task from the existing transcript, preserving completed work."

_OPENINGS: tuple[tuple[Said, str], ...] = (
    (Said.CARRIER, "<environment_context>"),
    (Said.CARRIER, "<user_instructions>"),
    (Said.CARRIER, "# AGENTS.md instructions for "),
    (Said.RETRY, _GO_ON),
    (Said.RETRY, "Continue the current task from the transcript using the updated tools."),
    (Said.RETRY, "Continue the current task using the updated permissions."),
    (Said.RETRY, "<turn_aborted>"),
    (Said.RETRY, "Your previous turn was interrupted by a gateway restart"),
    (Said.RETRY, "Your previous reply was not delivered to the conversation"),
    (Said.RETRY, "The previous attempt compacted the conversation context"),
    (Said.UNSEEN, "The previous attempt did not produce a user-visible answer."),
    (Said.UNSEEN, "The previous assistant turn recorded reasoning but did not produce a user-visible answer."),
    (Said.UNSEEN, "The previous assistant turn completed its tool calls but did not produce"),
    (Said.UNSEEN, "Your previous response was only an acknowledgement"),
    (Said.REPORT, "[Inter-session message]"),
    (Said.REPORT, "A background task completed. Use this result to reply"),
    (Said.REPORT, "Tool call error:\n\n<error>"),
    (Said.REPORT, "Format error:\n\n<error>"),
    (Said.REPORT, "Continue if you have next steps, or stop and ask for clarification"),
    (Said.REPORT, "Interrupted by user: Temporary interruption caught."),
    (Said.SUMMARY, "The conversation history before this point was compacted into the following summary:"),
    (Said.SUMMARY, "This session is being continued from a previous conversation that ran out of context."),
    (Said.SUMMARY, "Another language model started to solve this problem and produced a summary"),
    (Said.POLL, "Follow the heartbeat monitor scratch context when provided."),
    (Said.POLL, "[OpenClaw heartbeat poll]"),
    (Said.POLL, "Read HEARTBEAT.md if it exists"),
)
_POLL_AS_KEPT = "[OpenClaw heartbeat poll]"


def _without(text: str, opening: str, closing: str) -> str:
    """Text without what stands between two marks, and without the space behind it.

    A regular expression would do, in time that grows with the square of the text.
    """
    kept, at = [], 0
    while (start := text.find(opening, at)) >= 0 and (end := text.find(closing, start)) >= 0:
        kept.append(text[at:start])
        at = end + len(closing)
        while at < len(text) and text[at].isspace():
            at += 1
    return "".join([*kept, text[at:]])


def _without_carrier(text: str) -> str:
    """Text without OpenClaw's, to the end where that was cut off, and without the space before it."""
    opening, closing = _CARRIER
    before, *carriers = text.split(opening)
    return "".join([before.rstrip(), *(carrier.partition(closing)[2] for carrier in carriers)]) if carriers else text


def _between(text: str, opening: str, closing: str) -> str | None:
    start = text.find(opening)
    end = text.find(closing, start)
    return None if start < 0 or end < 0 else text[start + len(opening) : end].strip()


def _runtime_suffix(text: str) -> re.Match[str] | None:
    return _RUNTIME_SUFFIX.search(text, text.rfind("\n") + 1)


def read_user_text(text: str) -> UserText:
    """Take a text of the user's role apart: who speaks, and what of it is said."""
    text = _without_carrier(text)
    if (runtime := _runtime_suffix(text)) is not None:
        text = text[: runtime.start()]
    for tag in _REMINDERS:
        text = _without(text, f"<{tag}>", f"</{tag}>")
    text = text.strip()
    if not text:
        return UserText(Said.CARRIER, "", "")
    date = _DATE.match(text)
    stamp, bare = (date[0].strip(), text[date.end() :].strip()) if date else ("", text)
    retry = bare.startswith(_QUEUED)
    if retry:
        bare = bare.partition("\n")[2].partition(f"\n\n{_GO_ON}")[0].strip()
        if not bare:
            return UserText(Said.RETRY, "", stamp, retry=True)
    said = next((said for said, opening in _OPENINGS if bare.startswith(opening)), Said.HUMAN)
    if said is Said.POLL:
        bare = _POLL_AS_KEPT
    if said is Said.HUMAN and _TOOL_RESULT.match(bare):
        found = (_between(bare, f"<{tag}>", f"</{tag}>") for tag in _SAID_TO_A_RESULT)
        spoken = next((words for words in found if words), None)
        said, bare = (Said.REPORT, bare) if spoken is None else (Said.HUMAN, spoken)
    if said is Said.HUMAN:
        bare = _HANDED_OVER.sub("", bare)
        wrapped = _WRAPPED.match(bare)
        bare = bare if wrapped is None else wrapped[2].strip()
    return UserText(said, bare, f"{stamp} {bare}" if stamp else bare, retry)


_THOUGHT = re.compile(r"<(think|thinking)>.*?(?:</\1>|\Z)", re.DOTALL)
_DIRECTIVE = re.compile(r"\[\[(?:reply_to_current|reply_to:[^\]\n]*|audio_as_voice)\]\]\s*")


def read_answer_text(text: str) -> str:
    """An answer without what clients cut out of it before they send it back: thoughts in tags, directives."""
    return _DIRECTIVE.sub("", _THOUGHT.sub("", text)).strip()


# -- session keys in the text ------------------------------------------------------------------------------------------


def runtime_key(messages: Sequence[Message]) -> str | None:
    """The session that OpenClaw names in its runtime line, at the end of an early user message or in the system text.

    Its work on the side runs under names of its own, which say nothing.
    """
    for message in messages[:4]:
        content = message.get("content")
        if message["role"] not in ("system", "user") or not isinstance(content, str):
            continue
        content = _without_carrier(content)
        line = _RUNTIME_LINE.search(content) if message["role"] == "system" else _runtime_suffix(content)
        if line is None:
            continue
        fields = dict(part.strip().split("=", 1) for part in line[0].split("|") if "=" in part)
        key = fields.get("sessionId") or fields.get("session", "")
        return None if not key or "internal-session-effects" in key else key
    return None


def is_openclaw(messages: Sequence[Message]) -> bool:
    """Whether OpenClaw wrote the system text."""
    return any(message["role"] == "system" and "openclaw:attempt:" in _text(message) for message in messages[:2])


# -- work on the side --------------------------------------------------------------------------------------------------

_SIDE_SYSTEM: tuple[tuple[str, str], ...] = (
    ("Generate a concise session title", "title"),
    ("You are a title generator", "title"),
    ("Write an Activity recap for someone", "recap"),
    ("You are a context summarization a", "summary"),  # assistant: OpenClaw; agent: opencode
    ("Current model identity:", "probe"),
    ("You are a helpful AI assistant tasked with summarizing conversations", "summary"),
    ("Summarize this coding conversation", "title"),
    ("Analyze if this message indicates a new conversation topic", "title"),
)
_SIDE_USER: tuple[tuple[str, str], ...] = (
    ("Pre-compaction memory flush.", "memory flush"),
    ("Follow the heartbeat monitor scratch context when provided.", "heartbeat"),
    ("Read HEARTBEAT.md if it exists", "heartbeat"),
    ("[OpenClaw heartbeat poll]", "heartbeat"),
    ("[cron:", "scheduled run"),
    ("Reply with OK. Do not use tools.", "probe"),
    ("Your task is to create a detailed summary of the conversation so far", "summary"),
    ("Provide a detailed prompt for continuing our conversation above", "summary"),
    ("You are performing a CONTEXT CHECKPOINT COMPACTION", "summary"),
    ("### Task:\nGenerate a concise, 3-5 word title", "title"),
    ("### Task:\nGenerate 1-3 broad tags", "tags"),
    ("### Task:\nSuggest 3-5 relevant follow-up", "suggestions"),
    ("### Task:\nAnalyze the chat history to determine the necessity", "search queries"),
)
# Clients nobody has listed: an instruction, at the very beginning, to make something about a conversation. Only looked
# for where there are neither tools nor a conversation of its own, since a person may ask for such a thing, too.
_MAKE = r"\b(?:generate|create|write|provide|produce|suggest|give|make|return|output|summari[sz]e|come up with)\b"
_THING = r"\b(?:titles?|headlines?|names?|summary|summaries|recap|topics?|tags|labels?|follow-?up questions?)\b"
_TALK = (
    r"\b(?:conversations?|chats?|chat history|sessions?|threads?|dialogues?|transcript|first message|user's message)\b"
)
_ANY = r"(?:(?!\n\n).)"
_ABOUT_A_TALK = (
    re.compile(rf"{_MAKE}{_ANY}{{0,100}}{_THING}{_ANY}{{0,100}}{_TALK}", re.I | re.DOTALL),
    re.compile(
        rf"{_MAKE}{_ANY}{{0,60}}\b(?:conversation|chat|session|thread)\s+(?:title|name|summary|recap)\b",
        re.I | re.DOTALL,
    ),
    re.compile(rf"\bsummari[sz]e (?:the|this|that|our|following|above|below|\s)*{_TALK}", re.I),
    re.compile(r"\byou (?:are|act as) (?:an? )?(?:\w+ ){0,4}(?:title|summary|topic|tag|name)s? generator", re.I),
)
_QUOTES_A_TALK = re.compile(
    r"<(?:conversation|chat_history|transcript|messages?|history)>|(?:^|\n)\W{0,3}(?:user|human|assistant)\W{0,3}:",
    re.I,
)


# The first words of requests that only ask whether anybody answers: Claude Code's for what is left of its quota, and
# the connection tests of others.
_PROBES = ("quota", "hi", "hello", "test", "ping", "ok", "foo", ".")


def known_side_work(
    messages: Sequence[Message], has_tools: bool, said: Sequence[UserText], max_tokens: int | None = None
) -> str | None:
    """What a request does for a client whose texts are known; None when it is none of these.

    Args:
        said: the texts of the user's role in `messages`, in order.
        max_tokens: of the answer, as the client set it.
    """
    spoken = [text for text in said if text.said is not Said.CARRIER]
    alone = len(spoken) == 1 and len([message for message in messages if message["role"] != "system"]) == 1
    if max_tokens == 1 and alone and spoken[0].text.lower() in _PROBES:
        return "probe"
    if spoken and spoken[-1].said is Said.POLL:
        return "heartbeat"
    for opening, what in _SIDE_USER:
        if spoken and spoken[-1].text.startswith(opening):
            return what
    if has_tools:
        return None
    system = system_text(messages)
    return next((what for opening, what in _SIDE_SYSTEM if system.startswith(opening)), None)


def likely_side_work(messages: Sequence[Message], has_tools: bool, said: Sequence[UserText]) -> bool:
    """Whether a request of an unknown client asks for something about a conversation that is not its own."""
    if has_tools or any(message["role"] in ("assistant", "tool") for message in messages):
        return False
    system = system_text(messages)
    if system:
        return asks_about_a_talk(system)
    spoken = [text.text for text in said if text.said is not Said.CARRIER]
    quotes = len(spoken) > 1 or any(_QUOTES_A_TALK.search(text) for text in spoken)
    return bool(spoken) and quotes and asks_about_a_talk(spoken[0])


# The same inside a conversation, behind its last answer. People ask such things, too, and then the request is the
# conversation: it is taken for the client's only where it reads like an instruction for a machine.
_OF_OURS = re.compile(
    r"\b(?:this|our|the|above|whole|entire|current|previous) (?:\w+ ){0,2}?"
    r"(?:conversation|chat|discussion|dialogue|transcript|message history)\b"
    r"|\b(?:this|our) (?:\w+ )?(?:session|thread|exchange)\b"
    r"|\b(?:conversation|chat|discussion) (?:so far|above|title)\b",
    re.I,
)
_WISH = re.compile(
    r"\b(?:titles?|headline|name|label|describe|summary|summari[sz]ing|summari[sz]e|recap|topics?|tags|labels|description"
    r"|follow-?up questions|keywords)\b",
    re.I,
)
_ASK = re.compile(rf"{_MAKE}|\b(?:name|label|describe|recap|condense)\b", re.I)
_TITLE = re.compile(rf"{_MAKE}.{{0,60}}\b(?:title|headline|summary|recap)\b|\bsummari[sz]e\b", re.I)
_COUNT = r"(?:\d+|one|two|three|four|five|six|seven|eight|nine|ten)"
_FOR_A_MACHINE = tuple(
    re.compile(pattern, re.I)
    for pattern in (
        rf"\b{_COUNT}\s?(?:-|–|to|or)\s?{_COUNT}[\s-](?:words?|characters|chars)\b",
        r"\b(?:omit|omitting|without|no|remove|exclude|do not (?:use|include|add)|don't (?:use|include|add))"
        r" (?:(?:any|enclosing|the) )?(?:punctuation|preamble|lead-?in|prefix|quot(?:es|ation marks)|explanations?"
        r"|additional text|extra text|markdown|formatting)\b",
        r"\b(?:reply|respond|answer|output|return|provide|give)(?: with)? \W{0,2}(?:only|just|nothing but)\b"
        r"|\b(?:title|name|summary|description) only\b"
        r"|\b(?:only|just) (?:reply|respond|answer|output|return|provide)\b|\bnothing else\b",
        r"\bas a (?:system )?prompt\b|\bfuture context\b|\bcontext window\b|\bwill be used (?:as|for|to|in)\b",
        r"\bjson (?:object|array|list|format)\b|\bcomma-separated\b|<(?:title|summary|name|topic)>",
    )
)
_HINTS_AT_A_MACHINE = tuple(
    re.compile(pattern, re.I)
    for pattern in (
        rf"\b{_COUNT}[\s-](?:words?|characters|chars|sentences?)\b",
        r"\b(?:include|cover|following|format)[^\n]{0,20}:\s*\n\W{0,3}\w",
        r"\bmarkdown\b|\bbullet points\b|\bheadings\b",
        r"\buse (?:english|the same language|the language)\b|\bsame language as\b",
        r"\bkey (?:facts|points|decisions|information)\b|\bimportant (?:details|information|facts)\b",
    )
)
_A_PERSON = re.compile(
    r"\b(?:I|I'm|I'd|I'll|I've|me|my|mine|myself|thanks|thank you|pls)\b|\A\W*(?:can|could|would|will) you\b", re.I
)
_NAMES_FOR_IT = re.compile(
    r"\b(?:titre|titel|título|titolo|resum\w+|résum\w+|riassu\w+|zusammenfass\w+|fass\w* .{0,60}\bzusammen)\b"
    r"|标题|標題|总结|總結|概括|主题|タイトル|要約|제목|요약|заголов|резюм|назван",
    re.I,
)


def asks_like_a_machine(text: str) -> bool:
    """Whether what follows an answer is a client's instruction to name or sum up the conversation before it."""
    if not _wishes_for_a_talk(text) or _A_PERSON.search(text):
        return False
    if any(pattern.search(text) for pattern in _FOR_A_MACHINE):
        return True
    return sum(pattern.search(text) is not None for pattern in _HINTS_AT_A_MACHINE) >= 2


def may_be_the_clients(text: str) -> bool:
    """Whether what follows an answer may be such an instruction; whether it is one shows only later."""
    return _wishes_for_a_talk(text) or any(pattern.search(text[:120]) for pattern in (_TITLE, _NAMES_FOR_IT))


def _wishes_for_a_talk(text: str) -> bool:
    """Whether a text begins by asking for a title, a summary or the like of a conversation."""
    begin = text[:250]
    return all((_ASK.search(text[:120]), _WISH.search(begin), _OF_OURS.search(begin)))


def asks_about_a_talk(text: str) -> bool:
    """Whether an instruction begins by asking for something about a conversation."""
    found = (pattern.search(text[:400]) for pattern in _ABOUT_A_TALK)
    return any(match is not None and match.start() < 80 for match in found)


# -- sub-agents --------------------------------------------------------------------------------------------------------

_SUBAGENT_OPENINGS = ("[Subagent Context]", "[Subagent Task]")


def is_subagent(said: Iterable[UserText], headers: dict[str, str]) -> bool:
    """Whether the client says that a sub-agent speaks."""
    if headers.get("x-openai-subagent") or '"thread_source":"subagent"' in headers.get("x-codex-turn-metadata", ""):
        return True
    first = next((text.text for text in said if text.said is Said.HUMAN), "")
    return first.startswith(_SUBAGENT_OPENINGS)


def _text(message: Message) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""


def system_text(messages: Sequence[Message]) -> str:
    text = "\n".join(_text(message) for message in messages if message["role"] == "system")
    return _BILLING.sub("", text).strip()


_BILLING = re.compile(r"\A\s*x-anthropic-billing-header:[^\n]*")
