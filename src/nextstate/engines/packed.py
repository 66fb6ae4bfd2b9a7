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


@dataclass(slots=True)
class RowKeys:
    """Keys and values of all rows of a pass, layer by layer, for rows of a later pass to attend to: no copies."""

    rows: int = 0
    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """[1, H, rows, D] each, without gradient."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of rows that belong to one sequence, or to all sequences of a tree that come by here."""

    start: int
    length: int
    cache: KVCache | None = None
    """Holds the tokens before this run; None where they are rows, or there are none."""
    before: tuple[slice, ...] = ()
    """Rows of the tokens before this run, in order. Where a pass goes on from an earlier one (`past`), rows are counted
    from the earlier one's first, `start` from this one's."""


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: Sequence[Segment],
    past: RowKeys | None = None,
    remember: RowKeys | None = None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention of each segment to itself and to what comes before it; no dropout.

    query is [1, Hq, N, D], key and value are [1, Hkv, N, D]; gives [1, N, Hq, D].

    Args:
        past: the earlier rows that `Segment.before` may name.
        remember: takes this pass's keys and values.
    """
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    # Turning to their positions leaves queries and keys in float32 where all else is multiplied in bfloat16.
    query, key = query.to(value.dtype), key.to(value.dtype)
    if remember is not None:
        remember.layers[layer] = key.detach(), value.detach()
        remember.rows = key.shape[2]
    if torch.is_grad_enabled() and query.requires_grad:
        # Contiguous, so that what the layer after it keeps is this very memory.
        return _Attention.apply(query, key, value, segments, scaling).transpose(1, 2), None  # type: ignore[no-untyped-call]
    outputs = []
    for segment in segments:
        if segment.cache is None:
            k, v = _with_before(segment, key, value, past, layer)
        else:
            rows = slice(segment.start, segment.start + segment.length)
            keys, values = segment.cache.append(layer, key[0, :, rows], value[0, :, rows])
            k, v = keys[None], values[None]
        q = query[:, :, segment.start : segment.start + segment.length]
        outputs.append(_attend(q, k, v, scaling))
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def _with_before(
    segment: Segment, key: Tensor, value: Tensor, past: RowKeys | None = None, layer: int = 0
) -> tuple[Tensor, Tensor]:
    """Keys and values of what comes before a segment and of its own rows: views where they lie in one piece."""
    first = past.rows if past is not None else 0
    pieces = _joined([*segment.before, slice(first + segment.start, first + segment.start + segment.length)], first)
    parts = []
    for piece in pieces:
        if past is not None and piece.stop <= first:
            k, v = past.layers[layer]
            parts.append((k[:, :, piece], v[:, :, piece]))
        else:
            here = slice(piece.start - first, piece.stop - first)
            parts.append((key[:, :, here], value[:, :, here]))
    if len(parts) == 1:
        return parts[0]
    return torch.cat([k for k, _ in parts], dim=2), torch.cat([v for _, v in parts], dim=2)


def _joined(pieces: Sequence[slice], first: int) -> list[slice]:
    """The same rows, neighbours in one slice; a slice does not cross from an earlier pass into this one at `first`."""
    joined = [pieces[0]]
    for piece in pieces[1:]:
        if piece.start == joined[-1].stop != first:
            joined[-1] = slice(joined[-1].start, piece.stop)
        else:
            joined.append(piece)
    return joined


def _mask(q: Tensor, k: Tensor) -> Tensor | None:
    """What is added to the scores of queries that are the last of the keys; None: plain causal, or a single query."""
    queries, keys = q.shape[2], k.shape[2]
    if queries in (1, keys):
        return None
    return torch.full((queries, keys), -torch.inf, dtype=q.dtype, device=q.device).triu_(1 + keys - queries)


def _attend(q: Tensor, k: Tensor, v: Tensor, scaling: float | None) -> Tensor:
    """[1, Hq, L, D]: L queries, which are the last of the keys' tokens, each to all keys up to its own."""
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=_mask(q, k), is_causal=1 < q.shape[2] == k.shape[2], scale=scaling, enable_gqa=True
    )


def _has_kernel(query: Tensor) -> bool:
    """Whether there is one that tells what its way back needs; on other machines that depends on the numbers' type."""
    return query.device.type == "cpu"


_forward_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class _Attention(torch.autograd.Function):
    """Attention of all segments with a backward pass of its own.

    Left to autograd, every segment behind others would keep its own copy of their keys and values until the backward
    pass, and give a gradient as long as all rows together. Here queries, keys, values and outputs are kept once for all
    segments; copies last as long as a segment is being computed, and gradients are added up in place.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, segments: Sequence[Segment], scaling: float | None
    ) -> Tensor:
        _, heads, rows, dim = query.shape
        # In memory [1, N, Hq, D], as the layer behind it reads it.
        output = query.new_empty(1, rows, heads, dim).transpose(1, 2)
        sums = query.new_empty(1, heads, rows, dtype=torch.promote_types(query.dtype, torch.float32))
        for segment in segments:
            own = slice(segment.start, segment.start + segment.length)
            q, (k, v) = query[:, :, own], _with_before(segment, key, value)
            if _has_kernel(query):
                causal, mask = 1 < q.shape[2] == k.shape[2], _mask(q, k)
                output[:, :, own], sums[:, :, own] = _forward_on_cpu(
                    q, k, v, 0.0, causal, attn_mask=mask, scale=scaling
                )
            else:
                output[:, :, own] = _attend(q, k, v, scaling)
        ctx.save_for_backward(query, key, value, output, sums)
        ctx.segments, ctx.scaling = segments, scaling
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, sums = ctx.saved_tensors
        gradient = gradients[0]
        of_query = torch.empty_like(query)
        of_key, of_value = torch.zeros_like(key), torch.zeros_like(value)
        for segment in ctx.segments:
            own = slice(segment.start, segment.start + segment.length)
            q, (k, v) = query[:, :, own], _with_before(segment, key, value)
            if _has_kernel(query):
                causal, mask = 1 < q.shape[2] == k.shape[2], _mask(q, k)
                found = _backward_on_cpu(
                    gradient[:, :, own], q, k, v, output[:, :, own], sums[:, :, own], 0.0, causal,
                    attn_mask=mask, scale=ctx.scaling,
                )  # fmt: skip
            else:  # no kernel that all machines have in common: once more forward, and autograd's way back
                with torch.enable_grad():
                    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
                    found = torch.autograd.grad(_attend(q, k, v, ctx.scaling), (q, k, v), gradient[:, :, own])
            of_query[:, :, own] = found[0]
            at = 0
            for piece in [*segment.before, own]:
                length = piece.stop - piece.start
                of_key[:, :, piece] += found[1][:, :, at : at + length]
                of_value[:, :, piece] += found[2][:, :, at : at + length]
                at += length
        return of_query, of_key, of_value, None, None


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


def hidden_packed(
    body: nn.Module,
    ids: Sequence[int],
    positions: Sequence[int],
    segments: Sequence[Segment],
    *,
    past: RowKeys | None = None,
    remember: RowKeys | None = None,
) -> Tensor:
    """What the output layer reads, at every row of a tree.

    Args:
        body: the model without its output layer.
        ids: [N]
        positions: [N]
        segments: all rows, in order.
        past, remember: as `packed_attention`.

    Returns:
        [N, hidden size]
    """
    device = next(body.parameters()).device
    out = body(
        input_ids=torch.tensor([ids], device=device),
        position_ids=torch.tensor([positions], device=device),
        segments=segments,
        past=past,
        remember=remember,
        use_cache=False,
    )
    hidden: Tensor = out.last_hidden_state[0]
    return hidden
