from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel
from typer.testing import CliRunner

from nextstate import config
from nextstate.cli.main import app
from nextstate.cli.settings import reference_page

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_is_what_the_types_say():
    assert PAGE.read_text() == reference_page(), "run: nextstate config reference > docs/configuration.md"


def test_every_setting_says_what_it_means():
    def unexplained(model: type[BaseModel]) -> list[str]:
        found = []
        for name, field in model.model_fields.items():
            kind = field.annotation
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found += [f"{name}.{inner}" for inner in unexplained(kind)]
            elif not field.description:
                found.append(name)
        return found

    assert unexplained(config.Config) == []


def test_a_bound_inside_an_optional_setting_is_shown():
    assert "| `probe_bound` | not set | number > 0 |" in reference_page()


def test_checking_the_configuration_says_what_is_in_force_and_keeps_secrets(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("NEXTSTATE_LEARN__RANK", "8")
    monkeypatch.setenv("NEXTSTATE_SERVE__API_KEY", "not-to-be-seen")
    done = CliRunner().invoke(app, ["serve", "--check-config", "--data", str(tmp_path / "data")])
    assert done.exit_code == 0
    assert "learn.rank = 8" in done.output
    assert "serve.api_key" in done.output
    assert "not-to-be-seen" not in done.output
    assert not (tmp_path / "data").exists()


def test_a_configuration_that_is_not_accepted_ends_with_status_1(monkeypatch):
    monkeypatch.setenv("NEXTSTATE_LEARN__RANK", "0")
    done = CliRunner().invoke(app, ["serve", "--check-config"])
    assert done.exit_code == 1
