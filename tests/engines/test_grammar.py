"""Answers held to a form: they parse, they validate, and their log-probs are those of what could be drawn."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from typing import Any

import pytest
import torch
from tokenizers import AddedToken

from nextstate.engines.builtin import builtin_model
from nextstate.engines.grammar import (
    Grammars,
    Matcher,
    json_object_grammar,
    json_schema_grammar,
    tool_call_grammar,
)
from nextstate.engines.local import LocalEngine
from nextstate.engines.model import LoadedModel
from nextstate.engines.packed import forward_packed
from nextstate.errors import EngineFault, GrammarError, SamplingError
from nextstate.types import FinishReason, PolicyRef, Sampling, TokenChunk, TokenIds

POLICY = PolicyRef()
PROMPT: TokenIds = (45, 60, 61, 62, 70)

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["cat", "dog", None]},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 2},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
    "$defs": {"tag": {"type": "boolean"}},
}

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "read",
            "parameters": {
                "type": "object",
                "properties": {"path": {"$ref": "#/$defs/path"}, "lines": {"type": "integer", "format": "uint32"}},
                "required": ["path"],
                "additionalProperties": False,
                "$defs": {"path": {"type": "string", "maxLength": 4}},
            },
        },
    },
    {"type": "function", "function": {"name": "list_all"}},
    {"type": "a kind we do not know", "name": "other"},
]


def is_person(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and {"name", "age", "kind"} <= set(value) <= {"name", "age", "kind", "tags"}
        and len(value["name"]) <= 4
        and type(value["age"]) is int
        and 0 <= value["age"] <= 120
        and value["kind"] in ("cat", "dog", None)
        and all(isinstance(tag, bool) for tag in value.get("tags", []))
    )


def is_call(value: Any, arguments: str) -> bool:
    if set(value) != {"name", arguments}:
        return False
    if value["name"] == "list_all":
        return bool(value[arguments] == {})
    found = value[arguments]
    return value["name"] == "read" and {"path"} <= set(found) <= {"path", "lines"} and len(found["path"]) <= 4


def calls(text: str) -> list[Any]:
    """The calls of an answer in the hermes form, which has to be nothing but calls."""
    pieces = text.split("</tool_call>")
    assert pieces[-1] == ""
    starts = ["<tool_call>\n", *["\n<tool_call>\n"] * (len(pieces) - 2)]
    assert all(piece.startswith(start) for piece, start in zip(pieces, starts, strict=False))
    return [json.loads(piece.removeprefix(start)) for piece, start in zip(pieces, starts, strict=False)]


def closing_bias(tokenizer: Any) -> tuple[tuple[int, float], ...]:
    """Random weights seldom close what they open."""
    return tuple((i, 5.0) for text in '"}],:' for i in tokenizer.encode(text, add_special_tokens=False))


async def answers(engine: LocalEngine, grammar: str, **wishes: Any) -> list[str]:
    """What twelve seeds answer, without the end token; those that the limit cut are left out."""
    tokenizer = engine.loaded.tokenizer

    async def one(seed: int) -> str | None:
        sampling = Sampling(
            **{"max_tokens": 300, "seed": seed, "grammar": grammar, "logit_bias": closing_bias(tokenizer), **wishes}
        )
        chunks = [chunk async for chunk in engine.generate(PROMPT, sampling, POLICY)]
        ids = [i for chunk in chunks for i in chunk.ids]
        if chunks[-1].finish is FinishReason.LENGTH:
            return None
        assert ids[-1] in engine.loaded.end_ids
        return str(tokenizer.decode(ids[:-1]))

    texts = await asyncio.gather(*map(one, range(12)))
    whole = [text for text in texts if text is not None]
    assert len(whole) >= 6
    return whole


async def test_any_json_object_is_one_json_object(engine: LocalEngine):
    for text in await answers(engine, json_object_grammar()):
        assert isinstance(json.loads(text), dict)


async def test_a_json_schema_is_fulfilled(engine: LocalEngine):
    texts = await answers(engine, json_schema_grammar(PERSON))
    assert all(is_person(json.loads(text)) for text in texts)
    assert len(set(texts)) > 3


async def test_the_most_likely_answer_fulfils_the_schema_too(engine: LocalEngine):
    (text, *others) = await answers(engine, json_schema_grammar(PERSON), temperature=0.0)
    assert is_person(json.loads(text))
    assert set(others) == {text}


async def test_a_required_tool_call_comes_in_the_hermes_form_once_or_again_and_again(engine: LocalEngine):
    texts = await answers(engine, tool_call_grammar(TOOLS, "hermes", None))
    assert all(is_call(call, "arguments") for text in texts for call in calls(text))
    assert {call["name"] for text in texts for call in calls(text)} == {"read", "list_all"}


async def test_a_named_tool_is_called_once(engine: LocalEngine):
    for text in await answers(engine, tool_call_grammar(TOOLS, "hermes", "list_all")):
        assert text == '<tool_call>\n{"name": "list_all", "arguments": {}}\n</tool_call>'


async def test_without_parallel_calls_there_is_one(engine: LocalEngine):
    for text in await answers(engine, tool_call_grammar(TOOLS, "hermes", None, parallel=False)):
        assert len(calls(text)) == 1


async def test_the_llama_form_is_a_bare_object(engine: LocalEngine):
    for text in await answers(engine, tool_call_grammar(TOOLS, "llama", None)):
        assert is_call(json.loads(text), "parameters")


async def test_the_log_prob_is_over_the_tokens_that_the_grammar_allowed(engine: LocalEngine, tiny: LoadedModel):
    grammar = json_schema_grammar(PERSON)
    sampling = Sampling(max_tokens=60, seed=5, temperature=0.8, grammar=grammar, top_logprobs=3)
    chunks = [chunk async for chunk in engine.generate(PROMPT, sampling, POLICY)]
    ids = [i for chunk in chunks for i in chunk.ids]
    with torch.no_grad():
        last = len(PROMPT) + len(ids) - 1
        logits = forward_packed(engine.loaded.model, [[*PROMPT, *ids]], range(len(PROMPT) - 1, last))
    matcher = Grammars(tiny.tokenizer, tiny.end_ids).matcher(grammar)
    for row_V, chunk in zip(logits, chunks, strict=True):
        allowed = matcher.mask(len(row_V))
        expected = (row_V / 0.8).masked_fill(~allowed, -torch.inf).log_softmax(-1)
        assert chunk.logprobs[0] == pytest.approx(float(expected[chunk.ids[0]]), abs=2e-5)
        (top,) = chunk.top_logprobs
        best = expected.topk(min(3, int(allowed.sum()))).values
        assert [logprob for _, logprob in top] == pytest.approx(best.tolist(), abs=2e-5)
        matcher.accept(chunk.ids[0])


def walk(matcher: Matcher, tokenizer: Any, end_ids: frozenset[int], vocabulary: int, seed: int) -> str | None:
    """A random answer, with a liking for what closes; checks at each step that an end is allowed just when it should.

    None: it grew too long.
    """
    rng = random.Random(seed)
    liked = {i for i, _ in closing_bias(tokenizer)}
    ids: list[int] = []
    for _ in range(400):
        allowed = matcher.mask(vocabulary).nonzero()[:, 0].tolist()
        text = tokenizer.decode(ids)
        try:
            complete = isinstance(json.loads(text), dict)
        except ValueError:
            complete = False
        assert bool(set(allowed) & end_ids) == complete
        if complete:
            assert set(allowed) <= end_ids  # an object that has closed cannot go on
            return str(text)
        closing = [i for i in allowed if i in liked]
        ids.append(rng.choice(closing if closing and rng.random() < 0.7 else allowed))
        matcher.accept(ids[-1])
        assert matcher.error == ""
    return None


def test_an_end_is_allowed_when_the_form_is_complete_and_then_nothing_else(tiny: LoadedModel):
    grammars = Grammars(tiny.tokenizer, tiny.end_ids)
    vocabulary = tiny.model.config.vocab_size
    walks = [
        walk(grammars.matcher(json_object_grammar()), tiny.tokenizer, tiny.end_ids, vocabulary, s) for s in range(8)
    ]
    assert sum(text is not None for text in walks) >= 4


@pytest.mark.slow
def test_the_built_in_models_tokens_keep_to_the_form_too():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(builtin_model())
    ends = frozenset({tokenizer.eos_token_id})
    grammars = Grammars(tokenizer, ends)
    # As wide as the model, and wider than the tokenizer, as with models whose rows are padded.
    walks = [walk(grammars.matcher(json_object_grammar()), tokenizer, ends, len(tokenizer) + 7, s) for s in range(6)]
    assert sum(text is not None for text in walks) >= 3


@pytest.mark.parametrize("special", [True, False])
def test_a_model_with_tokens_of_its_own_for_the_tags_has_to_write_those(tiny: LoadedModel, special: bool):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny.path)
    tags = ("<tool_call>", "</tool_call>")
    tokenizer.add_tokens([AddedToken(t, special=special, normalized=False) for t in tags], special_tokens=special)
    opening, closing = (tokenizer.convert_tokens_to_ids(tag) for tag in tags)
    matcher = Grammars(tokenizer, tiny.end_ids).matcher(tool_call_grammar(TOOLS, "hermes", "list_all"))
    body = tokenizer.encode('\n{"name": "list_all", "arguments": {}}\n')
    for token in (opening, *body, closing):
        assert matcher.mask(len(tokenizer))[token]
        matcher.accept(token)
    assert set(matcher.mask(len(tokenizer)).nonzero()[:, 0].tolist()) == tiny.end_ids
    fresh = Grammars(tokenizer, tiny.end_ids).matcher(tool_call_grammar(TOOLS, "hermes", "list_all"))
    assert fresh.mask(len(tokenizer)).nonzero()[:, 0].tolist() == [opening]


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "colour"}, "Invalid type: colour"),
        ({"type": "object", "properties": {"a": {"not": {}}}}, "not"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
        ({"$ref": "https://example.com/schema"}, "example.com"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"const": "\ud800"}, "hex escape"),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused_with_the_reason(schema: dict[str, Any], reason: str):
    with pytest.raises(GrammarError, match=reason) as refused:
        json_schema_grammar(schema)
    assert isinstance(refused.value, ValueError)
    assert "x-guidance" not in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_clients_own_options_for_the_library_are_not_taken(tiny: LoadedModel):
    grammar = json_schema_grammar({"type": "object", "x-guidance": {"whitespace_pattern": "[ ]+", "lenient": True}})
    assert grammar == json_object_grammar()


def test_tool_parameters_are_read_leniently_unless_they_are_strict():
    def tool(**more: Any) -> list[dict[str, Any]]:
        return [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}, **more}}]

    tool_call_grammar(tool(), "llama", None)
    with pytest.raises(GrammarError, match=r"tool 'f' cannot be enforced: .*not"):
        tool_call_grammar(tool(strict=True), "llama", None)


@pytest.mark.parametrize(
    ("tools", "name", "reason"),
    [
        ([], None, "no tool"),
        (TOOLS, "other", "'other' is not in tools"),
        ([{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}], None, "not 'object'"),
    ],
)
def test_what_cannot_be_called_is_refused_with_the_reason(tools: list[dict[str, Any]], name: str | None, reason: str):
    with pytest.raises(GrammarError, match=reason):
        tool_call_grammar(tools, "hermes", name)


async def test_what_only_turns_out_to_be_impossible_when_it_is_made_ready_is_refused_before_a_stream_begins(
    engine: LocalEngine,
):
    endless = Sampling(max_tokens=4, grammar=json_schema_grammar({"$ref": "#"}))
    with pytest.raises(GrammarError, match="nothing can fulfil it"):
        await engine.check_sampling(endless)
    with pytest.raises(GrammarError, match="nothing can fulfil it"):
        await anext(engine.generate(PROMPT, endless, POLICY))


async def test_a_bias_on_a_token_that_the_model_does_not_have_is_refused_by_number(engine: LocalEngine):
    vocabulary = engine.loaded.model.config.vocab_size
    with pytest.raises(SamplingError, match=rf"token {vocabulary}; this model's tokens are 0 to {vocabulary - 1}"):
        await engine.check_sampling(Sampling(max_tokens=1, logit_bias=((vocabulary, 1.0),)))


async def test_a_grammar_is_made_ready_off_the_event_loop(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch):
    threads: list[threading.Thread] = []
    ready = engine._grammars.matcher

    def matcher(grammar: str) -> Matcher:
        threads.append(threading.current_thread())
        return ready(grammar)

    monkeypatch.setattr(engine._grammars, "matcher", matcher)
    async for _ in engine.generate(PROMPT, Sampling(max_tokens=2, grammar=json_object_grammar()), POLICY):
        pass
    assert threads
    assert not {threading.main_thread(), engine._thread} & set(threads)


async def test_an_answer_that_its_grammar_loses_hold_of_ends_alone(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
):
    held = Sampling(max_tokens=40, seed=1, grammar=json_object_grammar())

    async def read(sampling: Sampling) -> list[TokenChunk]:
        return [chunk async for chunk in engine.generate(PROMPT, sampling, POLICY)]

    # A token that the mask did not allow, as the library sees it.
    monkeypatch.setattr(Matcher, "accept", lambda self, token: self._matcher.consume_token(70) and None)
    broken, fine = await asyncio.gather(read(held), read(Sampling(max_tokens=40, seed=2)), return_exceptions=True)
    assert isinstance(broken, EngineFault)
    assert "held to its grammar" in str(broken)
    assert isinstance(fine, list)
    assert fine[-1].finish is not None
