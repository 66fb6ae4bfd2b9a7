from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nextstate.judge.cues import WORDING_COUNT
from nextstate.judge.evidence import evidence
from nextstate.judge.fitting import blank_head, own_cases, seen, to_vote_on
from nextstate.judge.labelled import read_labelled
from nextstate.judge.prompts import prompts_hash, reply_of
from nextstate.types import Vote

from .test_scored import STATES, FixedEngine, a_judge


def test_our_cases_are_many_of_every_label_and_all_come_to_a_vote():
    cases = own_cases()
    labels = [case.label for case in cases]
    assert len(cases) > 800
    assert min(labels.count(vote) for vote in Vote) > 200
    assert len({(case.turn.history[0]["content"], reply_of(case.turn)) for case in cases}) > 800
    assert len(to_vote_on(cases)) > 870


def test_what_evidence_decides_is_not_fitted_on():
    rows = read_labelled(Path(__file__).parents[1] / "data" / "feedback_dev.jsonl")
    kept = to_vote_on(rows)
    assert len(rows) > len(kept) > 150
    assert all(evidence(row.turn) is None and reply_of(row.turn) for row in kept)


async def test_features_come_with_their_labels_and_progress_is_told():
    rows = own_cases()[:6]
    done: list[int] = []
    fold = await seen(a_judge(FixedEngine()), rows, (1,), done.append)
    assert fold.features.shape == (6, STATES + WORDING_COUNT)
    assert fold.labels == [row.label for row in rows]
    assert len(set(fold.groups)) == 6
    assert sum(done) == 6


async def test_a_blank_head_knows_model_prompts_and_fingerprint():
    head = await blank_head(a_judge(FixedEngine()), "tiny", (1,))
    assert (head.model, head.prompts_hash, head.layers) == ("tiny", prompts_hash(), (1,))
    assert head.fingerprint == pytest.approx((0.0,) * 6)
    wording_only = await blank_head(a_judge(FixedEngine()), "tiny", ())
    assert (wording_only.model, wording_only.fingerprint, wording_only.layers) == ("", (), ())
    assert torch.equal(wording_only.weights, torch.zeros(0))
