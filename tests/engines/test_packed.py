import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nextstate.engines.packed import ATTENTION, KVCache, forward_packed


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """A random model in float64, so that agreement is a matter of the arithmetic's order alone."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation=ATTENTION,
    )
    return LlamaForCausalLM(config).double().eval()


def alone(model: LlamaForCausalLM, ids: list[int]) -> torch.Tensor:
    """[T, V] by the library's own attention."""
    model.set_attn_implementation("sdpa")
    try:
        return model(torch.tensor([ids])).logits[0]
    finally:
        model.set_attn_implementation(ATTENTION)


def test_sequences_side_by_side_compute_what_each_computes_alone(model: LlamaForCausalLM):
    a, b, c = [5, 6, 7, 8], [9], [10, 11, 12]
    logits = forward_packed(model, [a, b, c], keep=[3, 4, 5, 7])
    expected = torch.stack([alone(model, a)[3], alone(model, b)[0], alone(model, c)[0], alone(model, c)[2]])
    assert (logits - expected).abs().max().item() < 1e-9


def test_a_sequence_in_pieces_beside_others_computes_what_it_computes_whole(model: LlamaForCausalLM):
    torch.manual_seed(1)
    ids = torch.randint(97, (300,)).tolist()  # longer than the cache's first capacity
    mine, other = KVCache(), KVCache()
    with torch.no_grad():
        forward_packed(model, [ids[:100], [1, 2, 3]], keep=[0], caches=[mine, other])
        forward_packed(model, [[4], ids[100:299]], keep=[0], caches=[other, mine])
        last = forward_packed(model, [ids[299:], [5]], keep=[0, 1], caches=[mine, other])
        assert (last[0] - alone(model, ids)[-1]).abs().max().item() < 1e-9
        assert (last[1] - alone(model, [1, 2, 3, 4, 5])[-1]).abs().max().item() < 1e-9
    assert (mine.length, other.length) == (300, 5)


def test_a_copied_prefix_goes_its_own_way(model: LlamaForCausalLM):
    cache = KVCache()
    with torch.no_grad():
        forward_packed(model, [[1, 2, 3, 4]], keep=[3], caches=[cache])
        copy = cache.prefix(2)
        there = forward_packed(model, [[9]], keep=[0], caches=[copy])[0]
        here = forward_packed(model, [[5]], keep=[0], caches=[cache])[0]
        assert (there - alone(model, [1, 2, 9])[-1]).abs().max().item() < 1e-9
        assert (here - alone(model, [1, 2, 3, 4, 5])[-1]).abs().max().item() < 1e-9


def test_gradients_of_packed_sequences_are_those_of_each_alone(model: LlamaForCausalLM):
    weight = model.model.layers[0].self_attn.q_proj.weight
    forward_packed(model, [[5, 6, 7], [8, 9]], keep=[2, 4]).log_softmax(-1)[:, 3].sum().backward()
    packed, weight.grad = weight.grad.clone(), None
    for ids in ([5, 6, 7], [8, 9]):
        alone(model, ids)[-1].log_softmax(-1)[3].backward()
    assert (packed - weight.grad).abs().max().item() < 1e-9
    weight.grad = None
