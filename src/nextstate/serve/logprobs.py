"""Log-probs of sampled tokens, as OpenAI's clients read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nextstate.serve.answer import SampledToken

_LEAST = -9999.0
"""JSON has no minus infinity."""


def chat_logprobs(tokenizer: Any, tokens: Sequence[SampledToken]) -> dict[str, Any]:
    """The `logprobs` of a chat completion: every sampled token once, reasoning, markers and end token included."""
    content = [
        _entry(tokenizer, token.id, token.logprob)
        | {"top_logprobs": [_entry(tokenizer, other, logprob) for other, logprob in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokenizer: Any, tokens: Sequence[SampledToken], offset: int) -> dict[str, Any]:
    """The `logprobs` of a plain completion.

    Args:
        offset: characters of the answer before the first of these tokens.
    """
    texts = [_text(tokenizer, token.id) for token in tokens]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [max(token.logprob, _LEAST) for token in tokens],
        "top_logprobs": [
            {_text(tokenizer, other): max(logprob, _LEAST) for other, logprob in token.top} for token in tokens
        ],
        "text_offset": offsets,
    }


def _entry(tokenizer: Any, token: int, logprob: float) -> dict[str, Any]:
    text = _text(tokenizer, token)
    # A token may be a part of a character only; what its bytes are, its text does not tell.
    spelled = None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode())
    return {"token": text, "logprob": max(logprob, _LEAST), "bytes": spelled}


def _text(tokenizer: Any, token: int) -> str:
    return str(tokenizer.decode([token]))
