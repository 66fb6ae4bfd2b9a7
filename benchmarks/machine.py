"""What a figure depends on besides the code: the hardware, the load, and the memory of a process."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def facts() -> dict[str, Any]:
    """The hardware and the libraries."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "peft")},
    }


def load_average() -> float:
    """Processes that ran or wanted to, mean of the last minute."""
    return round(os.getloadavg()[0], 2)


def peak_mb(pid: int) -> float | None:
    """Most resident memory a process ever had, MB of 10^6 bytes; None where /proc does not say.

    Not ru_maxrss, although it means the same: a child inherits that of the process which started it.
    """
    return _kilobytes(Path(f"/proc/{pid}/status"), "VmHWM:")


def rss_mb(pid: int) -> float | None:
    """Resident memory of a process now, in MB; None where /proc does not say."""
    return _kilobytes(Path(f"/proc/{pid}/status"), "VmRSS:")


def pss_mb(pid: int) -> float | None:
    """Memory of a process now, in MB, in which a page that k processes share counts 1/k; None if /proc does not say."""
    return _kilobytes(Path(f"/proc/{pid}/smaps_rollup"), "Pss:")


def cpu_s(pid: int) -> float:
    """Processor seconds that all threads of a process have used so far; NaN where /proc does not say."""
    try:
        # Behind the name in parentheses, which may hold anything; fields 14 and 15 of the whole line.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return math.nan
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _kilobytes(file: Path, field: str) -> float | None:
    try:
        line = next(line for line in file.read_text().splitlines() if line.startswith(field))
    except (OSError, StopIteration):
        return None
    return round(int(line.split()[1]) * 1024 / 1e6, 1)


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A table for people. Numbers get three digits that mean something, and what was not measured a dash."""
    table = Table(title=title, title_justify="left")
    for n, column in enumerate(columns):
        table.add_column(column, justify="left" if n == 0 else "right")
    for row in rows:
        table.add_row(*map(_cell, row))
    Console(width=None if os.isatty(1) else 140).print(table)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)


def write(result: dict[str, Any], file: Path | None) -> None:
    if file is not None:
        file.write_text(json.dumps(result, indent=1) + "\n")
