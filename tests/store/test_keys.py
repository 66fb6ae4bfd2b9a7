from __future__ import annotations

import re
from hashlib import sha256

import pytest

from nextstate.errors import ConfigError
from nextstate.store.keys import add_key, list_keys, mark_used, match, revoke_key
from nextstate.store.store import Store


def add(store: Store, name: str = "laptop", user: str = "ann", learn: bool = True) -> str:
    return store.write_now(add_key, name, user, learn=learn)


def matched(store: Store, given: str) -> str | None:
    """Name of the key that somebody shows."""
    found = match(given.encode(), {key.key_id: key for key in store.read_now(list_keys)})
    return None if found is None else found.name


def test_a_key_is_43_random_characters_and_the_store_keeps_its_hash(store: Store):
    first, second = add(store, "one"), add(store, "two")
    assert re.fullmatch(r"ns-[A-Za-z0-9_-]{43}", first)
    assert first != second
    [stored, _] = store.read_now(list_keys)
    assert stored.digest == sha256(first.encode()).hexdigest()
    assert (stored.key_id, stored.used_at, stored.revoked_at) == (first[3:11], None, None)


def test_each_key_matches_itself_and_nothing_else_does(store: Store):
    one, two = add(store, "one"), add(store, "two")
    assert (matched(store, one), matched(store, two)) == ("one", "two")
    for wrong in ("", "ns-", one[:11], one[:-1], one + "A", one[:11] + two[11:], one.upper(), "ключ"):
        assert matched(store, wrong) is None


def test_a_revoked_key_matches_no_more_and_its_row_and_the_other_keys_stay(store: Store):
    one, two = add(store, "one"), add(store, "two")
    store.write_now(revoke_key, "one")
    assert (matched(store, one), matched(store, two)) == (None, "two")
    assert [key.name for key in store.read_now(list_keys)] == ["one", "two"]


def test_a_name_is_taken_until_its_key_is_revoked(store: Store):
    old = add(store)
    with pytest.raises(ConfigError, match="'laptop' already"):
        add(store)
    store.write_now(revoke_key, "laptop")
    new = add(store)
    assert (matched(store, old), matched(store, new)) == (None, "laptop")


def test_a_key_can_be_revoked_once(store: Store):
    add(store)
    store.write_now(revoke_key, "laptop")
    for name in ("laptop", "phone"):
        with pytest.raises(ConfigError, match=f"no key '{name}'"):
            store.write_now(revoke_key, name)


@pytest.mark.parametrize(("name", "user"), [("", "ann"), (" ", "ann"), ("a\nb", "ann"), ("a" * 65, "ann"), ("a", "")])
def test_names_and_users_are_something_to_print(store: Store, name: str, user: str):
    with pytest.raises(ConfigError, match="No key was made"):
        add(store, name, user)
    assert store.read_now(list_keys) == []


def test_the_last_use_is_kept(store: Store):
    key = add(store)
    store.write_now(mark_used, key[3:11])
    [stored] = store.read_now(list_keys)
    assert stored.used_at is not None
    assert stored.used_at >= stored.created_at
