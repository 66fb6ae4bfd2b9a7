from __future__ import annotations

from pathlib import Path

import pytest

from nextstate import config
from nextstate.errors import ConfigError

DEMO = Path(config.__file__).parent / "recipes" / "demo.toml"


def test_options_win_over_the_environment_and_the_environment_over_the_file(tmp_path: Path, monkeypatch):
    file = tmp_path / "config.toml"
    file.write_text("[learn]\nrank = 4\nalpha = 8\nbatch_turns = 2\n")
    monkeypatch.setenv("NEXTSTATE_LEARN__RANK", "6")
    monkeypatch.setenv("NEXTSTATE_LEARN__ALPHA", "12")
    learn = config.load(file, learn={"alpha": 3}).learn
    assert (learn.batch_turns, learn.rank, learn.alpha) == (2, 6, 3)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[learn\n", "not valid TOML"),
        ("[learn]\nrnk = 4\n", "learn.rnk"),
        ("[learn]\nrank = 0\n", "learn.rank"),
        ("[learn]\nclip_low = 1.5\n", "nothing holds the ratio from below"),
        ("[learn]\nreward_weight = 0\nteacher_weight = 0\n", "nothing would be learned"),
        ("[serve]\nport = 70000\n", "serve.port"),
    ],
)
def test_a_broken_file_is_one_clear_sentence(tmp_path: Path, text: str, said: str):
    file = tmp_path / "config.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        config.load(file)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_said_to_be_missing(tmp_path: Path):
    with pytest.raises(ConfigError, match="does not exist"):
        config.load(tmp_path / "none.toml")


def test_the_files_we_ship_are_accepted():
    assert config.load(DEMO).learn.batch_turns == 8


def test_secrets_do_not_show_in_what_is_printed(monkeypatch):
    monkeypatch.setenv("NEXTSTATE_SERVE__API_KEY", "s3cret")
    loaded = config.load()
    assert loaded.serve.api_key.get_secret_value() == "s3cret"
    assert "s3cret" not in repr(loaded)
    assert "s3cret" not in loaded.model_dump_json()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("NEXTSTATE_SERVE", "foo", "environment variable"),
        ("NEXTSTATE_MODLE", "foo", "NEXTSTATE_MODLE names no setting"),
        ("NEXTSTATE_LEARN_RANK", "8", "two underscores"),
        ("NEXTSTATE_JUDGE__BASE_URL", "foo", "judge.base_url"),
        ("NEXTSTATE_JUDGE__BASE_URL", "http://a:70000x/v1", "judge.base_url"),
    ],
)
def test_a_broken_environment_is_one_clear_sentence(monkeypatch, name: str, value: str, said: str):
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=said):
        config.load()
