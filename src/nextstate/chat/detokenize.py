"""Tokens into text while they are sampled."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""How a decoder shows bytes that are not a character, or not yet."""


class Detokenizer:
    """Gives the text of a reply piece by piece; special tokens are left out, but for those in `keep`.

    The pieces joined are the decoded reply, for every sequence of tokens. A character whose bytes are spread over
    several tokens comes with the last of them.
    """

    def __init__(self, tokenizer: Any, keep: frozenset[str] = frozenset()) -> None:
        """Args:
        keep: special tokens to show as they are written, such as `OutputFormat.markers`; others are no matter.
        """
        self._tokenizer = tokenizer
        self._hidden = _special_ids(tokenizer, keep)
        # Some decoders treat the first token of a text in their own way, so new tokens are decoded behind the last
        # ones that gave text. Both begin and end between two characters.
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []

    def add(self, ids: Sequence[int]) -> str:
        """The text that these tokens complete; empty when a character is still open."""
        self._pending.extend(one for one in ids if one not in self._hidden)
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
        # What must not be seen is gone already: a decoder can leave out all special tokens or none.
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


@lru_cache(maxsize=16)
def _special_ids(tokenizer: Any, keep: frozenset[str]) -> frozenset[int]:
    """The special tokens that a reply does not show. Asking a tokenizer takes a millisecond, so each is asked once."""
    return frozenset(
        token_id
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if token.special and str(token) not in keep
    )
