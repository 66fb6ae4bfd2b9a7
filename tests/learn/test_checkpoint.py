from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from nextstate.config import LearnConfig
from nextstate.engines.adapters import WEIGHTS_FILE
from nextstate.engines.model import load
from nextstate.errors import AdapterError
from nextstate.learn import checkpoint
from nextstate.learn.trainer import Trainer
from tests.learn.conftest import TrainerFactory, a_sample, shake


def saved(trainer: Trainer, folder: Path, version: int = 1) -> Path:
    return checkpoint.save(trainer, folder, version, probe={}, metrics={})


def weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten().double() for p in trainer.parameters])


@pytest.fixture(params=["lora", "full"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def same_but_for_time(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return {k: v for k, v in a.items() if k != "seconds"} == {k: v for k, v in b.items() if k != "seconds"}


@pytest.mark.parametrize("precise", [True, False], ids=["float64", "float32"])
@pytest.mark.parametrize("teacher", ["policy", "average"])
def test_training_goes_on_from_a_checkpoint_as_if_never_interrupted(
    make_trainer: TrainerFactory, tmp_path: Path, kind: str, teacher: str, precise: bool
):
    options = {"weights": kind, "teacher": teacher, "average_rate": 0.3, "precise": precise, "learning_rate": 1e-3}
    whole = make_trainer(**options)
    samples = [
        a_sample(whole, hints=("be brief, please",)),
        a_sample(whole, "jumps", (80, 81, 82, 83, 84), reward=1, user="v"),
    ]
    for _ in range(2):
        whole.update(samples, oldest_version=0)
    folder = saved(whole, tmp_path)

    resumed = make_trainer(seed=99, **options)
    resumed.update(samples, oldest_version=0)  # whatever it was doing before
    torch.manual_seed(123)
    checkpoint.restore(resumed, folder)
    drawn = torch.rand(3)
    checkpoint.restore(resumed, folder)
    for _ in range(2):
        expected, found = (one.update(samples, oldest_version=0) for one in (whole, resumed))
        assert same_but_for_time(expected, found)
        assert torch.equal(weights(resumed), weights(whole))
    assert found["trained_in_all"] == {"updates": 4, "steps": 4, "turns": 8, "reply_tokens": 32}
    assert resumed.baselines == whole.baselines != {}
    assert (resumed.average is None) == (teacher == "policy")
    for name, average in (whole.average or {}).items():
        assert torch.equal(resumed.average[name], average)
    checkpoint.restore(resumed, folder)
    assert torch.equal(torch.rand(3), drawn)


def test_the_learning_rate_is_the_configurations_and_not_the_checkpoints(make_trainer: TrainerFactory, tmp_path: Path):
    trainer = make_trainer()
    trainer.update([a_sample(trainer)], oldest_version=0)
    folder = saved(trainer, tmp_path)
    slower = make_trainer(learning_rate=1e-3)
    checkpoint.restore(slower, folder)
    assert [group["lr"] for group in slower.optimizer.param_groups] == [1e-3]
    assert len(slower.optimizer.state) == len(slower.parameters)


def test_from_a_version_without_moments_training_goes_on_without_those_of_another(
    make_trainer: TrainerFactory, tmp_path: Path
):
    trainer = make_trainer()
    trainer.update([a_sample(trainer)], oldest_version=0)
    folder = saved(trainer, tmp_path)
    (folder / checkpoint.OPTIMIZER_FILE).unlink()
    checkpoint.restore(trainer, folder)
    assert not trainer.optimizer.state


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


def test_plain_transformers_loads_full_weights_and_computes_the_same(make_trainer: TrainerFactory, tmp_path: Path):
    trainer = make_trainer(weights="full")
    shake(trainer)
    folder = saved(trainer, tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    assert plain.dtype == torch.float64
    with torch.no_grad():
        expected = plain(torch.tensor([[5, 6, 7, 8]])).logits[0]
        found, base = (trainer.logits([[5, 6, 7, 8]], [0, 1, 2, 3], base=base) for base in (False, True))
    assert (found - expected).abs().max().item() < 1e-5
    assert (base - expected).abs().max().item() > 1e-3
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == trainer.loaded.tokenizer.chat_template
    assert plain.generation_config.eos_token_id == trainer.loaded.model.generation_config.eos_token_id


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_that_are_the_output_layer_too_are_trained_and_written_once(
    tiny_model_path: Path, tmp_path: Path, tied: bool
):
    model = tmp_path / "model"
    shutil.copytree(tiny_model_path, model)
    config = AutoConfig.from_pretrained(model)
    config.tie_word_embeddings = tied
    plain = AutoModelForCausalLM.from_config(config)
    plain.save_pretrained(model)
    trainer = Trainer(load(str(model)), LearnConfig(weights="full", learning_rate=1e-2))
    trainer.update([a_sample(trainer)], oldest_version=0)
    folder = saved(trainer, tmp_path / "versions")
    names = set(load_file(folder / "model.safetensors"))
    assert ("lm_head.weight" in names) is not tied
    assert len(trainer.parameters) == len(names)
    again = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(again.lm_head.weight, trainer.model.lm_head.weight)
    assert (again.lm_head.weight is again.model.embed_tokens.weight) is tied
    assert not torch.equal(again.lm_head.weight, plain.lm_head.weight)


def test_full_weights_of_a_bfloat16_model_are_trained_in_float32(tiny_model_path: Path, tmp_path: Path):
    trainer = Trainer(load(str(tiny_model_path), dtype="bfloat16"), LearnConfig(weights="full", learning_rate=1e-5))
    base = trainer.logits([[5, 6, 7, 8]], [3], base=True).detach()
    trainer.update([a_sample(trainer)], oldest_version=0)
    assert {p.dtype for p in trainer.parameters} == {torch.float32}
    assert torch.equal(trainer.logits([[5, 6, 7, 8]], [3], base=True), base)
    assert {p.dtype for p in trainer.parameters} == {torch.float32}
    base_weights = list(trainer.loaded.model.parameters())
    # Adam's first step is the learning rate, a fiftieth of what bfloat16 can tell apart beside a weight of 0.1.
    moved = [(p - b).abs().max().item() for p, b in zip(trainer.parameters, base_weights, strict=True)]
    assert max(moved) == pytest.approx(1e-5, rel=0.05)
    checkpoint.restore(trainer, saved(trainer, tmp_path))


def test_the_base_of_full_weights_stays_as_it_is_mapped(make_trainer: TrainerFactory):
    trainer = make_trainer(weights="full", teacher="base")
    before = [p.clone() for p in trainer.loaded.model.parameters()]
    trainer.update([a_sample(trainer, hints=("be brief, please",))], oldest_version=0)
    assert all(torch.equal(*pair) for pair in zip(trainer.loaded.model.parameters(), before, strict=True))
    assert not all(torch.equal(*pair) for pair in zip(trainer.parameters, before, strict=True))
    trainer.start_over()
    assert all(torch.equal(*pair) for pair in zip(trainer.parameters, before, strict=True))


@pytest.mark.parametrize("broken", ["rename", "write_text"])
def test_a_version_appears_whole_or_not_at_all(
    make_trainer: TrainerFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, broken: str
):
    def full_disk(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    trainer = make_trainer(weights=kind)
    with monkeypatch.context() as patched:
        patched.setattr(Path, broken, full_disk)
        with pytest.raises(OSError, match="No space"):
            saved(trainer, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_save_left_is_removed(tmp_path: Path):
    part = tmp_path / "000001.part"
    part.mkdir()
    (part / "model.safetensors").write_bytes(b"half")
    checkpoint.remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_only_training_needs_is_kept_for_the_newest_versions_only(make_trainer: TrainerFactory, tmp_path: Path):
    trainer = make_trainer(teacher="average")
    trainer.update([a_sample(trainer)], oldest_version=0)
    folders = [saved(trainer, tmp_path, version) for version in range(1, 6)]
    for name in ("optimizer.pt", checkpoint.AVERAGE_FILE):
        assert [(f / name).exists() for f in folders] == [False, False, True, True, True]
    assert all((f / WEIGHTS_FILE).exists() for f in folders)


def test_of_full_weights_that_are_removed_what_they_were_measured_on_stays(
    make_trainer: TrainerFactory, tmp_path: Path
):
    folder = saved(make_trainer(weights="full", teacher="average"), tmp_path)
    large = ["average.safetensors", "model.safetensors", "optimizer.pt"]
    size = sum((folder / name).stat().st_size for name in large)
    assert checkpoint.remove_weights(folder) == size
    assert not any((folder / name).exists() for name in large)
    assert {"trainer.json", checkpoint.PROBE_FILE} <= {file.name for file in folder.iterdir()}
    assert checkpoint.remove_weights(folder) == 0


def damaged(folder: Path, how: str) -> None:
    [file] = folder.glob("*model.safetensors")
    if how == "cut":
        file.write_bytes(file.read_bytes()[:1000])
    elif how == "gone":
        file.unlink()
    elif how == "not finite":
        state = load_file(file)
        state[min(state)].view(-1)[0] = float("nan")
        save_file(state, file, metadata={"format": "pt"})
    else:
        config = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps(config | {"r": 7}))


@pytest.mark.parametrize(
    ("kind", "how", "said"),
    [
        *((kind, how, "cannot be read") for kind in ("lora", "full") for how in ("cut", "gone")),
        *((kind, "not finite", "not finite") for kind in ("lora", "full")),
        ("lora", "other rank", "has r 7"),
    ],
    indirect=["kind"],
)
def test_a_damaged_version_is_a_clear_error(
    make_trainer: TrainerFactory, tmp_path: Path, kind: str, how: str, said: str
):
    trainer = make_trainer(weights=kind)
    folder = saved(trainer, tmp_path)
    damaged(folder, how)
    other = make_trainer(weights=kind)
    before = weights(other)
    with pytest.raises(AdapterError, match=said):
        checkpoint.restore(other, folder)
    assert torch.equal(weights(other), before)


@pytest.mark.parametrize("name", ["optimizer.pt", "trainer.json"])
def test_a_damaged_file_of_the_trainers_is_a_clear_error(make_trainer: TrainerFactory, tmp_path: Path, name: str):
    trainer = make_trainer()
    folder = saved(trainer, tmp_path)
    (folder / name).write_bytes((folder / name).read_bytes()[:20])
    with pytest.raises(AdapterError, match="cannot be trained on"):
        checkpoint.restore(trainer, folder)
