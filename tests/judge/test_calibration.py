import math

import pytest

from nextstate.judge.calibration import Calibration, centred, content_free, shipped
from nextstate.judge.prompts import prompts_hash
from nextstate.types import Vote


def test_probabilities_are_the_softmax_of_weighted_readings_plus_bias():
    calibration = Calibration(
        kind="fitted",
        prompts_hash="",
        model="",
        fingerprint=(0.0,) * 6,
        weights=((2.0, 0, 0, 0, 0, 0), (0, 0, 0, 0, 1.0, 0), (0.0,) * 6),
        bias=(0.0, 0.0, math.log(3)),
    )
    # logits: 2 * ln 2 = ln 4; 1 * ln 1 = 0; ln 3. Shares 4 : 1 : 3 of 8.
    found = calibration.probabilities((math.log(2), 9.0, 9.0, 9.0, 0.0, 9.0))
    assert [found[vote] for vote in Vote] == pytest.approx([0.5, 0.125, 0.375])


def test_a_content_free_calibration_subtracts_the_models_prejudice():
    prejudice = (1.0, 0.0, -1.0, 0.0, 0.0, 0.0)
    even = content_free("m", "h", prejudice).probabilities(prejudice)
    assert [even[vote] for vote in Vote] == pytest.approx([1 / 3] * 3)


def test_centring_removes_what_all_verdicts_share():
    assert centred((-3.0, -6.0, -9.0)) == (3.0, 0.0, -3.0)


def test_what_is_shipped_fits_the_prompts_that_are_shipped():
    from importlib.resources import files
    from json import loads

    (values,) = loads(files("nextstate.judge").joinpath("calibration.json").read_text())["fitted"]
    calibration = Calibration.of_json(values)
    assert calibration.prompts_hash == prompts_hash(), "prompts changed: run python -m nextstate.judge.fit_calibration"
    assert shipped(prompts_hash(), calibration.fingerprint) == calibration


def test_another_model_or_another_prompt_gets_no_fitted_values():
    assert shipped(prompts_hash(), (9.0,) * 6) is None
    assert shipped("other", (0.0,) * 6) is None
