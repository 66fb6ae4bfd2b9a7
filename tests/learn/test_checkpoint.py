from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from nextstate.engines.adapters import WEIGHTS_FILE
from nextstate.errors import AdapterError
from nextstate.learn import checkpoint
from nextstate.learn.trainer import Trainer
from tests.learn.conftest import TrainerFactory, a_sample, shake


def saved(trainer: Trainer, folder: Path, version: int = 1) -> Path:
    return checkpoint.save(trainer, folder, version, probe={}, metrics={})


def weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten().double() for p in trainer.parameters])


@pytest.mark.parametrize("teacher", ["policy", "average"])
def test_training_goes_on_from_a_checkpoint_as_if_never_interrupted(
    make_trainer: TrainerFactory, tmp_path: Path, teacher: str
):
    whole = make_trainer(teacher=teacher, average_rate=0.3)
    samples = [a_sample(whole, hints=("be brief, please",))]
    whole.update(samples, oldest_version=0)
    folder = saved(whole, tmp_path)
    metrics = whole.update(samples, oldest_version=0)

    resumed = make_trainer(seed=99, teacher=teacher, average_rate=0.3)
    checkpoint.restore(resumed, folder)
    again = resumed.update(samples, oldest_version=0)
    assert {k: v for k, v in again.items() if k != "seconds"} == {k: v for k, v in metrics.items() if k != "seconds"}
    assert (weights(resumed) - weights(whole)).abs().max().item() == 0.0
    assert resumed.baselines == whole.baselines != {}
    assert (resumed.average is None) == (teacher == "policy")
    for name, average in (whole.average or {}).items():
        assert torch.equal(resumed.average[name], average)


def test_an_old_version_without_an_optimizer_does_not_go_on_with_that_of_another(
    make_trainer: TrainerFactory, tmp_path: Path
):
    trainer = make_trainer()
    samples = [a_sample(trainer)]
    trainer.update(samples, oldest_version=0)
    folder = saved(trainer, tmp_path)
    (folder / "optimizer.pt").unlink()
    trainer.update(samples, oldest_version=0)
    checkpoint.restore(trainer, folder)
    afresh = make_trainer(seed=99)
    checkpoint.restore(afresh, folder)
    for one in (trainer, afresh):
        one.update(samples, oldest_version=0)
    assert torch.equal(weights(trainer), weights(afresh))


def test_a_version_made_under_another_teacher_lets_the_average_begin_at_it(
    make_trainer: TrainerFactory, tmp_path: Path
):
    other = make_trainer()
    shake(other)
    resumed = make_trainer(teacher="average", seed=99)
    checkpoint.restore(resumed, saved(other, tmp_path))
    assert all(torch.equal(*pair) for pair in zip(resumed.average.values(), other.parameters, strict=True))


@pytest.mark.parametrize(("how", "said"), [("cut", "cannot be read"), ("other shapes", "other layers or shapes")])
def test_a_damaged_average_is_a_clear_error(make_trainer: TrainerFactory, tmp_path: Path, how: str, said: str):
    trainer = make_trainer(teacher="average")
    file = saved(trainer, tmp_path) / checkpoint.AVERAGE_FILE
    if how == "cut":
        file.write_bytes(file.read_bytes()[:1000])
    else:
        save_file({"one": torch.zeros(1)}, file)
    with pytest.raises(AdapterError, match=said):
        checkpoint.restore(trainer, file.parent)


def test_plain_transformers_and_peft_load_the_adapter_and_compute_the_same(
    make_trainer: TrainerFactory, tiny_model_path: Path, tmp_path: Path
):
    trainer = make_trainer()
    shake(trainer)
    folder = saved(trainer, tmp_path)
    base = AutoModelForCausalLM.from_pretrained(tiny_model_path).double()
    plain = PeftModel.from_pretrained(base, folder).double()
    with torch.no_grad():
        expected = plain(torch.tensor([[5, 6, 7, 8]])).logits[0]
        difference = (trainer.logits([[5, 6, 7, 8]], [0, 1, 2, 3]) - expected).abs().max().item()
        moved = (trainer.logits([[5, 6, 7, 8]], [0, 1, 2, 3], base=True) - expected).abs().max().item()
    assert difference < 1e-5
    assert moved > 1e-3


def test_a_version_appears_whole_or_not_at_all(make_trainer: TrainerFactory, tmp_path: Path, monkeypatch):
    def crash(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", crash)
    with pytest.raises(KeyboardInterrupt):
        saved(make_trainer(), tmp_path)
    assert not checkpoint.version_dir(tmp_path, 1).exists()
    checkpoint.remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_only_training_needs_is_kept_for_the_newest_versions_only(make_trainer: TrainerFactory, tmp_path: Path):
    trainer = make_trainer(teacher="average")
    trainer.update([a_sample(trainer)], oldest_version=0)
    folders = [saved(trainer, tmp_path, version) for version in range(1, 6)]
    for name in ("optimizer.pt", checkpoint.AVERAGE_FILE):
        assert [(f / name).exists() for f in folders] == [False, False, True, True, True]
    assert all((f / WEIGHTS_FILE).exists() for f in folders)


def damaged(folder: Path, how: str) -> None:
    file = folder / WEIGHTS_FILE
    if how == "cut":
        file.write_bytes(file.read_bytes()[:1000])
    elif how == "gone":
        file.unlink()
    elif how == "not finite":
        state = load_file(file)
        state[next(iter(state))][0, 0] = float("nan")
        save_file(state, file)
    else:
        config = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps(config | {"r": 7}))


@pytest.mark.parametrize(
    ("how", "said"),
    [("cut", "cannot be read"), ("gone", "cannot be read"), ("not finite", "not finite"), ("other rank", "has r 7")],
)
def test_a_damaged_adapter_is_a_clear_error(make_trainer: TrainerFactory, tmp_path: Path, how: str, said: str):
    trainer = make_trainer()
    folder = saved(trainer, tmp_path)
    damaged(folder, how)
    with pytest.raises(AdapterError, match=said):
        checkpoint.restore(make_trainer(), folder)
