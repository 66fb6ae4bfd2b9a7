"""Versions with full weights: a model folder each, as transformers and vLLM load it, and a model object each to serve.

Publishing maps the new folder's weights beside those that serve; serving it is looking up another model object at the
next decoding step. On CPU in float32 the weights stay on disk and in the page cache; elsewhere a version is a copy.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig

from nextstate.engines import adapters
from nextstate.engines.model import LoadedModel
from nextstate.engines.packed import ATTENTION
from nextstate.engines.slots import oldest_to_leave
from nextstate.errors import AdapterError, AdapterMismatch, EngineFault

SLOTS = 2
"""One serves, one takes the candidate: a version may be gigabytes."""

WEIGHT_FILES = ("*.safetensors", "model.safetensors.index.json")
"""What of a version's folder is large; the index says which of several files holds what."""
_GENERATION_FILE = "generation_config.json"


class FullSlots:
    """The base model, the models of versions beside it, and which serves as what. See `VersionSlots`."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._base = loaded.model
        self._models: dict[int, nn.Module] = {}

    @property
    def versions(self) -> list[int]:
        return [0, *self._models]

    def load(self, version: int, artifact: Path, keep: Iterable[int]) -> None:
        held = [v for v in self._models if v != version]
        leaves = oldest_to_leave(held, keep) if len(held) >= SLOTS else None
        if len(held) >= SLOTS and leaves is None:
            raise EngineFault(f"version {version} was not loaded: all {SLOTS} places for full weights are in use.")
        # In float32 always: while it builds a model, transformers makes the dtype the default of all threads, and the
        # engine's is at work.
        model = read_full(artifact, self._base, torch.float32)
        if leaves is not None:
            # A step that still computes with it holds on to it.
            del self._models[leaves]
        first = next(self._base.parameters())
        self._models[version] = model.to(device=first.device, dtype=first.dtype)

    def activate(self, version: int) -> nn.Module:
        return self._models[version] if version else self._base


def read_full(artifact: Path, base: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model of a version's folder, checked; on the CPU, and memory-mapped where the dtype is that of the file.

    Raises:
        AdapterError: files missing or damaged, numbers not finite, or (AdapterMismatch) an adapter, or other shapes
            than those of the base.
    """
    if (artifact / adapters.CONFIG_FILE).exists():
        raise AdapterMismatch(
            f"{artifact} holds a LoRA adapter, and learn.weights is 'full'. Set learn.weights = \"lora\", or start "
            "with a new data folder: --data DIR."
        )
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            artifact,
            dtype=dtype,
            attn_implementation=ATTENTION,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise _unreadable(artifact, str(error)) from error
    if missing := found["missing_keys"]:
        raise _unreadable(artifact, f"{len(missing)} of its tensors are missing, {min(missing)} among them")
    shapes, expected = ({k: p.shape for k, p in m.named_parameters()} for m in (model, base))
    if shapes != expected:
        raise AdapterMismatch(
            f"the weights in {artifact} have other layers or shapes than the base model. Serve the model that they "
            "were made from, or start with a new data folder: --data DIR."
        )
    if not all(torch.isfinite(p).all() for p in model.parameters()):
        raise AdapterError(f"the weights in {artifact} hold numbers that are not finite; they will not serve.")
    checked: nn.Module = model.eval().requires_grad_(False)
    return checked


def write_full(model: nn.Module, loaded: LoadedModel, folder: Path) -> None:
    """A folder that transformers and vLLM load as it is: config, weights, tokenizer, the base's generation settings."""
    # transformers refuses to write some settings that it reads; the base's file is what the versions have too.
    model.generation_config = GenerationConfig()
    model.save_pretrained(folder)  # type: ignore[operator]
    (folder / _GENERATION_FILE).unlink(missing_ok=True)
    if (loaded.path / _GENERATION_FILE).exists():
        shutil.copy(loaded.path / _GENERATION_FILE, folder / _GENERATION_FILE)
    loaded.tokenizer.save_pretrained(folder)


def _unreadable(artifact: Path, why: str) -> AdapterError:
    return AdapterError(
        f"the weights in {artifact} cannot be read ({why}); the version before them goes on serving. Remove the "
        "folder, or restore it from a copy."
    )
