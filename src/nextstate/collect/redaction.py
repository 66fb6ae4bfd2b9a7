"""What is taken out of texts before they are stored: keys, e-mail addresses, card numbers, and patterns of your own.

The model reads and writes the whole text; only what is written down lacks these. Patterns find what looks like
something: a key in a form nobody has thought of goes through, and a number that happens to pass the check of a card's
does not.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nextstate.config import StoreConfig
from nextstate.types import Message

_KEYS = re.compile(
    r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----(?:[\w+/=\s:,]|-(?!-)){1,20000}-----END [A-Z ]{0,30}PRIVATE KEY-----"
    r"|\b(?:sk|pk|rk)[-_][\w-]{16,}"  # OpenAI, Anthropic, Stripe
    r"|\bns-[\w-]{43}"  # our own
    r"|\bgh[oprsu]_\w{30,}|\bgithub_pat_\w{30,}|\bglpat-[\w-]{20,}"
    r"|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"
    r"|\bAIza[\w-]{35}|\bya29\.[\w-]{20,}"
    r"|\bxox[abeoprs]-[\w-]{10,}"
    r"|\bhf_\w{30,}"
    r"|\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{10,}",  # JSON web tokens
)
_EMAILS = re.compile(r"\b[\w.%+-]{1,64}@[a-z0-9-]{1,63}(?:\.[a-z0-9-]{1,63}){1,8}\b", re.IGNORECASE)
_CARDS = re.compile(r"(?<![\d.])\d(?:[ -]?\d){12,18}(?![\d.]*\d)")


def _is_card(number: str) -> bool:
    """The check digit of ISO/IEC 7812 (Luhn): every second digit from the right doubled, digits summed, divisible by
    10."""
    digits = [int(digit) for digit in number if digit.isdigit()][::-1]
    doubled = (2 * digit - 9 if digit > 4 else 2 * digit for digit in digits[1::2])
    return (sum(digits[::2]) + sum(doubled)) % 10 == 0


_BUILT_IN = {"keys": _KEYS, "emails": _EMAILS, "cards": _CARDS}
_TEXTS = ("content", "reasoning_content")
_CHECKS: Mapping[str, Callable[[str], bool]] = {"cards": _is_card}


@dataclass(frozen=True, slots=True, kw_only=True)
class Redactor:
    """Finds and replaces; one without patterns leaves everything as it is."""

    patterns: tuple[tuple[str, re.Pattern[str]], ...] = ()
    """Kind and what it looks like, in the order in which they are looked for."""

    @classmethod
    def of(cls, settings: StoreConfig) -> Redactor:
        own = ((kind, re.compile(pattern)) for kind, pattern in settings.redact_patterns.items())
        return cls(patterns=(*((kind, _BUILT_IN[kind]) for kind in settings.redact), *own))

    def text(self, text: str, found: Counter[str]) -> str:
        """A text with `[redacted: kind]` for whatever is found in it.

        Args:
            found: is counted up, by kind.
        """
        for kind, pattern in self.patterns:
            text = self._replaced(kind, pattern, text, found)
        return text

    def message(self, message: Message, found: Counter[str]) -> Message:
        """The same for what a message says, thinks and calls with; its role and its names are no text."""
        if not self.patterns:
            return message
        said = {name: self.text(message[name], found) for name in _TEXTS if isinstance(message.get(name), str)}
        calls = message.get("tool_calls")
        return {**message, **said, **({"tool_calls": [self._call(call, found) for call in calls]} if calls else {})}

    def _call(self, call: Mapping[str, Any], found: Counter[str]) -> Mapping[str, Any]:
        function = call["function"]
        return {**call, "function": {**function, "arguments": self.text(function["arguments"], found)}}

    def _replaced(self, kind: str, pattern: re.Pattern[str], text: str, found: Counter[str]) -> str:
        def replacement(match: re.Match[str]) -> str:
            if not match.group() or not _CHECKS.get(kind, bool)(match.group()):
                return match.group()
            found[kind] += 1
            return f"[redacted: {kind}]"

        return pattern.sub(replacement, text)
