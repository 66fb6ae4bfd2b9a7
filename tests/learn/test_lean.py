from __future__ import annotations

import pytest
import torch
from peft import get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from nextstate.engines.adapters import lora_config
from nextstate.learn.lean import make_lean
from nextstate.learn.scoring import Scorer
from nextstate.learn.tree import Tree
from tests.learn.conftest import in_float64
from tests.learn.test_scoring import KINDS, SESSIONS, SIZES

RANK = 4


def adapted(kind: str, *, lean: bool, bfloat16: bool = False, exact: bool = False) -> nn.Module:
    """A random model with an adapter that is not zero; the same for the same kind."""
    torch.manual_seed(0)
    model: PreTrainedModel = KINDS[kind]().eval().requires_grad_(False)
    peft = get_peft_model(model, lora_config(RANK, 8, "all-linear"))
    torch.manual_seed(1)
    for parameter in peft.parameters():
        if parameter.requires_grad:
            parameter.data += 0.2 * torch.randn_like(parameter)
    if exact:
        in_float64(peft)
    if lean:
        make_lean(peft, bfloat16=bfloat16)
    return peft


def scored(model: nn.Module, *, bfloat16: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs of some tokens of a tree, and the gradients of their squares."""
    tree = Tree()
    tree.add_all(SESSIONS["passing words close each prompt"])
    scorer = Scorer(model, bfloat16=bfloat16)
    ids = torch.tensor(tree.ids)[:, None]
    temperature = torch.ones(len(tree), dtype=scorer.head.weight.dtype)
    logprobs = scorer.score(scorer.hidden(tree), ids, temperature).logprobs_PM
    logprobs.square().mean().backward()
    return logprobs.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", KINDS)
def test_it_computes_what_peft_computes(kind: str):
    expected, gradients = scored(adapted(kind, lean=False, exact=True))
    found, lean_gradients = scored(adapted(kind, lean=True, exact=True))
    assert (found - expected).abs().max().item() < 1e-9
    assert len(gradients) == 2 * 7 * 2  # A and B of seven layers in two blocks
    assert lean_gradients.keys() == gradients.keys()
    assert all((lean_gradients[k] - g).abs().max().item() < 1e-9 for k, g in gradients.items())
    assert all(g.abs().max().item() > 1e-4 for g in gradients.values())


@pytest.mark.parametrize("kind", KINDS)
def test_with_the_adapter_off_it_is_the_base(kind: str):
    model = adapted(kind, lean=True, exact=True)
    tree = Tree()
    tree.add([1, 2, 3, 4])
    with torch.no_grad(), model.disable_adapter():
        found = Scorer(model).hidden(tree)
    torch.manual_seed(0)
    base = KINDS[kind]().eval()
    in_float64(base)
    with torch.no_grad():
        assert (found - Scorer(base).hidden(tree)).abs().max().item() < 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_in_bfloat16_it_is_near_and_what_is_trained_stays_in_float32(kind: str):
    expected, gradients = scored(adapted(kind, lean=True))
    model = adapted(kind, lean=True, bfloat16=True)
    found, coarse = scored(model, bfloat16=True)
    assert found.dtype == torch.float32
    assert 0 < (found - expected).abs().mean().item() < 0.05
    assert {g.dtype for g in coarse.values()} == {torch.float32}
    a, b = (torch.cat([g.flatten() for g in of.values()]) for of in (gradients, coarse))
    assert torch.cosine_similarity(a, b, dim=0).item() > 0.99


def kept_numbers(model: nn.Module, tokens: int) -> tuple[int, int]:
    """How many numbers a forward pass keeps for the way back beside weights, and how large the largest tensor is."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        where = tensor.untyped_storage().data_ptr()
        if where not in weights:
            kept[where] = tensor
        return tensor

    scorer, tree = Scorer(model), Tree()
    tree.add([n % 61 for n in range(tokens)])
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = scorer.hidden(tree)
        scorer.score(hidden, torch.zeros(tokens, 33, dtype=torch.long), torch.ones(tokens)).logprobs_PM.sum()
    return sum(t.untyped_storage().nbytes() // t.element_size() for t in kept.values()), max(
        t.numel() for t in kept.values()
    )


def test_no_more_is_kept_than_is_said():
    tokens, width, inner, heads, pairs, dim = 200, 32, 48, 4, 2, 8
    found, largest = kept_numbers(adapted("llama", lean=True), tokens)
    # in each block: two residuals, query and output, keys and values, gate and up, seven times the adapter's rank,
    # the sum of each head's weights and the deviation of each norm
    block = 2 * width + 2 * heads * dim + 2 * pairs * dim + 2 * inner + 7 * RANK + heads + 2
    # once: the angles of the positions, the last norm, what the output layer read, 33 ids, temperature and sum
    once = 2 * dim + width + 1 + width + 33 + 2
    # the first residual and its norm have no gradient, as the embeddings are frozen
    assert found == tokens * (SIZES["num_hidden_layers"] * block + once - width - 1)
    assert largest <= tokens * max(inner, 33)  # nothing of rows by vocabulary, which is 61


def test_without_it_much_more_is_kept():
    lean, plain = (kept_numbers(adapted("llama", lean=on), 200)[0] for on in (True, False))
    assert plain > 1.4 * lean
