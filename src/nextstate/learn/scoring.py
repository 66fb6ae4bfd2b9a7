"""Log-probs of tokens in a tree of sequences, without ever holding rows by vocabulary.

    tree of ids  --body-->  hidden [N, H]  --pick-->  places [P, H]  --output layer, some places at a time-->  [P, M]

A place is a row at which a token is predicted: only those reach the output layer. Of the logits of a block of places
the wanted log-probs and the most likely tokens are taken, and the block is forgotten; the backward pass computes it
once more. Student, teacher and base go through this one function, each place at the temperature it was sampled with.

Memory, in numbers for each place: H for its hidden state, M for its log-probs, 2 to get back; and two or three times
BLOCK times vocabulary for the block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from peft import PeftModel
from torch import Tensor, nn

from nextstate.engines.packed import RowKeys, Segment, forward_packed, hidden_packed
from nextstate.errors import ModelError
from nextstate.learn.tree import Tree

BLOCK = 128
"""Places whose logits exist at one time: 25 MB at 49,152 tokens in float32; larger blocks are not faster on a CPU."""


@dataclass(frozen=True, slots=True)
class Scores:
    logprobs_PM: Tensor
    """Nats of the tokens asked for, over the whole vocabulary; has a gradient where the hidden states have one."""
    top_PK: Tensor
    """Ids of the K most likely tokens, the most likely first."""
    top_logprobs_PK: Tensor
    """Theirs, without gradient."""


class Scorer:
    """A causal model in two parts, and the way through both. Computes with whatever weights the model has just now."""

    def __init__(self, model: nn.Module, *, bfloat16: bool = False) -> None:
        """bfloat16: multiply in it, whatever the weights are held in."""
        causal: Any = model.get_base_model() if isinstance(model, PeftModel) else model
        self.body: nn.Module = causal.base_model
        head = causal.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise ModelError(
                f"The model's output layer is a {type(head).__name__}; the trainer computes log-probs by blocks of a "
                "plain linear one. Take it out of learn.targets if it is named there, or choose another model."
            )
        self.head = head
        self._dtype = torch.bfloat16 if bfloat16 else head.weight.dtype
        self._frozen_head = head.weight.to(self._dtype) if not head.weight.requires_grad else None
        self._check(model)

    def hidden(self, tree: Tree, *, first: int = 0, past: RowKeys | None = None, rows: int | None = None,
               remember: RowKeys | None = None) -> Tensor:  # fmt: skip
        """[N, H] what the output layer reads, for the rows of a tree from `first` up to `rows`, None: all.

        Args:
            past: keys and values of the rows before `first`.
            remember: takes those of the rows computed.
        """
        rows = len(tree) if rows is None else rows
        segments = [
            Segment(run.start - first, run.length, before=run.before) for run in tree.runs if first <= run.start < rows
        ]
        mixed = self._dtype == torch.bfloat16 != self.head.weight.dtype
        with torch.autocast(self.head.weight.device.type, torch.bfloat16, enabled=mixed):
            return hidden_packed(
                self.body, tree.ids[first:rows], tree.positions[first:rows], segments, past=past, remember=remember
            )

    def score(self, hidden_PH: Tensor, ids_PM: Tensor, temperature_P: Tensor, *, top_k: int = 0) -> Scores:
        """Log-probs of M tokens at each place, and which K tokens are the most likely there."""
        weight, bias = self._frozen_head, self.head.bias
        if weight is None:
            weight = self.head.weight.to(self._dtype)
        hidden_PH = hidden_PH.to(self._dtype)
        found = _LogProbs.apply(hidden_PH, weight, bias, ids_PM, temperature_P, top_k)  # type: ignore[no-untyped-call]
        return Scores(*found)

    def _check(self, model: nn.Module) -> None:
        """Some models do more to their logits than the output layer does: caps, scales.

        Raises:
            ModelError: this is one; what it serves is not what would be trained.
        """
        tree = Tree()
        tree.add([0, 1])
        with torch.no_grad():
            expected = forward_packed(model, [tree.ids], keep=[0, 1])
            found = self.head(self.hidden(tree).to(self.head.weight.dtype))
        if not torch.allclose(found.to(expected.dtype), expected, rtol=0.05, atol=0.05):
            raise ModelError(
                "The model changes its logits after the output layer (a cap or a scale), which the trainer does not "
                "know how to follow. Choose another model (Llama, Qwen2.5, Qwen3, SmolLM2...)."
            )


class _LogProbs(torch.autograd.Function):
    """log softmax(hidden W^T / temperature) at chosen ids, BLOCK places at a time, forward and backward.

    With g the gradient at the chosen ids and p the softmax, that of the logits is (sum over ids of g (1[v = id] - p_v))
    / temperature.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_PH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        ids_PM: Tensor,
        temperature_P: Tensor,
        top_k: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        places = len(hidden_PH)
        temperature_P1 = temperature_P[:, None]
        sums, logprobs, top, top_logprobs = [], [], [], []
        for at in range(0, places, BLOCK):
            block = slice(at, at + BLOCK)
            logits_BV = _logits(hidden_PH[block], weight_VH, bias_V, temperature_P1[block])
            sums_B1 = logits_BV.logsumexp(-1, keepdim=True)
            sums.append(sums_B1)
            logprobs.append(logits_BV.gather(1, ids_PM[block]) - sums_B1)
            likely = logits_BV.topk(top_k, dim=-1)
            top.append(likely.indices)
            top_logprobs.append(likely.values - sums_B1)
        found = torch.cat(logprobs), torch.cat(top), torch.cat(top_logprobs)
        ctx.save_for_backward(hidden_PH, weight_VH, bias_V, ids_PM, temperature_P1, torch.cat(sums))
        ctx.mark_non_differentiable(found[1], found[2])
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden_PH, weight_VH, bias_V, ids_PM, temperature_P1, sums_P1 = ctx.saved_tensors
        gradient_PM = gradients[0]
        of_hidden = torch.empty_like(hidden_PH)
        of_weight = torch.zeros_like(weight_VH) if ctx.needs_input_grad[1] else None
        of_bias = torch.zeros_like(bias_V) if bias_V is not None and ctx.needs_input_grad[2] else None
        for at in range(0, len(hidden_PH), BLOCK):
            block = slice(at, at + BLOCK)
            hidden_BH, gradient_BM, temperature_B1 = hidden_PH[block], gradient_PM[block], temperature_P1[block]
            logits_BV = _logits(hidden_BH, weight_VH, bias_V, temperature_B1)
            of_logits = logits_BV.sub_(sums_P1[block]).exp_().mul_(-gradient_BM.sum(-1, keepdim=True))
            of_logits.scatter_add_(1, ids_PM[block], gradient_BM).div_(temperature_B1)
            of_logits = of_logits.to(hidden_PH.dtype)
            of_hidden[block] = of_logits @ weight_VH
            if of_weight is not None:
                of_weight.addmm_(of_logits.T, hidden_BH)
            if of_bias is not None:
                of_bias += of_logits.sum(0)
        return of_hidden, of_weight, of_bias, None, None, None


def _logits(hidden_BH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, temperature_B1: Tensor) -> Tensor:
    """[B, V] logits over temperature, in float32 at least."""
    logits_BV = F.linear(hidden_BH, weight_VH, bias_V)
    return logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32)).div_(temperature_B1)


def score_replies(scorer: Scorer, sequences: Sequence[Sequence[int]], starts: Sequence[int]) -> list[list[float]]:
    """Log-probs of ids[start:] of each sequence at temperature 1, without gradient, all in one pass."""
    tree = Tree()
    paths = tree.add_all([ids[:-1] for ids in sequences])
    places = [row for path, start in zip(paths, starts, strict=True) for row in path[start - 1 :]]
    targets = [token for ids, start in zip(sequences, starts, strict=True) for token in ids[start:]]
    with torch.no_grad():
        hidden = scorer.hidden(tree)
        ids_P1 = torch.tensor(targets, device=hidden.device)[:, None]
        found = scorer.score(hidden[places], ids_P1, hidden.new_ones(len(places))).logprobs_PM[:, 0]
    lengths = [len(ids) - start for ids, start in zip(sequences, starts, strict=True)]
    return [part.tolist() for part in torch.split(found, lengths)]
