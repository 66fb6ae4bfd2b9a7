"""An exported version computes what the trainer computed, in transformers and PEFT alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from nextstate.cli.main import app
from nextstate.config import LearnConfig
from nextstate.engines.model import load
from nextstate.learn import checkpoint
from nextstate.learn.trainer import Trainer
from nextstate.store import forgetting, learning
from nextstate.store.store import Store, bind_to_model
from tests.learn.conftest import shake
from tests.rows import judged_turn

IDS = [5, 60, 61, 7, 200]


@pytest.fixture
def trained(store: Store, tmp_path: Path, tiny_model_path: Path) -> torch.Tensor:
    """Version 1 of the tiny model, serving; the logits that its trainer computes."""
    loaded = load(str(tiny_model_path))
    store.write_now(bind_to_model, loaded.name, loaded.fingerprint)
    trainer = Trainer(loaded, LearnConfig(rank=4, alpha=8))
    shake(trainer)
    judged_turn(store)
    update_id = store.write_now(learning.start_update, limit=8)
    checkpoint.save(trainer, tmp_path / "versions", 1, probe={}, metrics={})
    store.write_now(learning.finish_update, update_id, artifact="versions/000001", metrics={})
    store.write_now(learning.promote, 1, {})
    with torch.no_grad():
        return trainer.logits([IDS], range(len(IDS)))


def export(data: Path, model: Path, *command: str) -> tuple[int, str]:
    arguments = ["export", "adapter", *command, "--data", str(data), "--model", str(model)]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    return result.exit_code, result.stderr


def test_the_adapter_loads_in_peft_with_the_same_logits(trained: torch.Tensor, tmp_path: Path, tiny_model_path: Path):
    folder = tmp_path / "out"
    assert export(tmp_path, tiny_model_path, "1", str(folder)) == (0, f"{folder} holds the adapter of version 1.\n")
    assert sorted(file.name for file in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    base = AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32)
    with torch.no_grad():
        untrained = base(torch.tensor([IDS])).logits[0]
        found = PeftModel.from_pretrained(base, folder)(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(found, trained, atol=1e-5, rtol=1e-5)
    assert (found - untrained).abs().max() > 1e-2
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tiny_model_path)


def test_the_merged_model_loads_in_transformers_with_the_same_logits(
    trained: torch.Tensor, tmp_path: Path, tiny_model_path: Path
):
    folder = tmp_path / "out"
    assert export(tmp_path, tiny_model_path, "1", str(folder), "--merge")[0] == 0
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(model(torch.tensor([IDS])).logits[0], trained, atol=1e-4, rtol=1e-4)
    assert (
        AutoTokenizer.from_pretrained(folder).chat_template
        == AutoTokenizer.from_pretrained(tiny_model_path).chat_template
    )
    assert load(str(folder)).context_tokens == 2048  # our own server takes it too


def test_a_version_that_goes_back_to_forgotten_turns_says_so(
    trained: torch.Tensor, store: Store, tmp_path: Path, tiny_model_path: Path
):
    store.write_now(forgetting.forget, [1])
    code, said = export(tmp_path, tiny_model_path, "1", str(tmp_path / "out"))
    assert code == 0
    assert "Version 1 goes back to turns that were forgotten since." in said
    store.write_now(forgetting.start_over)
    store.write_now(learning.promote, 0, {})
    store.write_now(forgetting.artifact_removed, 1)
    code, said = export(tmp_path, tiny_model_path, "1", str(tmp_path / "again"))
    assert code == 1
    assert "the files of version 1 were removed: turns that it was trained on" in said


@pytest.mark.parametrize(("version", "says"), [("0", "version 0 is the model itself"), ("7", "there is no version 7")])
def test_what_has_no_adapter_is_an_error(
    trained: torch.Tensor, tmp_path: Path, tiny_model_path: Path, version: str, says: str
):
    code, said = export(tmp_path, tiny_model_path, version, str(tmp_path / "out"))
    assert code == 1
    assert says in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("merge", [[], ["--merge"]])
def test_a_folder_that_is_not_empty_is_left_as_it_is(
    trained: torch.Tensor, tmp_path: Path, tiny_model_path: Path, merge: list[str]
):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    code, said = export(tmp_path, tiny_model_path, "1", str(tmp_path / "out"), *merge)
    assert code == 1
    assert "is not empty" in said
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["mine"]


def test_another_model_is_an_error(trained: torch.Tensor, tmp_path: Path):
    result = CliRunner().invoke(app, ["export", "adapter", "1", str(tmp_path / "out"), "--data", str(tmp_path)])
    assert result.exit_code == 1
    assert "belongs to model 'tiny'" in result.stderr
