"""What a user gets wrong: exit status 1, one sentence that says what to do, and nothing made or changed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from nextstate.cli.main import app
from nextstate.config import Config
from nextstate.engines.adapters import WEIGHTS_FILE
from nextstate.engines.builtin import NAME
from nextstate.engines.model import load
from nextstate.learn import checkpoint, process
from nextstate.learn.trainer import Trainer
from nextstate.serve.run import bind
from nextstate.store import learning
from nextstate.store.store import Store, bind_to_model, claim_folder
from tests.crash.served import ENVIRONMENT, Served
from tests.rows import judged_turn

LEARN = {"rank": 4, "alpha": 8}


def serve(*options: str | Path) -> Result:
    return CliRunner().invoke(app, ["serve", "--port", "0", *map(str, options)], env={"COLUMNS": "200"})


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, apart from locks, which hold no more than who asked last."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def the_error(status: int, stderr: str) -> str:
    """The one sentence that a failed command leaves."""
    assert status == 1, stderr
    assert "Traceback" not in stderr
    errors = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, stderr
    return errors[0]


def error_of(result: Result) -> str:
    assert isinstance(result.exception, SystemExit), result.exception
    return the_error(result.exit_code, result.stderr)


def test_an_unknown_model_names_the_built_in_one_and_makes_no_folder(tmp_path: Path):
    command = [sys.executable, "-m", "nextstate.cli.main", "serve", "--port", "0", "--data", str(tmp_path / "data")]
    ended = subprocess.run([*command, "--model", "nobody/nothing"], env=ENVIRONMENT, capture_output=True, text=True)
    error = the_error(ended.returncode, ended.stderr)
    assert "Model 'nobody/nothing'" in error
    assert f"--model {NAME}" in error
    assert not (tmp_path / "data").exists()


def test_a_folder_that_is_no_model_is_said_so(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    error = error_of(serve("--model", tmp_path / "empty", "--data", tmp_path / "data"))
    assert "has no config.json" in error
    assert not (tmp_path / "data").exists()


def test_a_model_that_cannot_be_loaded_makes_no_folder(tmp_path: Path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"model_type": "llama"}')
    error = error_of(serve("--model", tmp_path / "broken", "--data", tmp_path / "data"))
    assert "cannot be loaded" in error
    assert not (tmp_path / "data").exists()


def test_a_data_folder_in_use_names_the_process_that_has_it(tmp_path: Path, tiny_model_path: Path):
    with claim_folder(tmp_path, "server") as lock:
        lock.seek(0)
        holder = lock.read()
        error = error_of(serve("--model", tiny_model_path, "--data", tmp_path))
        assert f"already in use by process {holder}" in error
        assert (tmp_path / "server.lock").read_text() == holder
    assert contents(tmp_path) == {}


def test_a_data_folder_that_is_a_file_is_left_alone(tmp_path: Path, tiny_model_path: Path):
    (tmp_path / "notes").write_text("dear diary")
    assert "cannot be used" in error_of(serve("--model", tiny_model_path, "--data", tmp_path / "notes"))
    assert (tmp_path / "notes").read_text() == "dear diary"


def test_a_database_that_is_none_is_left_alone(tmp_path: Path, tiny_model_path: Path):
    (tmp_path / "nextstate.db").write_text("dear diary" * 1000)
    before = contents(tmp_path)
    assert "is not a database" in error_of(serve("--model", tiny_model_path, "--data", tmp_path))
    assert contents(tmp_path) == before


def test_a_port_in_use_is_named_and_makes_no_folder(tmp_path: Path, tiny_model_path: Path):
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        error = error_of(serve("--port", str(port), "--model", tiny_model_path, "--data", tmp_path / "data"))
    assert f"port {port} on 127.0.0.1 is already in use" in error
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("model = ", "not valid TOML"),
        ("model = '\xff'".encode("latin-1"), "not valid TOML"),
        ("[lern]\nrank = 4", "lern"),
        ("[learn]\nranks = 4", "learn.ranks"),
        ("[learn]\nrank = 0", "learn.rank"),
        ("[serve]\nport = 70000", "serve.port"),
        ("[learn]\nclip_low = 1.5", "learn.clip_low is 1.5"),
    ],
)
def test_a_broken_config_file_is_refused_with_the_place(tmp_path: Path, text: str | bytes, says: str):
    file = tmp_path / "config.toml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    # No --port here: an option would win over what is wrong in the file.
    result = CliRunner().invoke(app, ["serve", "--config", str(file), "--data", str(tmp_path / "data")])
    assert says in error_of(result)
    assert not (tmp_path / "data").exists()


def test_a_config_file_that_is_not_there_is_named(tmp_path: Path):
    assert "nowhere.toml does not exist" in error_of(serve("--config", tmp_path / "nowhere.toml"))


def test_an_address_that_others_reach_needs_a_key(tmp_path: Path, tiny_model_path: Path):
    error = error_of(serve("--host", "0.0.0.0", "--model", tiny_model_path, "--data", tmp_path / "data"))
    assert "NEXTSTATE_SERVE__API_KEY" in error
    assert not (tmp_path / "data").exists()


def test_the_data_folder_of_another_model_is_refused_and_stays_as_it_is(tmp_path: Path, tiny_model_path: Path):
    store = Store.open(f"sqlite:///{tmp_path / 'nextstate.db'}")
    store.write_now(bind_to_model, "somebody-else", "0123456789abcdef")
    judged_turn(store)
    store.close()
    before = contents(tmp_path)
    error = error_of(serve("--model", tiny_model_path, "--data", tmp_path))
    assert "belongs to model 'somebody-else'" in error
    assert contents(tmp_path) == before


# -- versions that do not load -----------------------------------------------------------------------------------------


@pytest.fixture
def two_versions(tmp_path: Path, tiny_model_path: Path) -> Path:
    """A data folder where version 2 serves, made from version 1."""
    config = Config(model=str(tiny_model_path), data=tmp_path / "data", learn=LEARN)
    config.data.mkdir()
    store = Store.open(config.database_url)
    loaded = load(config.model)
    store.write_now(bind_to_model, loaded.name, loaded.fingerprint)
    trainer = Trainer(loaded, config.learn)
    for _ in range(2):
        judged_turn(store)
        version = process.run_update(store, trainer, config, store.write_now(learning.start_update, limit=8))
        assert version is not None
        store.write_now(learning.promote, version, {})
    store.close()
    return config.data


def config_file(folder: Path, model: Path, **learn: object) -> Path:
    file = folder / "config.toml"
    settings = "\n".join(f"{name} = {value}" for name, value in {**LEARN, **learn}.items())
    file.write_text(f"model = '{model}'\n[serve]\nport = 0\n[learn]\nenabled = false\n{settings}\n")
    return file


@pytest.mark.slow
async def test_with_a_corrupt_adapter_the_version_before_serves_and_the_log_says_so(
    tmp_path: Path, tiny_model_path: Path, two_versions: Path
):
    weights = checkpoint.version_dir(two_versions / "versions", 2) / WEIGHTS_FILE
    weights.write_bytes(weights.read_bytes()[:1000])
    served = Served(two_versions, "--config", str(config_file(tmp_path, tiny_model_path)))
    try:
        await served.start()
        assert served.version == 1
        assert "version 2 cannot serve" in served.log()
        assert "Version 1 serves instead" in served.log()
        rows = {row.version: row for row in served.store.read_now(learning.list_versions)}
        assert (rows[1].state, rows[2].state) == ("serving", "rejected")
        assert "cannot be read" in rows[2].gate["why"]
    finally:
        assert await served.stop() == 0


def test_versions_made_with_another_rank_stop_the_start_and_are_kept(
    tmp_path: Path, tiny_model_path: Path, two_versions: Path
):
    before = contents(two_versions)
    error = error_of(serve("--config", config_file(tmp_path, tiny_model_path, rank=8), "--data", two_versions))
    assert "has r 4, the configuration asks for 8" in error
    assert "learn.rank" in error
    assert contents(two_versions) == before
