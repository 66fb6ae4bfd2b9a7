"""A policy version on disk, as others load it, and beside it what the next update needs.

    versions/000007/
      adapter_model.safetensors, adapter_config.json     LoRA: for us, transformers + PEFT, or vLLM
      model.safetensors, config.json, tokenizer.json...  full weights: for us, transformers, or vLLM
      optimizer.pt, trainer.json                         to go on training from here, to the last bit
      average.safetensors                                the teacher, where that is a moving average
      probe.json                                         what the trainer computes on fixed prompts, for the gate

The folder appears whole, by one rename, or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from nextstate.engines.full import WEIGHT_FILES
from nextstate.errors import AdapterError
from nextstate.learn.trainer import Trained, Trainer

PROBE_FILE = "probe.json"
AVERAGE_FILE = "average.safetensors"
OPTIMIZER_FILE = "optimizer.pt"
_KEEP_TO_TRAIN_ON = 3


def version_dir(versions: Path, version: int) -> Path:
    return versions / f"{version:06d}"


def save(
    trainer: Trainer, versions: Path, version: int, *, probe: Mapping[str, Any], metrics: Mapping[str, Any]
) -> Path:
    """Write a version. Until the last line nothing carries its name, and what fails before leaves nothing."""
    versions.mkdir(parents=True, exist_ok=True)
    folder, part = version_dir(versions, version), versions / f"{version:06d}.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    try:
        trainer.weights.write(part)
        if trainer.average is not None:
            save_file({name: tensor.cpu() for name, tensor in trainer.average.items()}, part / AVERAGE_FILE)
        torch.save({**trainer.optimizer.state_dict(), "random": _random_state()}, part / OPTIMIZER_FILE)
        state = {"baselines": trainer.baselines, "trained": asdict(trainer.trained), "metrics": dict(metrics)}
        (part / "trainer.json").write_text(json.dumps(state))
        (part / PROBE_FILE).write_text(json.dumps(dict(probe)))
        for file in part.iterdir():
            _sync(file)
        _sync(part)
        part.rename(folder)
    finally:
        # A disk that full weights have filled would not be emptied by the next update, which has another number.
        shutil.rmtree(part, ignore_errors=True)
    _sync(versions)
    _prune(versions)
    return folder


def restore(trainer: Trainer, folder: Path) -> None:
    """Go on from a version, as if training had never been interrupted.

    Raises:
        AdapterError: the folder is missing or damaged, or (AdapterMismatch) was made under other settings.
    """
    trainer.weights.read(folder)
    _restore_average(trainer, folder)
    try:
        state = json.loads((folder / "trainer.json").read_text())
        trainer.baselines, trainer.trained = state["baselines"], Trained(**state.get("trained", {}))
        # An older version has no such file any more, and its training goes on without momentum.
        trainer.optimizer.state.clear()
        if (folder / OPTIMIZER_FILE).exists():
            saved = torch.load(folder / OPTIMIZER_FILE, weights_only=True)
            # The moments are the version's, the learning rate is the configuration's.
            trainer.optimizer.load_state_dict({**trainer.optimizer.state_dict(), "state": saved["state"]})
            _set_random_state(saved.get("random", {}))
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, UnpicklingError) as error:
        raise AdapterError(
            f"{folder} cannot be trained on: one of its files cannot be read ({error}). Restore it from a copy."
        ) from error


def _random_state() -> dict[str, torch.Tensor]:
    """Of every generator that training may draw from, by device. Python's own is none of them."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_random_state(states: Mapping[str, torch.Tensor]) -> None:
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _restore_average(trainer: Trainer, folder: Path) -> None:
    """The teacher as it stood; a version without one lets it begin at its own weights."""
    trainer.average_anew()
    file = folder / AVERAGE_FILE
    if trainer.average is None or not file.exists():
        return
    what_to_do = "Remove it, and the average begins again at this version."
    try:
        saved = load_file(file)
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"{file}, the teacher's moving average, cannot be read ({error}). {what_to_do}") from error
    if {k: v.shape for k, v in saved.items()} != {k: v.shape for k, v in trainer.average.items()}:
        raise AdapterError(f"{file} has other layers or shapes than the weights beside it. {what_to_do}")
    for name, tensor in trainer.average.items():
        tensor.copy_(saved[name])


def held_out_scores(folder: Path) -> dict[str, float]:
    """What a version made of held-out turns, by turn id; empty for the base, which was never measured."""
    try:
        found: dict[str, float] = json.loads((folder / PROBE_FILE).read_text()).get("held_out", {})
    except FileNotFoundError:
        return {}
    return found


def remove_leftovers(versions: Path) -> None:
    """Folders that a crash left half-written."""
    for part in versions.glob("*.part"):
        shutil.rmtree(part)


def remove_weights(folder: Path) -> int:
    """Remove what is large of a version with full weights that nobody can go back to. Returns the bytes freed.

    What it was measured and trained on stays. An engine that still serves it has its file open and loses nothing.
    """
    freed = 0
    for pattern in (*WEIGHT_FILES, OPTIMIZER_FILE):  # the average is one of them
        for file in folder.glob(pattern):
            freed += file.stat().st_size
            file.unlink()
    return freed


def _prune(versions: Path) -> None:
    """What only training needs is three times the weights' size, and only recent versions are ever gone back to."""
    for name in (OPTIMIZER_FILE, AVERAGE_FILE):
        for old in sorted(versions.glob(f"[0-9]*/{name}"))[:-_KEEP_TO_TRAIN_ON]:
            old.unlink()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
