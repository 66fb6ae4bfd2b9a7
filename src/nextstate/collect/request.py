"""A request as `collect` reads it, whatever dialect it came in, and what it says about its own session."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from nextstate.collect import clients
from nextstate.types import Message

MAX_KEY = 256
"""Characters of a session key; longer ones are stored as their hash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """A request for an answer."""

    user: str
    """Whose conversations it may continue; those of others are never looked at."""
    messages: tuple[Message, ...]
    """In OpenAI's chat shape, content flattened to a string."""
    tools: tuple[Mapping[str, Any], ...] = ()
    model: str = "policy"
    """As the client named it; a name that ends in '-aux' marks side work."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Names in lower case."""
    body: Mapping[str, Any] = field(default_factory=dict)
    """The client's other fields: session_id, turn_type, prompt_cache_key, metadata and so on."""
    dialect: str = "chat"
    """chat, responses, messages or completions."""
    continues: int | None = None
    """The turn that the request names as the one it continues."""
    retry_count: int = 0
    """How often the client says it has sent this before."""
    received_at: float = field(default_factory=time.time)
    """Seconds since the epoch."""


_ID_HEADERS = ("x-session-affinity", "session_id", "session-id", "x-claude-code-session-id")
_ACCOUNT_SESSION = re.compile(r"_session_([0-9A-Za-z-]{8,})\Z")
_SEGMENT = re.compile(r":\d+\Z")


def session_key(incoming: Incoming) -> str | None:
    """The session that the client names, by the most trusted of its names; None when it names none.

    OpenClaw puts a count behind its ids that grows with every compaction and reset; the session is the id without it.
    """
    metadata = _mapping(incoming.body.get("metadata"))
    account = metadata.get("user_id")
    account_session = _mapping(account).get("session_id")
    if account_session is None and isinstance(account, str) and (found := _ACCOUNT_SESSION.search(account)):
        account_session = found[1]
    facts = _mapping(incoming.body.get("client_metadata"))
    cache_key = incoming.body.get("prompt_cache_key")
    candidates = (
        incoming.headers.get("x-session-id"),
        incoming.body.get("session_id"),
        *(incoming.headers.get(name) for name in _ID_HEADERS),
        # Some share one cache key between all their conversations; an id is long and has digits in it.
        cache_key if isinstance(cache_key, str) and len(cache_key) >= 16 and re.search(r"\d", cache_key) else None,
        metadata.get("session_id"),
        account_session,
        facts.get("session_id"),
        facts.get("thread_id"),
        clients.runtime_key(incoming.messages),
    )
    key = next((str(value) for value in candidates if isinstance(value, str | int) and str(value).strip()), None)
    if key is None:
        return None
    if clients.is_openclaw(incoming.messages):
        key = _SEGMENT.sub("", key)
    return key if len(key) <= MAX_KEY else f"sha256:{sha256(key.encode()).hexdigest()}"


def marked_as_side(incoming: Incoming) -> bool | None:
    """What the client itself says: part of the conversation (False), on the side (True), or nothing (None)."""
    turn_type = incoming.headers.get("x-turn-type") or incoming.body.get("turn_type")
    if isinstance(turn_type, str) and turn_type.lower() in ("main", "side"):
        return turn_type.lower() == "side"
    return True if incoming.model.endswith("-aux") else None


def trace_id(incoming: Incoming) -> str | None:
    """The trace that a request belongs to (W3C traceparent): one run of an agent, with what it does on the side."""
    parts = incoming.headers.get("traceparent", "").split("-")
    return parts[1] if len(parts) >= 4 and len(parts[1]) == 32 and parts[1].strip("0") else None


def _mapping(value: Any) -> Mapping[str, Any]:
    """A mapping as it is, one spelt as JSON read, anything else as an empty one."""
    if isinstance(value, str) and value.startswith("{"):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return {}
    return value if isinstance(value, Mapping) else {}
