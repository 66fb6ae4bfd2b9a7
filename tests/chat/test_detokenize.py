import copy

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from nextstate.chat.detokenize import Detokenizer
from nextstate.engines.model import LoadedModel

MARKERS = ["<tool_call>", "</tool_call>", "<|python_tag|>", "<think>"]


@pytest.fixture(scope="module")
def with_markers(tiny: LoadedModel):
    """The tiny model's tokenizer with markers in its vocabulary, all but the last one special."""
    tokenizer = copy.deepcopy(tiny.tokenizer)
    tokenizer.add_tokens([AddedToken(marker, special=marker != "<think>") for marker in MARKERS])
    return tokenizer


def pieces_of(tokenizer, ids, sizes=(1,), keep=frozenset()) -> list[str]:
    detokenizer, pieces, at, n = Detokenizer(tokenizer, keep), [], 0, 0
    while at < len(ids):
        size = sizes[n % len(sizes)]
        pieces.append(detokenizer.add(ids[at : at + size]))
        at, n = at + size, n + 1
    return [*pieces, detokenizer.finish()]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)
@given(data=st.data())
def test_pieces_joined_are_the_decoded_reply_for_any_tokens(tiny: LoadedModel, data: st.DataObject):
    ids = data.draw(st.lists(st.integers(0, len(tiny.tokenizer) - 1), max_size=40))
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    whole = tiny.tokenizer.decode(ids, skip_special_tokens=True)
    assert "".join(pieces_of(tiny.tokenizer, ids, sizes)) == whole


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=80)
@given(text=st.text(max_size=30))
def test_a_character_never_comes_in_parts(tiny: LoadedModel, text: str):
    ids = tiny.tokenizer.encode(text, add_special_tokens=False)
    pieces = pieces_of(tiny.tokenizer, ids)
    assert "".join(pieces) == text
    if "�" not in text:
        assert not any("�" in piece for piece in pieces)


def test_an_emoji_comes_with_the_last_of_its_four_bytes(tiny: LoadedModel):
    ids = tiny.tokenizer.encode("a🦊b", add_special_tokens=False)
    assert len(ids) == 6
    assert pieces_of(tiny.tokenizer, ids) == ["a", "", "", "", "🦊", "b", ""]


def test_bytes_that_never_become_a_character_come_at_the_end(tiny: LoadedModel):
    ids = tiny.tokenizer.encode("🦊", add_special_tokens=False)[:2]
    assert pieces_of(tiny.tokenizer, ids) == ["", "", "�"]


def test_special_tokens_are_left_out(tiny: LoadedModel):
    ids = tiny.tokenizer.encode("<|im_start|>hi<|im_end|>", add_special_tokens=False)
    assert "".join(pieces_of(tiny.tokenizer, ids)) == "hi"


@pytest.mark.parametrize(
    ("keep", "seen"),
    [
        (frozenset(), "a{} é <think>b"),
        (frozenset({"<tool_call>", "</tool_call>", "<think>"}), "a<tool_call>{}</tool_call> é <think>b"),
        (frozenset({"<|python_tag|>", "not a token"}), "<|python_tag|>a{} é <think>b"),
    ],
)
def test_special_tokens_that_are_markers_are_shown(with_markers, keep: frozenset[str], seen: str):
    written = "<|python_tag|>a<tool_call>{}</tool_call> é <think>b<|im_end|>"
    ids = with_markers.encode(written, add_special_tokens=False)
    assert "".join(pieces_of(with_markers, ids, keep=keep)) == seen


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)
@given(data=st.data())
def test_pieces_joined_are_the_decoded_reply_when_markers_are_shown(with_markers, data: st.DataObject):
    markers = with_markers.convert_tokens_to_ids(MARKERS)
    one = st.integers(0, len(with_markers) - 1) | st.sampled_from(markers)
    ids = data.draw(st.lists(one, max_size=40))
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    visible = [i for i in ids if i in markers or with_markers.decode([i], skip_special_tokens=True)]
    assert "".join(pieces_of(with_markers, ids, sizes, frozenset(MARKERS))) == with_markers.decode(visible)
