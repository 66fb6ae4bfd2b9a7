from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from nextstate.engines import packed
from nextstate.engines.packed import ATTENTION, RowKeys
from nextstate.errors import ModelError
from nextstate.learn import scoring
from nextstate.learn.scoring import Scorer, score_replies
from nextstate.learn.tree import Tree
from tests.learn.conftest import in_float64

VOCABULARY = 61
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "attn_implementation": ATTENTION,
}
KINDS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16)),
}


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """Random, every weight trainable, in float64; one with tied embeddings and biases, one with norms on the heads."""
    torch.manual_seed(0)
    model = KINDS[request.param]()
    in_float64(model)
    return model.eval()


TRUNK = list(range(1, 31))
SESSIONS = {
    "one that only grows": [TRUNK[:n] for n in (12, 20, 30)],
    "passing words close each prompt": [[*TRUNK[:n], 50, 51, n] for n in (5, 12, 20, 30)],
    "several replies to one prompt": [[*TRUNK[:10], *reply] for reply in ([40, 41, 42], [40, 41, 43], [44, 45])],
    "one is the beginning of another": [TRUNK[:10], TRUNK[:20], TRUNK[:20]],
    "nothing in common": [[1, 2, 3, 4, 5], [6, 7, 8, 9]],
    "branches of branches": [[*TRUNK[:10], 40, 41, 42, 43], [*TRUNK[:10], 40, 41, 50, 51], [*TRUNK[:10], 40, 52, 53]],
}
STARTS = {"one that only grows": [8, 15, 24]}


def alone(model: PreTrainedModel, ids: list[int], start: int, temperature: float = 1.0) -> Tensor:
    """[R, V] log-probs at the reply of one sequence, by the library's own attention and output."""
    model.set_attn_implementation("sdpa")
    try:
        logits = model(torch.tensor([ids])).logits[0, start - 1 : -1]
    finally:
        model.set_attn_implementation(ATTENTION)
    return (logits / temperature).log_softmax(-1)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def as_tree(sequences: list[list[int]], starts: list[int]) -> tuple[Tree, list[int]]:
    tree = Tree()
    paths = tree.add_all([ids[:-1] for ids in sequences])
    return tree, [row for path, start in zip(paths, starts, strict=True) for row in path[start - 1 :]]


@pytest.mark.parametrize("name", SESSIONS)
def test_log_probs_and_all_gradients_of_a_tree_are_those_of_its_sequences_one_by_one(model: PreTrainedModel, name: str):
    sequences = SESSIONS[name]
    starts = STARTS.get(name, [len(ids) - 2 for ids in sequences])
    temperatures = [1.0, 0.7, 1.3, 0.9][: len(sequences)]
    tree, places = as_tree(sequences, starts)
    torch.manual_seed(1)
    ids_PM = torch.randint(VOCABULARY, (len(places), 3))
    weights_PM = torch.randn(len(places), 3, dtype=torch.float64)
    lengths = [len(ids) - start for ids, start in zip(sequences, starts, strict=True)]
    each = [t for t, n in zip(temperatures, lengths, strict=True) for _ in range(n)]
    temperature_P = torch.tensor(each, dtype=torch.float64)

    scorer = Scorer(model)
    scores = scorer.score(scorer.hidden(tree)[places], ids_PM, temperature_P, top_k=4)
    (scores.logprobs_PM * weights_PM).sum().backward()
    found = gradients(model)

    parts = [alone(model, ids, start, t) for ids, start, t in zip(sequences, starts, temperatures, strict=True)]
    expected_PV = torch.cat(parts)
    (expected_PV.gather(1, ids_PM) * weights_PM).sum().backward()
    expected = gradients(model)
    assert (scores.logprobs_PM - expected_PV.gather(1, ids_PM)).abs().max().item() < 1e-9
    top = expected_PV.topk(4)
    assert torch.equal(scores.top_PK, top.indices)
    assert (scores.top_logprobs_PK - top.values).abs().max().item() < 1e-9
    assert expected.keys() == found.keys()
    assert all((found[key] - expected[key]).abs().max().item() < 1e-9 for key in expected)
    assert all(expected[key].abs().max().item() > 1e-6 for key in expected if "k_proj.bias" not in key)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=8), min_size=1, max_size=6), st.data())
def test_any_tree_gives_what_its_sequences_give(sequences: list[list[int]], data: st.DataObject):
    torch.manual_seed(0)
    model = KINDS["llama"]()
    in_float64(model)
    starts = [data.draw(st.integers(1, len(ids) - 1)) for ids in sequences]
    tree, places = as_tree(sequences, starts)
    targets = torch.tensor([[t] for ids, start in zip(sequences, starts, strict=True) for t in ids[start:]])
    scorer = Scorer(model)
    ones = torch.ones(len(places)).double()
    found = scorer.score(scorer.hidden(tree)[places], targets, ones).logprobs_PM
    found.square().sum().backward()
    of_tree = gradients(model)
    one_by_one = torch.cat([alone(model, ids, start) for ids, start in zip(sequences, starts, strict=True)])
    expected = one_by_one.gather(1, targets)
    expected.square().sum().backward()
    assert (found - expected).abs().max().item() < 1e-9
    assert all((of_tree[key] - grad).abs().max().item() < 1e-9 for key, grad in gradients(model).items())


def test_a_tree_that_has_grown_goes_on_from_the_keys_of_its_first_rows(model: PreTrainedModel):
    scorer, tree = Scorer(model), Tree()
    tree.add_all(SESSIONS["passing words close each prompt"])
    keys = RowKeys()
    with torch.no_grad():
        first = scorer.hidden(tree, remember=keys)
        hinted = [[*TRUNK[:12], 55, 56, 57], [*TRUNK[:12], 55, 58], [*TRUNK[:30], 50, 51, 30, 59], [60, 59]]
        paths = tree.add_all(hinted)
        grown = torch.cat([first, scorer.hidden(tree, first=len(first), past=keys)])
        for ids, path in zip(hinted, paths, strict=True):
            whole = Tree()
            whole.add(ids)
            assert (grown[path] - scorer.hidden(whole)).abs().max().item() < 1e-9


def test_without_the_kernel_of_the_cpu_the_gradient_is_the_same(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
):
    sequences = SESSIONS["passing words close each prompt"]
    tree, places = as_tree(sequences, [len(ids) - 2 for ids in sequences])
    scorer, found = Scorer(model), []
    for on_cpu in (True, False):
        monkeypatch.setattr(packed, "_has_kernel", lambda _, answer=on_cpu: answer)
        scorer.hidden(tree)[places].sin().sum().backward()
        found.append(gradients(model))
    assert all((found[1][key] - grad).abs().max().item() < 1e-9 for key, grad in found[0].items())


@pytest.mark.parametrize("block", [1, 3, 128])
def test_the_size_of_a_block_changes_nothing(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, block: int):
    monkeypatch.setattr(scoring, "BLOCK", block)
    scorer = Scorer(model)
    torch.manual_seed(2)
    hidden = torch.randn(7, 32, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[1, 5], [2, 2], [3, 60], [4, 0], [5, 7], [6, 6], [7, 1]])
    scores = scorer.score(hidden, ids, torch.full((7,), 0.7, dtype=torch.float64), top_k=2)
    scores.logprobs_PM.square().sum().backward()
    whole = hidden.detach().clone().requires_grad_()
    expected = (scorer.head(whole) / 0.7).log_softmax(-1)
    expected.gather(1, ids).square().sum().backward()
    assert (scores.logprobs_PM - expected.gather(1, ids)).abs().max().item() < 1e-9
    assert (hidden.grad - whole.grad).abs().max().item() < 1e-9


def test_no_more_logits_exist_than_those_of_a_block(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scoring, "BLOCK", 8)
    torch.manual_seed(0)
    scorer = Scorer(KINDS["llama"]().float())
    seen: list[int] = []
    kept: list[int] = []
    real = scoring._logits

    def noted(*args: Tensor) -> Tensor:
        logits = real(*args)
        seen.append(logits.numel())
        return logits

    monkeypatch.setattr(scoring, "_logits", noted)
    hidden = torch.randn(100, 32, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t.numel()), t)[1], lambda t: t):
        scores = scorer.score(hidden, torch.zeros(100, 33, dtype=torch.long), torch.ones(100), top_k=32)
        scores.logprobs_PM.sum().backward()
    assert max(seen) == 8 * VOCABULARY
    assert len(seen) == 2 * 13  # 100 places in blocks of 8, forward and backward
    # the hidden states, the ids, temperature and sum, and the layer's own weights
    assert sorted(kept) == sorted([100 * 32, 100 * 33, 100, 100, VOCABULARY * 32])


def test_replies_are_scored_in_the_order_they_came(model: PreTrainedModel):
    sequences = [[1, 2, 3], [1, 2, 3, 4, 5], [9, 8]]
    found = score_replies(Scorer(model), sequences, [1, 3, 1])
    for ids, start, logprobs in zip(sequences, [1, 3, 1], found, strict=True):
        expected = alone(model, ids, start)[torch.arange(len(ids) - start), torch.tensor(ids[start:])]
        assert logprobs == pytest.approx(expected.tolist(), abs=1e-9)


def test_a_model_that_does_more_to_its_logits_is_refused(monkeypatch: pytest.MonkeyPatch):
    model = KINDS["llama"]()
    real = model.forward

    def capped(*args: object, **kwargs: object) -> object:
        out = real(*args, **kwargs)
        out.logits = out.logits.tanh() * 2
        return out

    monkeypatch.setattr(model, "forward", capped)
    with pytest.raises(ModelError, match="a cap or a scale"):
        Scorer(model)


def test_a_model_whose_output_layer_is_not_plain_is_refused():
    model = KINDS["llama"]()
    model.set_output_embeddings(nn.Sequential(model.get_output_embeddings()))
    with pytest.raises(ModelError, match="is a Sequential"):
        Scorer(model)
