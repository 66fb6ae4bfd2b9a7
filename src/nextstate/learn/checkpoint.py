"""A policy version on disk: a PEFT adapter as others load it, and beside it what the next update needs.

    versions/000007/
      adapter_model.safetensors, adapter_config.json     the adapter, for us, transformers + PEFT, or vLLM
      optimizer.pt, trainer.json                         to go on training from here
      average.safetensors                                the teacher, where that is a moving average
      probe.json                                         what the trainer computes on fixed prompts, for the gate

The folder appears whole, by one rename, or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from nextstate.engines.adapters import CONFIG_FILE, WEIGHTS_FILE, read_adapter
from nextstate.errors import AdapterError
from nextstate.learn.trainer import Trainer

PROBE_FILE = "probe.json"
AVERAGE_FILE = "average.safetensors"
_KEEP_TO_TRAIN_ON = 3


def version_dir(versions: Path, version: int) -> Path:
    return versions / f"{version:06d}"


def save(
    trainer: Trainer, versions: Path, version: int, *, probe: Mapping[str, Any], metrics: Mapping[str, Any]
) -> Path:
    """Write a version. Until the last line nothing carries its name."""
    versions.mkdir(parents=True, exist_ok=True)
    folder, part = version_dir(versions, version), versions / f"{version:06d}.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    weights = {k: v.detach().cpu().contiguous() for k, v in get_peft_model_state_dict(trainer.model).items()}
    save_file(weights, part / WEIGHTS_FILE, metadata={"format": "pt"})
    if trainer.average is not None:
        save_file({name: tensor.cpu() for name, tensor in trainer.average.items()}, part / AVERAGE_FILE)
    config = trainer.model.peft_config["default"].to_dict() | {"inference_mode": True}
    (part / CONFIG_FILE).write_text(json.dumps(_plain(config), indent=1))
    torch.save(trainer.optimizer.state_dict(), part / "optimizer.pt")
    state = {"baselines": trainer.baselines, "metrics": dict(metrics)}
    (part / "trainer.json").write_text(json.dumps(state))
    (part / PROBE_FILE).write_text(json.dumps(dict(probe)))
    for file in part.iterdir():
        _sync(file)
    _sync(part)
    part.rename(folder)
    _sync(versions)
    _prune(versions)
    return folder


def restore(trainer: Trainer, folder: Path) -> None:
    """Go on from a version.

    Raises:
        AdapterError: the folder is missing or damaged.
    """
    config = trainer.model.peft_config["default"]
    set_peft_model_state_dict(trainer.model, read_adapter(folder, config))
    _restore_average(trainer, folder)
    try:
        trainer.baselines = json.loads((folder / "trainer.json").read_text())["baselines"]
    except (OSError, ValueError, KeyError) as error:
        raise AdapterError(f"{folder}/trainer.json cannot be read ({error}); restore it from a copy.") from error
    if (folder / "optimizer.pt").exists():
        trainer.optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True))
    else:  # of an older version it was thrown away; that of the version before this call would be another's
        trainer.optimizer.state.clear()


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
        raise AdapterError(f"{file} has other layers or shapes than the adapter beside it. {what_to_do}")
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


def _prune(versions: Path) -> None:
    """What only training needs is three times the adapter's size, and only recent versions are ever gone back to."""
    for name in ("optimizer.pt", AVERAGE_FILE):
        for old in sorted(versions.glob(f"[0-9]*/{name}"))[:-_KEEP_TO_TRAIN_ON]:
            old.unlink()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _plain(value: Any) -> Any:
    """JSON has no sets and no enums."""
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, set | frozenset | list | tuple):
        return sorted(map(_plain, value)) if isinstance(value, set | frozenset) else [_plain(v) for v in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
