"""The files as `datasets` reads them, and one step of TRL's trainers on each kind."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from nextstate.cli.main import app
from nextstate.export.files import write_parquet
from nextstate.export.rows import Kind, rows
from nextstate.store.store import Store
from nextstate.types import Vote
from tests.export.test_rows import a_correction
from tests.rows import judged_turn, new_turn

datasets = pytest.importorskip("datasets", reason="datasets comes with trl, which `pip install nextstate[dev]` brings")

CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "fox"}'}}


@pytest.fixture
def data(store: Store, tmp_path: Path) -> Path:
    """A correction, and a good answer that is a call; two more judged turns, for batches."""
    a_correction(store, Vote.GOOD)
    called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    judged_turn(store, Vote.GOOD, answer=called, new=new_turn(request_spine="call"))
    judged_turn(store, Vote.BAD, new=new_turn(request_spine="last"))
    return tmp_path


def export(data: Path, kind: str, form: str) -> tuple[Path, dict[str, Any]]:
    file = data / f"rows.{form}"
    command = ["export", kind, "--data", str(data), "--out", str(file), "--format", form, "--json"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.stderr
    return file, json.loads(result.stdout)


def load(file: Path, cache: Path) -> Any:
    kind = "json" if file.suffix == ".jsonl" else "parquet"
    return datasets.load_dataset(kind, data_files=str(file), split="train", cache_dir=str(cache))


def without_nulls(value: Any) -> Any:
    """Messages as they were: in Parquet all messages of a column have the fields of any."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [{name: inner for name, inner in message.items() if inner is not None} for message in value]
    return value


@pytest.mark.parametrize(
    ("kind", "count", "columns"),
    [
        ("turns", 4, {"prompt", "completion", "label"}),
        ("preferences", 1, {"prompt", "chosen", "rejected", "pair"}),
        ("distillation", 2, {"prompt", "privileged_context", "hints", "answer", "label"}),
    ],
)
def test_datasets_reads_the_same_from_both_forms(
    data: Path, tmp_path_factory: pytest.TempPathFactory, kind: str, count: int, columns: set[str]
):
    cache = tmp_path_factory.mktemp("cache")
    found = {}
    for form in ("jsonl", "parquet"):
        file, said = export(data, kind, form)
        assert said["rows"] == count
        found[form] = load(file, cache)
        assert columns <= set(found[form].column_names)
    assert set(found["jsonl"].column_names) == set(found["parquet"].column_names)
    for one, other in zip(found["jsonl"], found["parquet"], strict=True):
        for name, value in one.items():
            same = pytest.approx(other[name]) if name.endswith("_logprobs") else other[name]
            assert value == without_nulls(same), name


def test_parquet_has_no_column_for_a_field_that_no_message_has(store: Store, tmp_path: Path):
    from pyarrow import parquet

    judged_turn(store)
    file = tmp_path / "rows.parquet"
    assert write_parquet(lambda: rows(store, Kind.TURNS, Counter()), Kind.TURNS, file) == 1
    assert parquet.read_table(file).to_pylist()[0]["prompt"] == [{"role": "user", "content": "a fox?"}]
    assert str(parquet.read_schema(file).field("answer_logprobs").type) == "list<element: float>"


@pytest.mark.slow
@pytest.mark.parametrize("form", ["jsonl", "parquet"])
@pytest.mark.parametrize("kind", ["turns", "preferences", "distillation"])
def test_trl_trains_a_step_on_each_kind(
    data: Path, tmp_path_factory: pytest.TempPathFactory, tiny_model_path: Path, kind: str, form: str
):
    pytest.importorskip("trl", reason="trl, which the extra dev brings, is missing")
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
    from trl.experimental.sdft import SDFTConfig, SDFTTrainer

    file, _ = export(data, kind, form)
    # The tiny model's template knows no calls; such a row is for models that do.
    rows = load(file, tmp_path_factory.mktemp("cache")).filter(
        lambda row: all(not message.get("tool_calls") for message in row.get("completion") or [])
    )
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path)
    tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(tiny_model_path)
    before = {name: value.clone() for name, value in model.named_parameters()}
    common: dict[str, Any] = {
        "output_dir": str(tmp_path_factory.mktemp("trl")),
        "max_steps": 1,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "save_strategy": "no",
    }
    trainers: dict[str, Any] = {
        "turns": lambda: KTOTrainer(model, args=KTOConfig(**common), train_dataset=rows, processing_class=tokenizer),
        "preferences": lambda: DPOTrainer(
            model, args=DPOConfig(**common), train_dataset=rows, processing_class=tokenizer
        ),
        "distillation": lambda: SDFTTrainer(
            model,
            args=SDFTConfig(**common, max_completion_length=8, num_generations=2),
            train_dataset=rows,
            processing_class=tokenizer,
        ),
    }
    result = trainers[kind]().train()
    assert result.global_step == 1
    assert any(not value.equal(before[name]) for name, value in model.named_parameters())
