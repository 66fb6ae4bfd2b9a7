from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nextstate.judge.cues import CUE_COUNT, WORDING_COUNT, cues, likeness, wording
from nextstate.judge.fitting import own_cases, to_vote_on
from nextstate.judge.head import Fold, Head, fit, learn, read, save, shipped, wording_head
from nextstate.judge.labelled import read_labelled
from nextstate.judge.prompts import prompts_hash, reply_of, request_of
from nextstate.judge.votes import vote_of
from nextstate.types import Vote

NOTHING = torch.zeros(0)
BLANK = Head(
    model="",
    prompts_hash="",
    fingerprint=(),
    layers=(),
    rows=0,
    centre=NOTHING,
    scale=NOTHING,
    weights=NOTHING,
    bias=NOTHING,
)


def test_probabilities_are_the_softmax_of_scaled_features_times_weights_plus_bias():
    head = replace(
        BLANK,
        centre=torch.tensor([1.0, 0.0]),
        scale=torch.tensor([0.5, 1.0]),
        weights=torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0]]),
        bias=torch.tensor([0.0, 0.0, math.log(3)]),
    )
    # (1 + 2 ln 2 - 1) * 0.5 = ln 2, times 2 = ln 4; 0 * 1 = 0; ln 3. Shares 4 : 1 : 3 of 8.
    found = head.probabilities(torch.tensor([1 + 2 * math.log(2), 0.0]))
    assert [found[vote] for vote in Vote] == pytest.approx([0.5, 0.125, 0.375])


def _fold(texts: dict[str, Vote]) -> Fold:
    return Fold(
        features=torch.tensor([wording("", "", text) for text in texts]),
        labels=list(texts.values()),
        groups=list(texts),
    )


def test_a_fit_learns_its_rows_and_writing_it_changes_nothing_that_matters(tmp_path: Path):
    words = {Vote.GOOD: "thanks perfect", Vote.BAD: "wrong broken", Vote.NEUTRAL: "what when where"}
    fold = _fold({f"{text} {n}": vote for vote, text in words.items() for n in "abcdefgh"})
    head = fit([fold], BLANK)
    assert head.rows == 24
    for row, label in zip(fold.features, fold.labels, strict=True):
        assert vote_of(head.probabilities(row)) is label
    save(head, tmp_path / "head.safetensors")
    again = read(tmp_path / "head.safetensors")
    assert again is not None
    for row in fold.features:
        one, other = head.probabilities(row), again.probabilities(row)
        assert [one[vote] for vote in Vote] == pytest.approx([other[vote] for vote in Vote], abs=2e-3)


def test_a_source_weighs_the_same_however_many_rows_it_has():
    # 4 rows say good and 40 say bad of the same reply; of equal weight, they leave it open.
    one = Fold(features=torch.tensor([wording("", "", "hm")] * 4), labels=[Vote.GOOD] * 4, groups=list("abcd"))
    many = Fold(
        features=torch.tensor([wording("", "", "hm")] * 40), labels=[Vote.BAD] * 40, groups=[f"g{n}" for n in range(40)]
    )
    found = fit([one, many], BLANK).probabilities(one.features[0])
    assert found[Vote.GOOD] == pytest.approx(found[Vote.BAD], abs=0.02)


def test_feedback_weighs_like_rows_of_the_fit():
    """On a head of 200 rows that was sure of the opposite, 2 rows of feedback change little and 200 much."""
    features = torch.tensor([wording("", "", "that will do nicely")])
    sure = replace(
        BLANK,
        rows=200,
        centre=torch.zeros(WORDING_COUNT),
        scale=torch.ones(WORDING_COUNT),
        weights=torch.zeros(WORDING_COUNT, 3),
        bias=torch.tensor([0.1, 0.1, 0.8]).log(),
    )
    few = learn(sure, features.repeat(2, 1), [Vote.GOOD] * 2).probabilities(features[0])
    many = learn(sure, features.repeat(200, 1), [Vote.GOOD] * 200).probabilities(features[0])
    assert 0.1 < few[Vote.GOOD] < many[Vote.GOOD]
    assert many[Vote.GOOD] > 0.5


def test_a_file_that_is_no_head_is_none(tmp_path: Path):
    (tmp_path / "x.safetensors").write_bytes(b"nonsense")
    assert read(tmp_path / "x.safetensors") is None
    assert read(tmp_path / "missing.safetensors") is None


def test_what_is_shipped_fits_the_prompts_and_the_features_that_are_shipped():
    found = {head.model: head for head in shipped()}
    assert set(found) == {"", "smollm2-135m-instruct", "qwen2.5-coder-0.5b-instruct"}
    for model, head in found.items():
        if model:
            assert head.prompts_hash == prompts_hash(), "prompts changed: see 'Fitting' in docs/judge.md"
        states = head.weights.shape[0] - WORDING_COUNT
        assert (
            states == {"": 0, "smollm2-135m-instruct": 2 * 2 * 576, "qwen2.5-coder-0.5b-instruct": 2 * 2 * 896}[model]
        )


def test_another_model_or_another_prompt_gets_no_fitted_head():
    head = next(head for head in shipped() if head.model == "smollm2-135m-instruct")
    assert head.matches(prompts_hash(), [value + 0.2 for value in head.fingerprint])
    assert not head.matches(prompts_hash(), [value + 0.3 for value in head.fingerprint])
    assert not head.matches("other", head.fingerprint)
    assert not head.matches(prompts_hash(), ())


@pytest.mark.slow
def test_the_wording_alone_learned_from_our_cases_judges_rows_that_it_has_not_seen():
    """A floor under the cues and the fit: no model, fitted on our own cases, read on hand-written development rows."""
    cases = to_vote_on(own_cases())
    unseen = to_vote_on(read_labelled(Path(__file__).parents[1] / "data" / "feedback_dev.jsonl"))
    folds = [
        Fold(
            features=torch.tensor([wording(request_of(r.turn), r.turn.answer, reply_of(r.turn)) for r in rows]),
            labels=[row.label for row in rows],
            groups=[row.group for row in rows],
        )
        for rows in (cases, unseen)
    ]
    head = fit(folds[:1], BLANK)
    votes = [max(found, key=found.__getitem__) for found in map(head.probabilities, folds[1].features)]
    right = sum(vote is label for vote, label in zip(votes, folds[1].labels, strict=True)) / len(votes)
    assert right > 0.6  # measured: see docs/judge.md; the largest class is 0.41 of these rows


def test_cues_see_form_and_place():
    assert len(cues("a", "b", "c")) == CUE_COUNT
    assert cues("Sort the names.", "Which way?", "by age") != cues("Sort the names.", "Done.", "by age")
    assert all(-1.0 <= value <= 1.0 for value in cues("", "Shall I?", "YES!!! thanks... 👍 but why? `x`"))


def test_likeness_is_the_share_of_the_shorter_texts_words():
    # {where, is, the, bank} and {the, bank, of, england, where}: three of four.
    assert likeness("Where is the bank?", "the bank of England, where") == 0.75
    assert likeness("", "x y") == 0.0


def test_the_head_without_a_model_is_among_the_shipped():
    assert wording_head().layers == ()
