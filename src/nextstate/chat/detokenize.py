"""Tokens into text while they are sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""How a decoder shows bytes that are not a character, or not yet."""


class Detokenizer:
    """Gives the text of a reply piece by piece; special tokens are left out.

    The pieces joined are the decoded reply, for every sequence of tokens. A character whose bytes are spread over
    several tokens comes with the last of them.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # Some decoders treat the first token of a text in their own way, so new tokens are decoded behind the last
        # ones that gave text. Both begin and end between two characters.
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []

    def add(self, ids: Sequence[int]) -> str:
        """The text that these tokens complete; empty when a character is still open."""
        self._pending.extend(ids)
        text = self._decode(self._context + self._pending)
        if text.endswith(_INCOMPLETE):
            return ""
        return self._take(text)

    def finish(self) -> str:
        """What is still held back: bytes that will not become a character any more."""
        return self._take(self._decode(self._context + self._pending))

    def _take(self, text: str) -> str:
        piece = text[len(self._context_text) :]
        if piece:
            self._context, self._pending = self._pending, []
            self._context_text = self._decode(self._context)
            # A decoder that strips the first token's space shows it only behind another token, so the context's own
            # text, and not `piece`, is what the next pieces come after.
        return piece

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
