"""Rows into files: JSON lines, or Parquet."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import IO, Any

from nextstate.errors import ConfigError
from nextstate.export.rows import MESSAGE_FIELDS, Kind, Row

_ROWS_IN_GROUP = 500


def write_jsonl(rows: Iterable[Row], stream: IO[str]) -> int:
    """One object a line. Returns how many."""
    count = 0
    for row in rows:
        stream.write(json.dumps(row, ensure_ascii=False) + "\n")
        count += 1
    return count


def write_parquet(rows: Callable[[], Iterator[Row]], kind: Kind, file: Path) -> int:
    """Columns of the types that `datasets` reads. Returns how many rows.

    Args:
        rows: called twice: a column holds messages of one form, so the first pass looks for the fields they have. A
            field that no message has is no column, or templates would meet nulls in every message.

    Raises:
        ConfigError: pyarrow is not installed.
    """
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError(
            "Parquet files need pyarrow, which is not installed. Nothing was written. "
            "Use --format jsonl, or: pip install 'nextstate[parquet]'."
        ) from error
    fields: dict[str, set[str]] = defaultdict(set)
    for row in rows():
        for column, value in row.items():
            if _are_messages(value):
                fields[column].update(field for message in value for field in message)
    schema = _schema(pa, kind, fields)
    count = 0
    with parquet.ParquetWriter(file, schema) as writer:
        left = rows()
        while group := list(islice(left, _ROWS_IN_GROUP)):
            writer.write_table(pa.Table.from_pylist(group, schema=schema))
            count += len(group)
    return count


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _schema(pa: Any, kind: Kind, fields: Mapping[str, set[str]]) -> Any:
    """Args:
    fields: that the messages of each column have.
    """
    function = pa.struct([("name", pa.string()), ("arguments", pa.string())])
    calls = pa.list_(pa.struct([("id", pa.string()), ("type", pa.string()), ("function", function)]))

    def messages(column: str) -> tuple[str, Any]:
        names = [name for name in MESSAGE_FIELDS if name in fields.get(column, {"role", "content"})]
        return column, pa.list_(pa.struct([(name, calls if name == "tool_calls" else pa.string()) for name in names]))

    label, about = ("label", pa.bool_()), [("tools", pa.string()), ("turn_id", pa.int64()), ("session", pa.string())]
    tokens = [
        ("prompt_token_ids", pa.list_(pa.int32())),
        ("answer_token_ids", pa.list_(pa.int32())),
        ("answer_logprobs", pa.list_(pa.float32())),
        ("answer_versions", pa.list_(pa.int32())),
        ("temperature", pa.float64()),
    ]
    if kind is Kind.TURNS:
        return pa.schema([messages("prompt"), messages("completion"), label, *about, *tokens])
    if kind is Kind.DISTILLATION:
        hints = [("privileged_context", pa.string()), ("hints", pa.list_(pa.string()))]
        return pa.schema([messages("prompt"), *hints, messages("answer"), label, *about, *tokens])
    pair = [messages("prompt"), messages("chosen"), messages("rejected"), ("pair", pa.string())]
    both = [(f"{side}_{name}", type_) for side in ("chosen", "rejected") for name, type_ in tokens]
    return pa.schema([*pair, *about, ("chosen_turn_id", pa.int64()), *both])
