from __future__ import annotations

import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from nextstate.errors import ConfigError
from nextstate.store import learning, schema, status
from nextstate.store.arrays import pack_versions, unpack_versions
from nextstate.store.store import Store, bind_to_model, bind_to_weights, claim_folder
from tests.rows import finished_turn, judged_turn


def test_the_migrations_make_the_schema_that_the_code_uses(store: Store):
    difference = store.read_now(lambda db: compare_metadata(MigrationContext.configure(db), schema.metadata))
    assert difference == []


def test_opening_again_keeps_what_is_there(tmp_path: Path):
    url = f"sqlite:///{tmp_path / 'nextstate.db'}"
    finished_turn(Store.open(url))
    assert Store.open(url).read_now(status.status).turns == 1


def test_a_transaction_that_fails_leaves_nothing(store: Store):
    def half(db):
        db.exec_driver_sql("INSERT INTO meta VALUES ('half', 'done')")
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        store.write_now(half)
    assert store.read_now(lambda db: db.exec_driver_sql("SELECT count(*) FROM meta").scalar()) == 0


def test_many_threads_write_at_once_and_every_turn_is_there(store: Store):
    with ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(lambda _: finished_turn(store), range(40)))
    assert len(set(ids)) == 40
    assert store.read_now(status.status).turns == 40


def test_a_folder_belongs_to_one_model(store: Store):
    store.write_now(bind_to_model, "one", "f1")
    store.write_now(bind_to_model, "one", "f1")
    with pytest.raises(ConfigError, match="belongs to model 'one'"):
        store.write_now(bind_to_model, "two", "f2")


@pytest.mark.parametrize(("first", "other"), [("lora", "full"), ("full", "lora")])
def test_a_folder_belongs_to_one_kind_of_weights_once_it_has_a_version(store: Store, first: str, other: str):
    store.write_now(bind_to_weights, other)
    store.write_now(bind_to_weights, first)  # nothing was trained yet
    judged_turn(store)
    update_id = store.write_now(learning.start_update, limit=8)
    store.write_now(learning.finish_update, update_id, artifact="versions/000001", metrics={})
    store.write_now(bind_to_weights, first)
    with pytest.raises(
        ConfigError, match=f"trained with learn.weights = '{first}', and the configuration says '{other}'"
    ):
        store.write_now(bind_to_weights, other)


def test_a_folder_in_use_is_refused_with_the_holder_named_and_is_free_after_a_kill(tmp_path: Path):
    holder = (
        "import sys, time; from pathlib import Path; from nextstate.store.store import claim_folder\n"
        "lock = claim_folder(Path(sys.argv[1]), 'server'); print('locked', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", holder, tmp_path], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "locked\n"
        with pytest.raises(ConfigError, match=f"in use by process {process.pid}"):
            claim_folder(tmp_path, "server")
        process.kill()
        process.wait()
    claim_folder(tmp_path, "server").close()


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        claim_folder(tmp_path / "file", "server")


def test_versions_are_stored_as_runs():
    assert pack_versions((3, 3, 4)) == [[3, 2], [4, 1]]
    assert unpack_versions([[3, 2], [4, 1]]) == (3, 3, 4)
    assert pack_versions(()) == []


def test_nobody_else_on_the_machine_may_look_into_a_data_folder(tmp_path: Path):
    claim_folder(tmp_path / "data", "server").close()
    assert (tmp_path / "data").stat().st_mode & 0o777 == 0o700


def test_the_log_is_emptied_as_soon_as_nobody_reads_from_it(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    finished_turn(store)
    log = tmp_path / "nextstate.db-wal"
    assert log.stat().st_size > 0
    reader = sqlite3.connect(tmp_path / "nextstate.db", isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM turns").fetchall()
    monkeypatch.setattr("nextstate.store.store._EMPTYING_S", 0.0)
    monkeypatch.setattr("nextstate.store.store._BUSY_MS", 10)
    impatient = Store.open(f"sqlite:///{tmp_path / 'nextstate.db'}")
    assert not impatient.scrub()
    reader.execute("COMMIT")
    assert impatient.scrub()
    assert log.stat().st_size == 0
    assert store.read_now(status.status).turns == 1
