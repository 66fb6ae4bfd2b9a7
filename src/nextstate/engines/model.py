"""Loading a Hugging Face causal model, by hub name, folder, or the built-in one.

The weights stay memory-mapped: the server and the trainer map the same file, so the machine holds the base weights
once, and nothing is copied between the processes.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from nextstate.engines import builtin
from nextstate.engines.packed import ATTENTION
from nextstate.errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    model: nn.Module
    tokenizer: Any
    name: str
    path: Path
    context_tokens: int
    end_ids: frozenset[int]
    """Tokens that end an answer."""
    fingerprint: str
    """Of the architecture and the weights' layout; a data folder belongs to one."""


def resolve(name_or_path: str, say: Callable[[str], None] = lambda _: None) -> Path:
    """The local folder of a model.

    Raises:
        ModelError: neither a folder, nor the built-in model, nor to be had from the hub.
    """
    if name_or_path == builtin.NAME:
        return builtin.builtin_model(say)
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").exists():
            raise ModelError(f"{folder} has no config.json, so it is not a Hugging Face model folder.")
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        wanted = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model"]
        return Path(snapshot_download(name_or_path, allow_patterns=wanted))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise ModelError(
            f"Model '{name_or_path}' is neither a folder here nor to be had from the Hugging Face hub "
            f"({type(error).__name__}). Check the name, or use the built-in model: --model {builtin.NAME}."
        ) from error


def load(name_or_path: str, *, dtype: str = "auto", device: str = "auto") -> LoadedModel:
    """Load a model to serve or to train.

    Args:
        dtype: float32, bfloat16, or auto: float32 on CPU, where bfloat16 would put noise of about 0.03 nats on every
            recorded log-prob that no trainer can remove; bfloat16 on a GPU.
        device: cpu, cuda, or auto.

    Raises:
        ModelError: it cannot be read, or its attention is of a kind that we do not run.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    # PEFT calls what transformers has just renamed; nobody who runs a server can do anything about it.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers\..*")
    path = resolve(name_or_path)
    dtype, device = _chosen(dtype, device)
    try:
        config = AutoConfig.from_pretrained(path)
        _check_attention(name_or_path, config)
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, dtype), attn_implementation=ATTENTION, use_safetensors=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"Model '{name_or_path}' cannot be loaded from {path}: {error}") from error
    if not getattr(tokenizer, "chat_template", None):
        raise ModelError(f"Model '{name_or_path}' has no chat template, so it cannot chat. Use an instruct model.")
    model.to(device).eval().requires_grad_(False)
    ends = model.generation_config.eos_token_id
    end_ids = {*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id} - {None}
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name=name_or_path if name_or_path == builtin.NAME else (Path(name_or_path).name or name_or_path),
        path=path,
        context_tokens=int(config.max_position_embeddings),
        end_ids=frozenset(end_ids),
        fingerprint=_fingerprint(path),
    )


def outline(name_or_path: str, *, dtype: str = "auto", device: str = "auto") -> tuple[nn.Module, int, torch.device]:
    """A model without its weights (on the meta device), its context in tokens, and where it would be loaded to.

    Raises:
        ModelError: its config cannot be read, or its attention is of a kind that we do not run.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    path = resolve(name_or_path)
    dtype, device = _chosen(dtype, device)
    try:
        config = AutoConfig.from_pretrained(path)
        _check_attention(name_or_path, config)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"Model '{name_or_path}' cannot be read from {path}: {error}") from error
    return model, int(config.max_position_embeddings), torch.device(device)


def _chosen(dtype: str, device: str) -> tuple[str, str]:
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    return ("float32" if device == "cpu" else "bfloat16") if dtype == "auto" else dtype, device


def _check_attention(name: str, config: Any) -> None:
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds or (getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)):
        raise ModelError(
            f"Model '{name}' uses {', '.join(sorted(kinds)) or 'sliding-window'} layers; the local engine runs models "
            "with full attention in every layer only. Choose such a model (Llama, Qwen2.5, Qwen3, SmolLM2...)."
        )


def _fingerprint(path: Path) -> str:
    """A hash of the config and of each weight file's header: names, shapes and types, without reading gigabytes."""
    digest = hashlib.sha256((path / "config.json").read_bytes())
    for file in sorted(path.glob("*.safetensors")):
        with file.open("rb") as weights:
            digest.update(weights.read(int.from_bytes(weights.read(8), "little")))
        digest.update(str(os.path.getsize(file)).encode())
    return digest.hexdigest()[:16]
