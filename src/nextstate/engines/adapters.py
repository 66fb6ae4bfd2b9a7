"""LoRA adapters in the served model: a few slots, filled in the background, switched between two decoding steps.

Every slot is a PEFT adapter made at the start, so publishing a version is a copy of some megabytes into a slot that
nobody uses, and serving it is setting an attribute on each layer: streams in flight do not wait for either.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from nextstate.engines.slots import oldest_to_leave
from nextstate.errors import AdapterError, AdapterMismatch, EngineFault

SLOTS = 3
"""One serves, one takes the candidate, one keeps the version before for comparison."""

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"

_SETTINGS = {"r": "learn.rank", "lora_alpha": "learn.alpha"}


class AdapterSlots:
    """The base model with its adapter slots, and which version sits in which. See `VersionSlots`."""

    def __init__(self, base: nn.Module, config: LoraConfig) -> None:
        self._base = base
        self.model: PeftModel = get_peft_model(base, config, adapter_name="slot0")
        for i in range(1, SLOTS):
            self.model.add_adapter(f"slot{i}", config)
        self.model.eval().requires_grad_(False)
        self._layers = [m for m in self.model.modules() if isinstance(m, BaseTunerLayer)]
        self._slots: dict[int, str] = {}
        self._config = config
        self.activate(0)

    @property
    def versions(self) -> list[int]:
        return [0, *self._slots]

    def load(self, version: int, artifact: Path, keep: Iterable[int]) -> None:
        state = read_adapter(artifact, self._config)
        taken = set(self._slots.values())
        free = [f"slot{i}" for i in range(SLOTS) if f"slot{i}" not in taken]
        if not free:
            oldest = oldest_to_leave(self._slots, keep)
            if oldest is None:
                raise EngineFault(f"version {version} was not loaded: all {SLOTS} adapter slots are in use.")
            free = [self._slots.pop(oldest)]
        expected = get_peft_model_state_dict(self.model, adapter_name=free[0])
        if {k: v.shape for k, v in state.items()} != {k: v.shape for k, v in expected.items()}:
            raise AdapterMismatch(
                f"the adapter in {artifact} does not fit: it has other layers or other shapes than the configuration "
                "asks for. Set learn.targets back, or start with a new data folder: --data DIR."
            )
        set_peft_model_state_dict(self.model, state, adapter_name=free[0])
        self._slots[version] = free[0]

    def activate(self, version: int) -> nn.Module:
        # PEFT's own switch also walks over gradients of every parameter (60 ms here), which inference has no use for.
        slot = self._slots.get(version)
        if version != 0 and slot is None:
            raise KeyError(version)
        for layer in self._layers:
            layer._disable_adapters = slot is None
            if slot is not None:
                layer._active_adapter = [slot]
        return self._base


def read_adapter(artifact: Path, config: LoraConfig) -> dict[str, torch.Tensor]:
    """The tensors of a PEFT adapter folder, after checking them.

    Raises:
        AdapterError: files missing or damaged, numbers not finite, or (AdapterMismatch) full weights, or another rank
            than `config`.
    """
    if not (artifact / CONFIG_FILE).exists() and (artifact / "config.json").exists():
        raise AdapterMismatch(
            f"{artifact} holds full weights, and learn.weights is 'lora'. Set learn.weights = \"full\", or start with "
            "a new data folder: --data DIR."
        )
    try:
        made_with: dict[str, Any] = json.loads((artifact / CONFIG_FILE).read_text())
        state: dict[str, torch.Tensor] = load_file(artifact / WEIGHTS_FILE)
    except (OSError, ValueError, SafetensorError) as error:
        raise AdapterError(
            f"the adapter in {artifact} cannot be read ({error}); the version before it goes on serving. "
            "Remove the folder, or restore it from a copy."
        ) from error
    for key in _SETTINGS:
        if made_with.get(key) != getattr(config, key):
            raise AdapterMismatch(
                f"the adapter in {artifact} has {key} {made_with.get(key)}, the configuration asks for "
                f"{getattr(config, key)}. Set it back ({_SETTINGS[key]}), or start with a new data folder: --data DIR."
            )
    if not all(torch.isfinite(tensor).all() for tensor in state.values()):
        raise AdapterError(f"the adapter in {artifact} holds numbers that are not finite; it will not serve.")
    return state


def lora_config(rank: int, alpha: int, targets: str) -> LoraConfig:
    """The adapter's shape, the same for the engine's slots and the trainer."""
    modules = targets if targets == "all-linear" else targets.split(",")
    return LoraConfig(r=rank, lora_alpha=alpha, target_modules=modules, lora_dropout=0.0, task_type="CAUSAL_LM")
