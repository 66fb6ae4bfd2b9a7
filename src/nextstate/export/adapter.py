"""A version as a folder that transformers and PEFT load: the adapter alone, or merged into the model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, select

from nextstate.engines.adapters import CONFIG_FILE, WEIGHTS_FILE
from nextstate.errors import ConfigError
from nextstate.store.schema import policy_versions


def artifact_of(db: Connection, version: int) -> str:
    """Where a version's files are, under the data folder.

    Raises:
        ConfigError: there is no such version, or it has no files.
    """
    row = db.execute(select(policy_versions).where(policy_versions.c.version == version)).first()
    seen = "`nextstate versions list` shows what there is."
    if row is None:
        raise ConfigError(f"there is no version {version}. Nothing was written; {seen}")
    if version == 0:
        raise ConfigError("version 0 is the model itself, without an adapter. Nothing was written; use the model.")
    if row.artifact is None:
        raise ConfigError(
            f"the files of version {version} were removed: {row.gate['why']}. Nothing was written; {seen}"
        )
    return str(row.artifact)


def copy_adapter(artifact: Path, folder: Path, *, base: str) -> None:
    """The adapter as PEFT saves it: two files.

    Args:
        base: the model's name or folder, which PEFT reads from the adapter's configuration.

    Raises:
        ConfigError: the folder is not empty, or the adapter is not there.
    """
    _make_empty(folder)
    try:
        made_with: dict[str, Any] = json.loads((artifact / CONFIG_FILE).read_text())
        shutil.copyfile(artifact / WEIGHTS_FILE, folder / WEIGHTS_FILE)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the adapter in {artifact} cannot be read: {error}. Restore it from a copy.") from error
    (folder / CONFIG_FILE).write_text(json.dumps({**made_with, "base_model_name_or_path": base}, indent=1))


def merge(artifact: Path, folder: Path, *, model: str, fingerprint: str) -> None:
    """The model with the adapter in its weights, and its tokenizer: a folder like the model's own.

    Args:
        model: name or folder of the base model.
        fingerprint: of the model that the data folder belongs to.

    Raises:
        ConfigError: the folder is not empty, or the model is another one.
        ModelError: the model cannot be loaded.
    """
    from peft import PeftModel

    from nextstate.engines.model import load

    loaded = load(model, device="cpu")
    if loaded.fingerprint != fingerprint:
        raise ConfigError(
            f"the adapter was not trained on model '{model}'. Nothing was written. Name the one that the data folder "
            "belongs to: --model NAME."
        )
    _make_empty(folder)
    PeftModel.from_pretrained(loaded.model, artifact).merge_and_unload().save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)


def _make_empty(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"folder {folder} is not empty. Nothing was written. Name another, or empty it.")
    except OSError as error:
        raise ConfigError(f"folder {folder} cannot be used: {error.strerror}. Nothing was written.") from error
