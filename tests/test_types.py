import json

import pytest

from nextstate.errors import SamplingError
from nextstate.types import Sampling

PLAIN = Sampling(max_tokens=8, temperature=0.7, seed=3, stop=("END",), top_logprobs=5)
EVERYTHING = Sampling(
    max_tokens=8,
    temperature=0.7,
    top_p=0.9,
    top_k=40,
    min_p=0.05,
    presence_penalty=0.5,
    frequency_penalty=-0.5,
    repetition_penalty=1.1,
    logit_bias=((5, -100.0), (7, 2.0)),
    grammar="start: /a+/",
    seed=1,
    stop=("a", "b"),
    top_logprobs=2,
)


def test_a_plain_temperature_can_be_trained_on_whatever_is_reported_beside_it():
    assert PLAIN.trainable
    assert PLAIN.why_not_trainable is None


@pytest.mark.parametrize(
    ("wish", "what"),
    [
        ({"temperature": 0.0}, "temperature 0"),
        ({"temperature": 1e-9}, "temperature 1e-09"),
        ({"top_p": 0.9}, "top_p 0.9"),
        ({"top_k": 40}, "top_k 40"),
        ({"min_p": 0.05}, "min_p 0.05"),
        ({"presence_penalty": 0.5}, "presence_penalty 0.5"),
        ({"frequency_penalty": -1.0}, "frequency_penalty -1.0"),
        ({"repetition_penalty": 1.1}, "repetition_penalty 1.1"),
        ({"logit_bias": ((3, 1.0),)}, "a logit bias"),
        ({"grammar": "start: /a/"}, "a grammar mask"),
        ({"top_p": 0.9, "grammar": "start: /a/"}, "top_p 0.9 and a grammar mask"),
        ({"top_k": 5, "top_p": 0.9, "min_p": 0.1}, "top_p 0.9, top_k 5 and min_p 0.1"),
    ],
)
def test_whatever_else_changes_the_distribution_cannot_and_is_named(wish: dict[str, object], what: str):
    sampling = Sampling(max_tokens=1, **wish)
    assert not sampling.trainable
    assert sampling.why_not_trainable == what


@pytest.mark.parametrize("sampling", [PLAIN, EVERYTHING, Sampling(max_tokens=1)])
def test_sampling_comes_back_from_the_store_as_it_was(sampling: Sampling):
    stored = sampling.as_json()
    assert json.loads(json.dumps(stored)) == stored
    assert Sampling.from_json(stored) == sampling


def test_only_what_is_not_at_its_default_is_stored_beside_limit_and_temperature():
    assert Sampling(max_tokens=4).as_json() == {"max_tokens": 4, "temperature": 1.0}
    assert Sampling(max_tokens=4, top_k=2).as_json() == {"max_tokens": 4, "temperature": 1.0, "top_k": 2}


def test_a_row_of_the_first_release_is_read():
    row = {"max_tokens": 8, "temperature": 0.7, "top_p": 1.0, "seed": None, "stop": []}
    assert Sampling.from_json(row) == Sampling(max_tokens=8, temperature=0.7)


@pytest.mark.parametrize(
    "wish",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_p": 1.1},
        {"top_k": -1},
        {"min_p": 2.0},
        {"repetition_penalty": 0.0},
        {"presence_penalty": float("inf")},
        {"logit_bias": ((-1, 1.0),)},
        {"logit_bias": ((1, float("nan")),)},
        {"top_logprobs": 21},
    ],
)
def test_what_no_token_can_be_drawn_with_is_refused_by_name(wish: dict[str, object]):
    with pytest.raises(SamplingError, match=rf"^{next(iter(wish))} is "):
        Sampling(max_tokens=1, **wish)
