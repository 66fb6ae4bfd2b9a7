"""Several sequences in one forward pass, without padding, each as if it stood alone.

The tokens of all sequences lie side by side in one row, [1, N]; every layer but attention treats tokens one by one,
so only attention has to know where a sequence begins:

    row        t0 t1 t2 | u7 | v0 v1        N = 6
    segments   (0, 3)   (3, 1) (4, 2)       u's first seven tokens are in its key-value cache

The engine decodes and the trainer learns through this same function, so that both see the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

ATTENTION = "nextstate_packed"
"""Name to load a transformers model with: attn_implementation=ATTENTION."""

_FIRST_CAPACITY = 128


@dataclass(slots=True)
class KVCache:
    """Keys and values of one sequence, layer by layer; grows by doubling."""

    length: int = 0
    """Tokens whose keys and values all layers hold."""
    _layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def append(self, layer: int, keys_HND: Tensor, values_HND: Tensor) -> tuple[Tensor, Tensor]:
        """Add N tokens behind `length` in one layer; gives all keys and values, [H, length + N, D]."""
        end = self.length + keys_HND.shape[1]
        held = self._layers.get(layer)
        if held is None or held[0].shape[1] < end:
            heads, _, dim = keys_HND.shape
            capacity = max(_FIRST_CAPACITY, end, 2 * self.length)
            grown = keys_HND.new_empty(heads, capacity, dim), values_HND.new_empty(heads, capacity, dim)
            if held is not None:
                for new, old in zip(grown, held, strict=True):
                    new[:, : self.length] = old[:, : self.length]
            self._layers[layer] = held = grown
        keys, values = held
        keys[:, self.length : end] = keys_HND
        values[:, self.length : end] = values_HND
        return keys[:, :end], values[:, :end]

    def prefix(self, length: int) -> KVCache:
        """A copy of the first `length` tokens."""
        layers = {i: (k[:, :length].clone(), v[:, :length].clone()) for i, (k, v) in self._layers.items()}
        return KVCache(length=length, _layers=layers)


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of rows that belong to one sequence."""

    start: int
    length: int
    cache: KVCache | None = None
    """Holds the tokens before this run; None where the run is the whole sequence."""


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: Sequence[Segment],
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each segment.

    query is [1, Hq, N, D], key and value are [1, Hkv, N, D]; gives [1, N, Hq, D].
    """
    outputs = []
    for segment in segments:
        rows = slice(segment.start, segment.start + segment.length)
        q, k, v = query[:, :, rows], key[:, :, rows], value[:, :, rows]
        if segment.cache is None or segment.cache.length == 0:
            mask, causal = None, segment.length > 1
            if segment.cache is not None:
                segment.cache.append(int(module.layer_idx), k[0], v[0])  # type: ignore[arg-type]
        else:
            keys, values = segment.cache.append(int(module.layer_idx), k[0], v[0])  # type: ignore[arg-type]
            k, v, causal, mask = keys[None], values[None], False, None
            if segment.length > 1:
                mask = torch.ones(segment.length, k.shape[2], dtype=torch.bool, device=q.device).tril(
                    segment.cache.length
                )
        outputs.append(
            F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=causal, dropout_p=dropout, scale=scaling, enable_gqa=True
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2), None


AttentionInterface.register(ATTENTION, packed_attention)
# The segments say all that a mask would; without an entry here transformers would build one.
AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)


def forward_packed(
    model: nn.Module, ids: Sequence[Sequence[int]], keep: Sequence[int], caches: Sequence[KVCache] | None = None
) -> Tensor:
    """Logits at chosen rows of a packed batch.

    Args:
        ids: one list of new tokens for each sequence.
        keep: K rows of the packed batch whose logits are wanted.
        caches: one a sequence, with the tokens before `ids`; extended in place. None: each list is a whole sequence.

    Returns:
        [K, V] logits in the model's dtype.
    """
    device = next(model.parameters()).device
    segments: list[Segment] = []
    positions: list[int] = []
    row = 0
    for i, tokens in enumerate(ids):
        cache = caches[i] if caches is not None else None
        past = cache.length if cache is not None else 0
        segments.append(Segment(row, len(tokens), cache))
        positions.extend(range(past, past + len(tokens)))
        row += len(tokens)
    out = model(
        input_ids=torch.tensor([[t for tokens in ids for t in tokens]], device=device),
        position_ids=torch.tensor([positions], device=device),
        logits_to_keep=torch.tensor(keep, device=device),
        segments=segments,
        use_cache=False,
    )
    for segment in segments:
        if segment.cache is not None:
            segment.cache.length += segment.length
    logits: Tensor = out.logits[0]
    return logits
