import pytest

from nextstate.learn.baseline import advantages, updated


def test_each_user_is_measured_against_their_own_mean():
    rewards = [("strict", -1), ("kind", 1), ("new", -1)]
    assert advantages(rewards, {"strict": -0.8, "kind": 0.9}) == pytest.approx([-0.2, 0.1, -1.0])


def test_the_mean_moves_a_tenth_of_the_way_with_each_reward():
    # 0 -> 0.1 -> 0.1 + 0.1 * (-1 - 0.1) = -0.01
    assert updated({}, [("u", 1), ("u", -1)], rate=0.1) == pytest.approx({"u": -0.01})


def test_at_rate_zero_rewards_stay_as_they_are():
    assert advantages([("u", -1)], updated({}, [("u", -1)] * 9, rate=0.0)) == [-1.0]


def test_baselines_are_not_changed_in_place():
    before = {"u": 0.5}
    updated(before, [("u", -1)], rate=0.5)
    assert before == {"u": 0.5}
