"""The durable log around which the loops run: one SQL database, opened and migrated here.

A loop passes a function of a connection to `write` or `read`; a write is one transaction, so a crash leaves all of it
or nothing:

    turn_id = await store.write(turns.open_turn, new_turn)
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Concatenate, ParamSpec, TypeVar

from alembic import command
from alembic.config import Config as AlembicConfig
from alembic.util import CommandError
from sqlalchemy import Connection, Row, create_engine, event, insert, select
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DatabaseError

from nextstate.errors import ConfigError
from nextstate.store import schema
from nextstate.types import VersionState

P = ParamSpec("P")
T = TypeVar("T")
AnyRow = Row[*tuple[Any, ...]]
"""A database row whose columns the query names."""

_IMMEDIATE = {"immediate": True}
_BUSY_MS = 60_000
"""How long a writer waits for another."""
_EMPTYING_S = 60.0
"""How long it is tried to empty the write-ahead log."""


class Store:
    """A connection pool to one migrated database. Safe to use from many threads and processes."""

    def __init__(self, url: str) -> None:
        # Errors end up in the log and in events, where no text of a conversation belongs.
        self._engine = create_engine(url, connect_args={"timeout": 60}, hide_parameters=True)
        if self._engine.dialect.name == "sqlite":
            event.listen(self._engine, "connect", _prepare_sqlite)
            event.listen(self._engine, "begin", _begin_sqlite)

    @classmethod
    def open(cls, url: str) -> Store:
        """Open a database and bring its schema up to date.

        Raises:
            ConfigError: it cannot be opened, is no database, or comes from a newer nextstate. Nothing was changed.
        """
        store = cls(url)
        try:
            store._migrate()
        except (DatabaseError, CommandError) as error:
            store.close()
            why = error.orig if isinstance(error, DatabaseError) else error
            raise ConfigError(
                f"the database {make_url(url).database} cannot be used: {why}. Nothing was changed. Use the version of "
                "nextstate that wrote it, restore it from a copy, or choose another folder: --data DIR."
            ) from error
        return store

    def _migrate(self) -> None:
        with self._engine.connect().execution_options(**_IMMEDIATE) as db, db.begin():
            migrations = AlembicConfig()
            migrations.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
            migrations.attributes["connection"] = db
            command.upgrade(migrations, "head")
            if db.execute(select(schema.policy_versions.c.version)).first() is None:
                now = time.time()
                base = {"version": 0, "state": VersionState.SERVING, "created_at": now, "served_at": now}
                db.execute(insert(schema.policy_versions).values(base))

    def write_now(self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work` in one transaction, committed when it returns and undone when it raises."""
        with self._engine.connect().execution_options(**_IMMEDIATE) as db, db.begin():
            return work(db, *args, **kwargs)

    def read_now(self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work` on one consistent view of the database."""
        with self._engine.connect() as db, db.begin():
            return work(db, *args, **kwargs)

    async def write(self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`write_now` in a thread. A cancelled caller does not undo it."""
        return await asyncio.shield(asyncio.to_thread(lambda: self.write_now(work, *args, **kwargs)))

    async def read(self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`read_now` in a thread."""
        return await asyncio.to_thread(lambda: self.read_now(work, *args, **kwargs))

    def scrub(self) -> bool:
        """Write the database anew, so that nothing of what was deleted is in its files any more.

        Writers wait meanwhile. Returns False where somebody was reading so long that the write-ahead log, which may
        still hold it, could not be emptied; then it is worth trying again.
        """
        if self._engine.dialect.name != "sqlite":
            return True
        with self._engine.connect() as db:
            # Straight to the driver: neither works inside of a transaction.
            sqlite = db.connection.driver_connection
            assert sqlite is not None
            sqlite.execute("VACUUM")
            give_up_at = time.monotonic() + _EMPTYING_S
            # SQLite waits for readers and writers by itself, but not for another connection that empties the log.
            while sqlite.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
                if time.monotonic() > give_up_at:
                    return False
                time.sleep(0.1)
        return True

    def close(self) -> None:
        self._engine.dispose()


def _prepare_sqlite(connection: Any, _: Any) -> None:
    connection.isolation_level = None  # we say BEGIN ourselves, below
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON", f"busy_timeout={_BUSY_MS}"):
        connection.execute(f"PRAGMA {pragma}")


def _begin_sqlite(db: Connection) -> None:
    # A writer takes the lock at once and waits for it; SQLite refuses to wait for a reader that turns into a writer.
    db.exec_driver_sql("BEGIN IMMEDIATE" if db.get_execution_options().get("immediate") else "BEGIN")


def make_folder(folder: Path) -> None:
    """Make a data folder, unless it is there.

    Raises:
        ConfigError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # It holds conversations: nobody else on this machine may read them.
        folder.chmod(0o700)
    except OSError as error:
        raise _unusable(folder, error) from error


def _unusable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(f"data folder {folder} cannot be used: {error.strerror}. Choose another: --data DIR.")


def claim_folder(folder: Path, role: str) -> IO[str]:
    """Lock a data folder for one process in a role ('server', 'trainer'); the lock ends with the process.

    Raises:
        ConfigError: another process has it, or the folder cannot be written.
    """
    make_folder(folder)
    try:
        # Kept open by the caller: closing it gives the lock back.
        lock = (folder / f"{role}.lock").open("a+")
    except OSError as error:
        raise _unusable(folder, error) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise _in_use(folder, role) from error
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock


def check_free(folder: Path, role: str) -> None:
    """Look whether another process has a folder, without making or changing anything.

    Raises:
        ConfigError: one has.
    """
    try:
        lock = (folder / f"{role}.lock").open()
    except OSError:
        return  # whether it can be used shows when it is claimed
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            raise _in_use(folder, role) from error


def _in_use(folder: Path, role: str) -> ConfigError:
    holder = (folder / f"{role}.lock").read_text().strip() or "unknown"
    return ConfigError(
        f"data folder {folder} is already in use by process {holder} ({role}). Nothing was started. "
        "Stop that process, or choose another folder: --data DIR."
    )


def bind_to_model(db: Connection, name: str, fingerprint: str) -> None:
    """Tie the data folder to a model the first time, and check it every time.

    Raises:
        ConfigError: the folder holds the turns and adapters of another model.
    """
    known = bound_model(db)
    if known.get("fingerprint", fingerprint) != fingerprint:
        raise ConfigError(
            f"this data folder belongs to model '{known.get('model')}', and '{name}' has other weights. Its turns and "
            "adapters do not fit. Nothing was changed. Choose another folder: --data DIR, or the model it belongs to."
        )
    for key, value in (("model", name), ("fingerprint", fingerprint)):
        db.execute(sqlite_insert(schema.meta).values(key=key, value=value).on_conflict_do_nothing())


def bound_model(db: Connection) -> dict[str, str]:
    """`model` and `fingerprint` of the model that the data folder belongs to; empty before the first start."""
    rows = db.execute(select(schema.meta).where(schema.meta.c.key.in_(("model", "fingerprint"))))
    return {row.key: row.value for row in rows}


def bind_to_weights(db: Connection, kind: str) -> None:
    """Tie the data folder to what is trained ('lora' or 'full') once there is a version, and check it every time.

    Raises:
        ConfigError: its versions are of the other kind.
    """
    query = select(schema.meta.c.value).where(schema.meta.c.key == "weights")
    # Folders from before there were two kinds do not say which they have.
    known = db.execute(query).scalar() or "lora"
    has_versions = db.execute(select(schema.policy_versions.c.version).where(schema.policy_versions.c.version > 0))
    if known != kind and has_versions.first() is not None:
        raise ConfigError(
            f"the versions in this data folder were trained with learn.weights = '{known}', and the configuration says "
            f"'{kind}'. Nothing was changed. Set it back, or start with a new data folder: --data DIR."
        )
    if known != kind:
        row = sqlite_insert(schema.meta).values(key="weights", value=kind)
        db.execute(row.on_conflict_do_update(index_elements=["key"], set_={"value": kind}))


def note(db: Connection, /, kind: str, turn_id: int | None = None, **data: Any) -> None:
    """Add an event to the audit log."""
    db.execute(insert(schema.events).values(at=time.time(), kind=kind, turn_id=turn_id, data=data))
