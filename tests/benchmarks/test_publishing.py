import pytest
from benchmarks.publishing import waits, wrongly_tagged

SERVED = [(1, 10.0), (2, 20.0), (3, 30.0)]


def test_a_wait_belongs_to_the_phase_in_which_it_ended():
    spans = [(9.0, 9.1), (9.9, 10.1), (12.0, 12.4), (13.0, 13.3), (29.9, 30.2)]
    found = waits(spans, (10.0, 30.0))
    assert found["quiet"]["count"] == 2  # 100 and 300 ms
    assert found["quiet"]["max"] == pytest.approx(300)
    assert found["publishing"]["count"] == 3  # 200, 300 and 400 ms
    assert found["publishing"]["p50"] == pytest.approx(300)
    assert waits([], (10.0, 30.0))["quiet"]["p99"] is None


def test_a_token_is_rightly_tagged_when_its_version_served_while_the_answer_was_made():
    fine = [((11.0, 19.0), (1, 1)), ((18.0, 31.0), (1, 2, 3)), ((19.0, 29.0), (1, 1, 2, 2)), ((35.0, 36.0), (3,))]
    assert wrongly_tagged(fine, SERVED) == 0


@pytest.mark.parametrize(
    "answer",
    [
        ((11.0, 19.0), (1, 2)),  # not served yet
        ((21.0, 29.0), (1, 2)),  # served no longer
        ((11.0, 29.0), (2, 1)),  # goes back
        ((11.0, 19.0), (0, 1)),  # never served
    ],
)
def test_any_other_tag_is_counted(answer: tuple[tuple[float, float], tuple[int, ...]]):
    assert wrongly_tagged([answer], SERVED) == 1
