import pytest

from nextstate.people.sticking import last_third, sessions_until_it_sticks, share


def signs(row: str) -> list[bool]:
    return [sign == "#" for sign in row]


@pytest.mark.parametrize(
    ("row", "number"),
    [
        ("###", 3),  # the third completes three in a row, and no run can be shorter
        (".##.###.", 7),  # two are not enough; sessions 5, 6 and 7 are
        ("#.#.#.#.#.", None),
        ("##", None),
        ("", None),
        ("....###", 7),  # the last session counts
    ],
)
def test_it_sticks_at_the_third_in_a_row(row: str, number: int | None):
    assert sessions_until_it_sticks(signs(row)) == number


def test_a_share_of_nothing_is_not_zero():
    assert share([]) is None
    assert share(signs("#..#")) == 0.5


def test_the_last_third_is_rounded_down():
    assert list(last_third(list(map(bool, range(8))))) == [True, True]  # 8 // 3 = 2
    assert list(last_third(signs("##"))) == []
