from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nextstate.learn.tree import Tree, grouped

SEQUENCES = st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=12)
"""Of three tokens, so that most share a beginning."""


def keys_of(tree: Tree, row: int) -> list[int]:
    """The rows that a row attends to, in order."""
    run = next(run for run in tree.runs if run.start <= row < run.start + run.length)
    return [r for piece in (*run.before, slice(run.start, row + 1)) for r in range(piece.start, piece.stop)]


def prefixes(sequences: list[list[int]]) -> set[tuple[int, ...]]:
    return {tuple(ids[:n]) for ids in sequences for n in range(1, len(ids) + 1)}


@given(SEQUENCES, SEQUENCES)
def test_every_row_reads_its_prefix_and_no_prefix_has_two_rows(first: list[list[int]], later: list[list[int]]):
    tree = Tree()
    paths = [*tree.add_all(first), *tree.add_all(later)]
    sequences = [*first, *later]
    for ids, path in zip(sequences, paths, strict=True):
        assert [tree.ids[row] for row in path] == ids
        assert [tree.positions[row] for row in path] == list(range(len(ids)))
        for n, row in enumerate(path):
            assert keys_of(tree, row) == path[: n + 1]
    assert len(tree) == len(prefixes(sequences))


@given(SEQUENCES)
def test_runs_are_all_rows_in_order_and_as_many_as_there_are_ends(sequences: list[list[int]]):
    tree = Tree()
    tree.add_all(sequences)
    starts = [0, *accumulate(run.length for run in tree.runs)]
    assert [run.start for run in tree.runs] == starts[:-1]
    assert starts[-1] == len(tree)
    all_of_them = prefixes(sequences)
    ends = {prefix for prefix in all_of_them if not any((*prefix, token) in all_of_them for token in range(3))}
    assert len(tree.runs) == len(ends)


@given(SEQUENCES, st.lists(st.integers(0, 2), max_size=12))
def test_what_is_missing_is_what_adding_makes(sequences: list[list[int]], other: list[int]):
    tree = Tree()
    tree.add_all(sequences)
    before, missing = len(tree), tree.missing(other)
    tree.add(other)
    assert len(tree) - before == missing


def test_a_session_that_only_grows_is_one_run():
    session = list(range(100))
    tree = Tree()
    paths = tree.add_all([session[:n] for n in (20, 45, 70, 100)])
    assert [(run.start, run.length, run.before) for run in tree.runs] == [(0, 100, ())]
    assert [len(path) for path in paths] == [20, 45, 70, 100]


def test_a_session_with_passing_words_is_a_trunk_with_a_run_a_turn_behind_one_stretch_of_it():
    trunk = list(range(100))
    tree = Tree()
    tree.add_all([[*trunk[:n], 500 + n, 600 + n] for n in (20, 45, 70, 100)])
    assert [(run.start, run.length, run.before) for run in tree.runs] == [
        (0, 102, ()),
        (102, 2, (slice(0, 70),)),
        (104, 2, (slice(0, 45),)),
        (106, 2, (slice(0, 20),)),
    ]


def test_a_branch_of_a_branch_names_both_stretches():
    tree = Tree()
    tree.add([1, 2, 3, 4])
    tree.add([1, 2, 5, 6, 7])
    assert tree.add([1, 2, 5, 8]) == [0, 1, 4, 7]
    assert (tree.runs[2].before, tree.runs[2].depth) == ((slice(0, 2), slice(4, 5)), 3)


@given(SEQUENCES, st.integers(1, 30))
def test_groups_hold_every_sequence_once_and_no_more_rows_than_allowed(sequences: list[list[int]], max_rows: int):
    groups = grouped(sequences, max_rows=max_rows)
    assert sorted(i for group in groups for i in group) == list(range(len(sequences)))
    allowed = max_rows + max(map(len, sequences), default=0)
    for group in groups:
        assert len(prefixes([sequences[i] for i in group])) <= allowed


@pytest.mark.parametrize("max_rows", [1, 30, 100])
def test_a_session_longer_than_a_group_is_one_group_all_the_same(max_rows: int):
    session = list(range(100))
    assert grouped([session[:n] for n in (20, 100, 45, 70)], max_rows=max_rows) == [[1, 3, 2, 0]]


def test_a_trunk_has_room_for_branches_however_long_it_is():
    trunk = list(range(100))
    # two rows of its own each, of which the longest has room in its length
    assert grouped([[*trunk[:n], 500, n] for n in (70, 80, 90, 100)], max_rows=4) == [[3, 2, 1], [0]]


def test_turns_of_a_session_go_together_and_do_not_drive_others_apart():
    ones, twos = [1] * 20, [2] * 20
    sequences = [ones[:10], twos[:15], ones, twos]
    assert grouped(sequences, max_rows=15) == [[2, 0], [3, 1]]
