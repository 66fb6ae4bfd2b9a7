"""API keys: who may ask, as whom, and whether it may be learned from. The keys themselves are nowhere in the store.

ns-Xb81kq0Z5TqvOeW0...      43 url-safe characters, drawn from 256 bits
   └──────┘                 key id: not secret, finds the row
└──────────────────┘        SHA-256 of all of it: what the row keeps
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256

from sqlalchemy import ColumnElement, Connection, insert, select, update

from nextstate.errors import ConfigError
from nextstate.store.schema import api_keys

_PREFIX = "ns-"
_SECRET_BYTES = 32
_ID = slice(len(_PREFIX), len(_PREFIX) + 8)
_MAX_NAME = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredKey:
    """A key as the store knows it."""

    key_id: str
    digest: str
    name: str
    user: str
    learn: bool
    """False: what it asks is never judged or trained, whatever the request says."""
    created_at: float
    """Seconds since the epoch, as the two below."""
    used_at: float | None
    """To the minute; None before the first use."""
    revoked_at: float | None


def digest_of(key: bytes) -> str:
    # One round of a fast hash, where a password would need a slow one: nobody guesses 256 random bits, however fast.
    return sha256(key).hexdigest()


def add_key(db: Connection, name: str, user: str, *, learn: bool) -> str:
    """Make a key and return it: the only time that anybody sees it.

    Raises:
        ConfigError: the name is taken, or the name or the user is empty, too long or not printable.
    """
    for what, text in (("name", name), ("user", user)):
        if not text.strip() or len(text) > _MAX_NAME or not text.isprintable():
            raise ConfigError(
                f"the key's {what} {text!r} is not accepted. No key was made. "
                f"Use 1 to {_MAX_NAME} printable characters."
            )
    # The write transaction holds the lock of the database, so nobody takes the name in between.
    if db.execute(select(api_keys.c.key_id).where(_active(name))).first() is not None:
        raise ConfigError(
            f"there is a key '{name}' already. No key was made. Choose another name, or revoke that one first: "
            f"nextstate keys revoke '{name}'."
        )
    key = _PREFIX + secrets.token_urlsafe(_SECRET_BYTES)
    row = {"key_id": key[_ID], "digest": digest_of(key.encode()), "name": name, "user": user, "learn": learn}
    db.execute(insert(api_keys).values(created_at=time.time(), **row))
    return key


def list_keys(db: Connection) -> list[StoredKey]:
    """All keys that ever were, oldest first."""
    rows = db.execute(select(api_keys).order_by(api_keys.c.created_at, api_keys.c.key_id))
    return [StoredKey(**row._mapping) for row in rows]


def revoke_key(db: Connection, name: str) -> None:
    """Let a key open nothing any more.

    Raises:
        ConfigError: there is no such key, or it was revoked before.
    """
    if db.execute(update(api_keys).where(_active(name)).values(revoked_at=time.time())).rowcount == 0:
        raise ConfigError(f"there is no key '{name}' to revoke. `nextstate keys list` shows what there is.")


def mark_used(db: Connection, key_id: str) -> None:
    db.execute(update(api_keys).where(api_keys.c.key_id == key_id).values(used_at=time.time()))


def match(given: bytes, keys: Mapping[str, StoredKey]) -> StoredKey | None:
    """The key that somebody has shown, unless it is unknown or revoked.

    Args:
        keys: by key id.
    """
    # Finding the row by the id tells by its time which ids there are, and those are no secret; the rest is compared
    # in a time that tells nothing.
    key = keys.get(given[_ID].decode("latin-1"))
    if key is None or not hmac.compare_digest(digest_of(given), key.digest) or key.revoked_at is not None:
        return None
    return key


def _active(name: str) -> ColumnElement[bool]:
    return (api_keys.c.name == name) & api_keys.c.revoked_at.is_(None)
