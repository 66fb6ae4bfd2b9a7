"""What the trainer trains: a LoRA adapter on the base model, or a copy of all its weights.

    lora   one model; the base is the same with the adapter off
    full   a copy to train, in float32 at least, and the base, mapped from disk and shared with the server

Either can be read and written as a version's folder, which others load as it is.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from peft import PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor, nn

from nextstate.config import LearnConfig
from nextstate.engines.adapters import CONFIG_FILE, WEIGHTS_FILE, lora_config, read_adapter
from nextstate.engines.full import read_full, write_full
from nextstate.engines.model import LoadedModel


class TrainableWeights(Protocol):
    """A policy in training, and the base that it began as."""

    model: nn.Module
    """Computes as the policy."""

    def as_base(self) -> AbstractContextManager[None]:
        """Within, `model` computes as the base, without gradient. Graphs recorded before keep their values."""
        ...

    def start_over(self) -> None:
        """Back to the base."""
        ...

    def write(self, folder: Path) -> None:
        """Add the weights to a version's folder."""
        ...

    def read(self, folder: Path) -> None:
        """Take the weights of a version.

        Raises:
            AdapterError: they are missing or damaged, or (AdapterMismatch) of another shape or kind; nothing changed.
        """
        ...


def trainable(loaded: LoadedModel, config: LearnConfig) -> TrainableWeights:
    """The kind that `learn.weights` names, as it stands before anything was learned."""
    if config.weights == "full":
        return FullWeights(loaded)
    return LoraWeights(loaded, config)


class LoraWeights:
    """One adapter in the layers of the loaded model, which it changes. See `TrainableWeights`."""

    def __init__(self, loaded: LoadedModel, config: LearnConfig) -> None:
        self._config = lora_config(config.rank, config.alpha, config.targets)
        self.model: PeftModel = get_peft_model(loaded.model, self._config)
        self._untrained = {k: v.clone() for k, v in get_peft_model_state_dict(self.model).items()}

    def as_base(self) -> AbstractContextManager[None]:
        off: AbstractContextManager[None] = self.model.disable_adapter()
        return off

    def start_over(self) -> None:
        # A fresh adapter changes nothing until it is trained.
        set_peft_model_state_dict(self.model, self._untrained)

    def write(self, folder: Path) -> None:
        weights = {k: v.detach().cpu().contiguous() for k, v in get_peft_model_state_dict(self.model).items()}
        save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        config = self.model.peft_config["default"].to_dict() | {"inference_mode": True}
        (folder / CONFIG_FILE).write_text(json.dumps(_plain(config), indent=1))

    def read(self, folder: Path) -> None:
        set_peft_model_state_dict(self.model, read_adapter(folder, self._config))


class FullWeights:
    """A copy of all weights. See `TrainableWeights`."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self.model = copy.deepcopy(loaded.model)
        # In bfloat16 most updates would be smaller than half the distance to the next number, and be lost.
        self._dtype = torch.promote_types(next(self.model.parameters()).dtype, torch.float32)
        self.model.to(self._dtype).requires_grad_(True)

    def as_base(self) -> AbstractContextManager[None]:
        return swapped(list(self.model.parameters()), [p.data for p in self._loaded.model.parameters()])

    def start_over(self) -> None:
        self._copy_from(self._loaded.model)

    def write(self, folder: Path) -> None:
        write_full(self.model, self._loaded, folder)

    def read(self, folder: Path) -> None:
        self._copy_from(read_full(folder, self._loaded.model, self._dtype))

    @torch.no_grad()
    def _copy_from(self, other: nn.Module) -> None:
        for own, theirs in zip(self.model.parameters(), other.parameters(), strict=True):
            own.copy_(theirs)


@contextmanager
def swapped(parameters: Sequence[nn.Parameter], others: Sequence[Tensor]) -> Iterator[None]:
    """Within, parameters have the values of others.

    Storages are swapped and nothing is written into one, so that a graph recorded before keeps the values that it was
    computed with.
    """
    own = [parameter.data for parameter in parameters]
    try:
        for parameter, other in zip(parameters, others, strict=True):
            parameter.data = other
        yield
    finally:
        for parameter, data in zip(parameters, own, strict=True):
            parameter.data = data


def _plain(value: Any) -> Any:
    """JSON has no sets and no enums."""
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, set | frozenset | list | tuple):
        return sorted(map(_plain, value)) if isinstance(value, set | frozenset) else [_plain(v) for v in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
