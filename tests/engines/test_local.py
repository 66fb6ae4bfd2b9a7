"""The local engine on the tiny model: exact log-probs, many at once, cancellation, versions that change in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache

from nextstate.engines import adapters, full
from nextstate.engines.adapters import lora_config
from nextstate.engines.local import LocalEngine
from nextstate.engines.model import LoadedModel, load
from nextstate.engines.packed import Segment, forward_packed
from nextstate.errors import AdapterError, AdapterMismatch, ContextLengthExceeded, EngineFault
from nextstate.learn import checkpoint
from nextstate.types import BASE, FinishReason, PolicyRef, Sampling, ScoreRequest, TokenChunk, TokenIds
from tests.conftest import CONTEXT_TOKENS
from tests.learn.conftest import TrainerFactory, make_trainer, shake

__all__ = ["make_trainer"]

POLICY = PolicyRef()
PROMPT: TokenIds = (45, 60, 61, 62, 70)


@pytest.fixture(params=["lora", "full"])
def kind(request: pytest.FixtureRequest) -> str:
    """What a version's folder holds. The engine keeps one contract for both."""
    return str(request.param)


def prepare(engine: LocalEngine, kind: str) -> None:
    if kind == "full":
        engine.prepare_full_weights()
    else:
        engine.prepare_adapters(lora_config(4, 8, "all-linear"))


@pytest.fixture
def own_engine(tiny_model_path: Path, kind: str) -> Iterator[LocalEngine]:
    """An engine whose versions a test may change."""
    running = LocalEngine(load(str(tiny_model_path)), prefix_cache_tokens=2000)
    prepare(running, kind)
    running.start()
    yield running
    running.stop()


@pytest.fixture
def artifacts(make_trainer: TrainerFactory, tmp_path: Path, kind: str) -> list[Path]:
    """Versions 1, 2, ... on disk, each far from the one before."""
    trainer, folders = make_trainer(weights=kind), []
    for version in range(1, 6):
        shake(trainer)
        folders.append(checkpoint.save(trainer, tmp_path, version, probe={}, metrics={}))
    return folders


async def reply(stream: AsyncIterator[TokenChunk]) -> TokenChunk:
    """All chunks as one."""
    chunks = [chunk async for chunk in stream]
    return TokenChunk(
        ids=tuple(i for c in chunks for i in c.ids),
        logprobs=tuple(lp for c in chunks for lp in c.logprobs),
        versions=tuple(v for c in chunks for v in c.versions),
        finish=chunks[-1].finish,
    )


def plain_model(path: Path, artifact: Path | None) -> torch.nn.Module:
    """A version, or the base, as the libraries load it."""
    if artifact is not None and not (artifact / "adapter_config.json").exists():
        return AutoModelForCausalLM.from_pretrained(artifact, dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(path)
    return model if artifact is None else PeftModel.from_pretrained(model, artifact)


def by_plain_transformers(
    path: Path, artifact: Path | None, prompt: TokenIds, ids: TokenIds, temperature: float = 1.0
) -> list[float]:
    """Log-probs of `ids` after `prompt` from one full forward pass of the library, without our attention."""
    model = plain_model(path, artifact)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1)[torch.arange(len(ids)), torch.tensor(ids)].tolist()


async def test_many_replies_at_once_each_carry_the_log_probs_of_a_full_forward_pass(
    engine: LocalEngine, tiny_model_path: Path
):
    prompts = [(*PROMPT, *range(50, 50 + n)) for n in range(12)]
    sampling = Sampling(max_tokens=20, temperature=0.7, seed=3)
    replies = await asyncio.gather(*(reply(engine.generate(p, sampling, POLICY)) for p in prompts))
    for prompt, made in zip(prompts, replies, strict=True):
        expected = by_plain_transformers(tiny_model_path, None, prompt, made.ids, 0.7)
        assert made.logprobs == pytest.approx(expected, abs=1e-3)
        assert len(made.ids) == len(made.logprobs) == len(made.versions)


async def test_a_seed_gives_the_same_reply_alone_and_in_company(engine: LocalEngine):
    sampling = Sampling(max_tokens=30, seed=11)
    alone = await reply(engine.generate(PROMPT, sampling, POLICY))
    others = [reply(engine.generate((*PROMPT, n), Sampling(max_tokens=30, seed=n), POLICY)) for n in range(50, 56)]
    among, *_ = await asyncio.gather(reply(engine.generate(PROMPT, sampling, POLICY)), *others)
    assert among.ids == alone.ids


async def test_the_most_likely_tokens_beside_each_are_those_of_a_full_forward_pass(
    engine: LocalEngine, tiny_model_path: Path
):
    sampling = Sampling(max_tokens=12, temperature=0.7, seed=3, top_logprobs=20)
    chunks = [chunk async for chunk in engine.generate(PROMPT, sampling, POLICY)]
    prompt = PROMPT
    for chunk in chunks:
        ((best, first), *_, (_, last)) = chunk.top_logprobs[0]
        assert len(chunk.top_logprobs[0]) == 20
        assert first == pytest.approx(by_plain_transformers(tiny_model_path, None, prompt, (best,), 0.7)[0], abs=1e-4)
        assert first > last
        assert first >= chunk.logprobs[0]
        prompt = (*prompt, *chunk.ids)


async def test_a_repetition_penalty_counts_the_prompts_tokens_too(engine: LocalEngine, tiny_model_path: Path):
    greedy = Sampling(max_tokens=1, temperature=0)
    best = (await reply(engine.generate(PROMPT, greedy, POLICY))).ids[0]
    prompt = (best, *PROMPT)
    plain = (await reply(engine.generate(prompt, greedy, POLICY))).ids[0]
    other = (await reply(engine.generate((plain, *prompt), replace(greedy, repetition_penalty=1e6), POLICY))).ids[0]
    assert other not in {plain, *prompt}


async def test_a_reply_ends_at_an_end_token_or_at_its_limit(engine: LocalEngine, tiny: LoadedModel):
    made = await reply(engine.generate(PROMPT, Sampling(max_tokens=400, seed=1), POLICY))
    assert made.finish is FinishReason.STOP
    assert made.ids[-1] in tiny.end_ids
    assert not set(made.ids[:-1]) & tiny.end_ids
    cut = await reply(engine.generate(PROMPT, Sampling(max_tokens=1, seed=2), POLICY))
    assert (len(cut.ids), cut.finish in (FinishReason.LENGTH, FinishReason.STOP)) == (1, True)


async def test_a_prompt_without_room_for_an_answer_is_refused_with_both_numbers(engine: LocalEngine):
    with pytest.raises(ContextLengthExceeded, match=rf"{CONTEXT_TOKENS} tokens.*{CONTEXT_TOKENS} tokens long"):
        await reply(engine.generate((60,) * CONTEXT_TOKENS, Sampling(max_tokens=1), POLICY))


async def test_a_reply_stops_at_the_end_of_the_context(engine: LocalEngine):
    made = await reply(engine.generate((60,) * (CONTEXT_TOKENS - 2), Sampling(max_tokens=50, seed=5), POLICY))
    assert len(made.ids) <= 2


async def test_a_closed_stream_frees_its_place(engine: LocalEngine):
    streams = [engine.generate(PROMPT, Sampling(max_tokens=400, seed=n), POLICY) for n in range(3)]
    for stream in streams:
        await anext(stream)
        await stream.aclose()
    async with asyncio.timeout(5):
        while engine.load != (0, 0):
            await asyncio.sleep(0.01)


async def test_scores_are_those_of_a_full_forward_pass_and_choices_follow_the_last_token(
    engine: LocalEngine, tiny_model_path: Path
):
    ids = (*PROMPT, *range(50, 90), *range(60, 120))
    request = ScoreRequest(ids=ids, start=5, choices=(50, 99), temperature=0.8)
    scores, again = await engine.score([request, request], BASE)
    assert scores.logprobs == pytest.approx(
        by_plain_transformers(tiny_model_path, None, ids[:5], ids[5:], 0.8), abs=1e-4
    )
    for choice, logprob in zip((50, 99), scores.choice_logprobs, strict=True):
        assert logprob == pytest.approx(by_plain_transformers(tiny_model_path, None, ids, (choice,), 0.8)[0], abs=1e-4)
    assert again.logprobs == pytest.approx(scores.logprobs, abs=1e-5)


async def test_beside_a_running_stream_a_sequence_to_score_is_computed_in_small_pieces_and_comes_out_the_same(
    tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
):
    steps: list[list[int]] = []

    def noted(model: Any, ids: Sequence[Sequence[int]], *rest: Any) -> torch.Tensor:
        steps.append([len(piece) for piece in ids])
        return forward_packed(model, ids, *rest)

    monkeypatch.setattr("nextstate.engines.local.forward_packed", noted)
    busy = LocalEngine(replace(load(str(tiny_model_path)), end_ids=frozenset()), score_tokens_busy=10)
    busy.start()
    try:
        request = ScoreRequest(ids=tuple(range(50, 150)), start=5, choices=(50, 99))
        (alone,) = await busy.score([request], BASE)
        assert steps == [[100]]
        stream = busy.generate(PROMPT, Sampling(max_tokens=400, seed=1), POLICY)
        await anext(stream)
        steps.clear()
        beside, again = await busy.score([request, request], BASE)
        await stream.aclose()
    finally:
        busy.stop()
    # The stream's token, and never more than ten of both sequences.
    assert max(sum(pieces) for pieces in steps) == 1 + 10
    for scores in (beside, again):
        assert scores.logprobs == pytest.approx(alone.logprobs, abs=1e-5)
        assert scores.choice_logprobs == pytest.approx(alone.choice_logprobs, abs=1e-5)


async def test_a_prompt_answered_before_and_after_a_publish_gets_the_new_versions_numbers(
    own_engine: LocalEngine, artifacts: list[Path], tiny_model_path: Path
):
    prompt = (*PROMPT, *range(50, 110))  # long enough for the prefix cache
    sampling = Sampling(max_tokens=8, seed=4)
    await reply(own_engine.generate(prompt, sampling, POLICY))
    for version, artifact in enumerate(artifacts, start=1):
        await own_engine.publish(PolicyRef(version=version), artifact)
        own_engine.serve_version(version)
        made = await reply(own_engine.generate(prompt, sampling, POLICY))
        assert set(made.versions) == {version}
        expected = by_plain_transformers(tiny_model_path, artifact, prompt, made.ids)
        assert made.logprobs == pytest.approx(expected, abs=1e-3)


async def test_base_and_versions_side_by_side_each_get_their_own_numbers(
    own_engine: LocalEngine, artifacts: list[Path], tiny_model_path: Path
):
    for version in (1, 2):
        await own_engine.publish(PolicyRef(version=version), artifacts[version - 1])
    own_engine.serve_version(2)
    pinned = [BASE, PolicyRef(version=1), PolicyRef(version=2), POLICY]
    sampling = Sampling(max_tokens=12, seed=9)
    replies = await asyncio.gather(*(reply(own_engine.generate(PROMPT, sampling, p)) for p in pinned))
    for made, artifact in zip(replies, [None, artifacts[0], artifacts[1], artifacts[1]], strict=True):
        expected = by_plain_transformers(tiny_model_path, artifact, PROMPT, made.ids)
        assert made.logprobs == pytest.approx(expected, abs=1e-3)
    assert [set(made.versions) for made in replies] == [{0}, {1}, {2}, {2}]


async def test_a_stream_in_flight_goes_on_under_the_new_version_and_says_from_which_token(
    own_engine: LocalEngine, artifacts: list[Path]
):
    await own_engine.publish(PolicyRef(version=1), artifacts[0])
    versions: list[int] = []
    for seed in range(20):  # until one stays long enough
        async for chunk in own_engine.generate(PROMPT, Sampling(max_tokens=60, seed=seed), POLICY):
            versions.extend(chunk.versions)
            if len(versions) == 3:
                own_engine.serve_version(1)
        if len(versions) > 12:
            break
        own_engine.serve_version(0)
        versions.clear()
    assert versions[:3] == [0, 0, 0]
    assert versions[-1] == 1
    assert versions == sorted(versions)


async def test_a_version_that_is_not_loaded_is_refused_by_name(own_engine: LocalEngine):
    with pytest.raises(EngineFault, match=r"version 7 is not loaded; loaded now: \[0\]"):
        await reply(own_engine.generate(PROMPT, Sampling(max_tokens=1), PolicyRef(version=7)))


async def test_old_versions_make_room_but_never_the_one_that_serves(
    own_engine: LocalEngine, artifacts: list[Path], kind: str
):
    await own_engine.publish(PolicyRef(version=1), artifacts[0])
    own_engine.serve_version(1)
    for version in (2, 3, 4, 5):
        await own_engine.publish(PolicyRef(version=version), artifacts[version - 1])
        assert 1 in own_engine.versions
    assert own_engine.versions == ([0, 1, 5] if kind == "full" else [0, 1, 4, 5])


async def test_while_every_slot_is_in_use_a_new_version_has_to_wait(
    own_engine: LocalEngine, artifacts: list[Path], kind: str
):
    held = range(1, {"lora": adapters.SLOTS, "full": full.SLOTS}[kind] + 1)
    for version in held:
        await own_engine.publish(PolicyRef(version=version), artifacts[version - 1])
    endless = [own_engine.generate(PROMPT, Sampling(max_tokens=400, seed=v), PolicyRef(version=v)) for v in held]
    own_engine._step = lambda _: None  # nobody finishes
    waiting = [asyncio.create_task(anext(stream)) for stream in endless]
    await asyncio.sleep(0)
    with pytest.raises(EngineFault, match="in use"):
        await own_engine.publish(PolicyRef(version=4), artifacts[3])
    assert own_engine.versions == [0, *held]
    for task in waiting:
        task.cancel()


async def test_a_damaged_version_leaves_everything_as_it_was(own_engine: LocalEngine, artifacts: list[Path]):
    await own_engine.publish(PolicyRef(version=1), artifacts[0])
    own_engine.serve_version(1)
    [weights] = artifacts[1].glob("*model.safetensors")
    weights.write_bytes(b"half")
    with pytest.raises(AdapterError, match="cannot be read"):
        await own_engine.publish(PolicyRef(version=2), artifacts[1])
    made = await reply(own_engine.generate(PROMPT, Sampling(max_tokens=4, seed=1), POLICY))
    assert set(made.versions) == {1}


async def test_a_version_of_the_other_kind_is_refused_with_the_setting_to_put_back(
    own_engine: LocalEngine, make_trainer: TrainerFactory, tmp_path: Path, kind: str
):
    other = "lora" if kind == "full" else "full"
    folder = checkpoint.save(make_trainer(weights=other), tmp_path, 1, probe={}, metrics={})
    with pytest.raises(AdapterMismatch, match=f'learn.weights = "{other}"'):
        await own_engine.publish(PolicyRef(version=1), folder)
    assert own_engine.versions == [0]


async def test_weights_of_another_shape_are_refused(tiny_model_path: Path, tmp_path: Path):
    other = AutoModelForCausalLM.from_pretrained(tiny_model_path)
    other.resize_token_embeddings(416)
    other.save_pretrained(tmp_path / "000001")
    own = LocalEngine(load(str(tiny_model_path)))
    own.prepare_full_weights()
    with pytest.raises(AdapterMismatch, match="other layers or shapes"):
        await own.publish(PolicyRef(version=1), tmp_path / "000001")


async def test_full_weights_in_which_a_tensor_is_missing_are_not_made_up(
    own_engine: LocalEngine, artifacts: list[Path], kind: str
):
    if kind == "lora":
        pytest.skip("an adapter without one has another shape")
    file = artifacts[0] / "model.safetensors"
    state = load_file(file)
    del state["model.norm.weight"]
    save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(AdapterError, match=r"1 of its tensors are missing, model\.norm\.weight"):
        await own_engine.publish(PolicyRef(version=1), artifacts[0])


async def test_full_weights_removed_from_disk_go_on_serving(own_engine: LocalEngine, artifacts: list[Path]):
    await own_engine.publish(PolicyRef(version=1), artifacts[0])
    own_engine.serve_version(1)
    sampling = Sampling(max_tokens=6, seed=1)
    before = await reply(own_engine.generate(PROMPT, sampling, POLICY))
    checkpoint.remove_weights(artifacts[0])
    assert await reply(own_engine.generate(PROMPT, sampling, POLICY)) == before


async def test_a_step_that_fails_ends_its_requests_with_the_reason_and_the_next_ones_are_answered(
    own_engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
):
    def breaks(*_):
        raise IndexError("a bug")

    with monkeypatch.context() as patched:
        patched.setattr("nextstate.engines.local.forward_packed", breaks)
        with pytest.raises(EngineFault, match="a bug"):
            await reply(own_engine.generate(PROMPT, Sampling(max_tokens=4), POLICY))
    made = await reply(own_engine.generate(PROMPT, Sampling(max_tokens=4, seed=1), POLICY))
    assert made.finish is not None


async def test_a_stopped_engine_ends_its_streams_with_the_reason(tiny_model_path: Path):
    endless = replace(load(str(tiny_model_path)), end_ids=frozenset())
    short_lived = LocalEngine(endless)
    short_lived.start()
    stream = short_lived.generate(PROMPT, Sampling(max_tokens=400, seed=1), POLICY)
    await anext(stream)
    stopping = asyncio.create_task(asyncio.to_thread(short_lived.stop))
    with pytest.raises(EngineFault, match="stopped"):
        async for _ in stream:
            pass
    await stopping


def under_tagged_versions(
    models: dict[int, torch.nn.Module], prompt: TokenIds, ids: TokenIds, versions: tuple[int, ...]
) -> list[float]:
    """Log-probs of a reply by the library alone, each token under the version that it is tagged with.

    The prompt and every token are read by the version that then made the next token, as in the engine, where a stream
    keeps its cache when the version changes under it.
    """
    cache, found = DynamicCache(), []
    given = list(prompt)
    with torch.inference_mode():
        for token, version in zip(ids, versions, strict=True):
            logits = models[version](torch.tensor([given]), past_key_values=cache, use_cache=True).logits[0, -1]
            found.append(float(logits.log_softmax(-1)[token]))
            given = [token]
    return found


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@pytest.mark.slow
async def test_versions_published_one_after_another_cut_no_stream_and_every_token_has_its_versions_log_prob(
    tiny_model_path: Path, make_trainer: TrainerFactory, tmp_path: Path, kind: str
):
    trainer, published, streams, tokens = make_trainer(weights=kind), 20, 10, 40
    folders: dict[int, Path] = {}
    for version in range(1, published + 1):
        shake(trainer)
        folders[version] = checkpoint.save(trainer, tmp_path, version, probe={}, metrics={})
    endless = LocalEngine(replace(load(str(tiny_model_path)), end_ids=frozenset()), prefix_cache_tokens=4000)
    prepare(endless, kind)
    endless.start()
    # A few prompts, asked again and again, so that the prefix cache has each of them under many versions.
    prompts = [(*PROMPT, *range(50 + n, 90 + n)) for n in range(4)]
    over = asyncio.Event()

    async def client(n: int) -> list[tuple[TokenIds, TokenChunk]]:
        got = []
        while not over.is_set():
            prompt = prompts[(n + len(got)) % len(prompts)]
            got.append((prompt, await reply(endless.generate(prompt, Sampling(max_tokens=tokens), POLICY))))
        return got

    try:
        clients = [asyncio.create_task(client(n)) for n in range(streams)]
        for version, folder in folders.items():
            await endless.publish(PolicyRef(version=version), folder)
            endless.serve_version(version)
            await asyncio.sleep(0.08)
        over.set()
        replies = [made for got in await asyncio.gather(*clients) for made in got]
    finally:
        endless.stop()

    assert {(len(made.ids), made.finish) for _, made in replies} == {(tokens, FinishReason.LENGTH)}
    assert {v for _, made in replies for v in made.versions} >= set(folders)
    crossed = [(prompt, made) for prompt, made in replies if len(set(made.versions)) > 1]
    assert len(crossed) >= published // 2
    for _, made in replies:
        assert list(made.versions) == sorted(made.versions)
    checked = [*crossed[:: len(crossed) // 6], *replies[:: len(replies) // 6]]
    models: dict[int, torch.nn.Module] = {}
    for version in {v for _, made in checked for v in made.versions}:
        models[version] = plain_model(tiny_model_path, folders.get(version))
    for prompt, made in checked:
        expected = under_tagged_versions(models, prompt, made.ids, made.versions)
        assert made.logprobs == pytest.approx(expected, abs=1e-3)


async def test_hidden_states_at_the_last_token_are_those_of_a_full_forward_pass(engine: LocalEngine):
    ids = tuple(range(50, 80))
    with torch.inference_mode():
        model = load(str(engine.loaded.path), dtype="float32", device="cpu").model
        whole = model(
            input_ids=torch.tensor([ids]), segments=[Segment(0, len(ids))], use_cache=False, output_hidden_states=True
        )
    ask = ScoreRequest(ids=ids, start=len(ids), layers=(1, 2))
    longer = ScoreRequest(ids=(*ids, 90), start=len(ids), choices=(7,))
    first, other, again = await engine.score([ask, longer, ask], BASE)  # the last finds a cached beginning
    for scores in (first, again):
        assert scores.states[0] == pytest.approx(whole.hidden_states[1][0, -1].tolist(), abs=1e-4)
        assert len(scores.states) == 2
        assert (scores.logprobs, scores.choice_logprobs) == ((), ())
    assert other.states == ()
    assert len(other.logprobs) == 1
