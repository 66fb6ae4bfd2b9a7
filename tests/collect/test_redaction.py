from __future__ import annotations

from collections import Counter

import pytest

from nextstate import config
from nextstate.collect.redaction import Redactor
from nextstate.config import StoreConfig
from nextstate.errors import ConfigError

ALL = Redactor.of(StoreConfig(redact=("keys", "emails", "cards")))


def cleaned(text: str, redactor: Redactor = ALL) -> tuple[str, dict[str, int]]:
    found: Counter[str] = Counter()
    return redactor.text(text, found), dict(found)


@pytest.mark.parametrize(
    "key",
    [
        *("sk-abcdefghijklmnop1234", "sk-ant-api03-abcdefghijklmnop", "sk_live_abcdefghijklmnop", "ns-" + "x" * 43),
        *("ghp_" + "a" * 36, "github_pat_" + "a" * 40, "glpat-" + "a" * 20, "AKIA" + "A" * 16, "AIza" + "b" * 35),
        *("xoxb-1234567890", "hf_" + "c" * 34, "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjMifQ.SflKxwRJSMeK"),
        "-----BEGIN RSA PRIVATE KEY-----\nDEK-Info: AES-128-CBC\n\nMII/+E=\n-----END RSA PRIVATE KEY-----",
    ],
)
def test_keys_are_taken_out(key: str):
    assert cleaned(f"use '{key}' here") == ("use '[redacted: keys]' here", {"keys": 1})


def test_addresses_are_taken_out():
    assert cleaned("ann.b+c@mail.example.org, or bob@x.io.") == (
        "[redacted: emails], or [redacted: emails].",
        {"emails": 2},
    )


@pytest.mark.parametrize("number", ["4111111111111111", "4111 1111 1111 1111", "3782-822463-10005"])
def test_card_numbers_are_taken_out(number: str):
    assert cleaned(f"pay with {number}, please") == ("pay with [redacted: cards], please", {"cards": 1})


def test_a_number_with_a_wrong_check_digit_is_no_card():
    # 4111...1: 4 and each second 1 from the right doubled: 8 + 7 * 2 + 8 * 1 = 30. One more is 31.
    assert cleaned("4111111111111112") == ("4111111111111112", {})


@pytest.mark.parametrize(
    "text", ["task-list", "a risk-free thing", "hf_hub", "user@localhost", "3.141592653589793238", "12345678", ""]
)
def test_what_only_begins_so_stays(text: str):
    assert cleaned(text) == (text, {})


def test_what_a_message_says_and_calls_with_is_looked_through_and_its_names_are_not():
    call = {"id": "ann@x.io", "function": {"name": "mail", "arguments": '{"to": "ann@x.io", "n": 3}'}}
    message = {"role": "assistant", "content": "bob@x.io", "reasoning_content": "to ann@x.io", "tool_calls": [call]}
    found: Counter[str] = Counter()
    assert ALL.message(message, found) == {
        "role": "assistant",
        "content": "[redacted: emails]",
        "reasoning_content": "to [redacted: emails]",
        "tool_calls": [
            {"id": "ann@x.io", "function": {"name": "mail", "arguments": '{"to": "[redacted: emails]", "n": 3}'}}
        ],
    }
    assert found == {"emails": 3}


def test_own_patterns_count_by_their_names_and_one_that_finds_nothing_changes_nothing():
    own = Redactor.of(StoreConfig(redact_patterns={"badge": r"\bB-\d{6}\b", "empty": r"x*"}))
    assert cleaned("B-123456 ab", own) == ("[redacted: badge] ab", {"badge": 1})


def test_without_patterns_nothing_is_looked_for():
    assert cleaned("ann@x.io", Redactor()) == ("ann@x.io", {})


def test_a_broken_pattern_stops_the_start():
    with pytest.raises(ConfigError, match="'bad' is no regular expression"):
        config.load(None, store={"redact_patterns": {"bad": "("}})


def test_looking_takes_time_in_proportion_to_the_text():
    for text in ("a" * 200_000, "1 " * 100_000, "a@" * 100_000, "-----BEGIN PRIVATE KEY-----" * 20_000, "eyJ" * 60_000):
        cleaned(text)  # a pattern that tries everything at every place would not come back
