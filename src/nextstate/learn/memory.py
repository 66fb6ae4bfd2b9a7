"""How much memory the trainer may take on this machine, and how much it has taken. Needs no torch."""

from __future__ import annotations

import os
import re
import resource
from dataclasses import dataclass
from pathlib import Path

_SHARE = 0.9
"""The rest of what is free is left to the server beside, whose caches grow while it answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Available:
    bytes: int
    source: str
    """Where the number comes from, as part of a sentence."""


def free_memory(root: Path = Path("/")) -> Available:
    """The least of what the machine, the control groups around this process, and its own limit leave free.

    Args:
        root: of the file system; a test has its own.
    """
    found = [*_machine(root), *_control_groups(root), *_own_limit(root)]
    if not found:  # not Linux: half of what is built in
        built_in = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Available(bytes=built_in // 2, source="half of the machine's memory")
    least, source = min(found)
    return Available(bytes=int(max(0, least) * _SHARE), source=f"nine tenths of what {source} leaves free")


def resident_bytes(root: Path = Path("/")) -> tuple[int, int] | None:
    """Memory of this process now, and at its peak since the last `forget_peak`. None where the system does not say."""
    status = _read(root / "proc/self/status")
    now, peak = (re.search(rf"^{name}:\s+(\d+) kB", status, re.MULTILINE) for name in ("VmRSS", "VmHWM"))
    return (int(now[1]) * 1024, int(peak[1]) * 1024) if now and peak else None


def forget_peak() -> bool:
    """Let the peak begin again at what is resident now; False where the system cannot."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _machine(root: Path) -> list[tuple[int, str]]:
    found = re.search(r"^MemAvailable:\s+(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    return [(int(found[1]) * 1024, "the machine")] if found else []


def _control_groups(root: Path) -> list[tuple[int, str]]:
    """Of each group with a limit: its limit less its use; pages of files that can be dropped are no use."""
    found = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        if controllers:  # version 1
            mount, names = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
            droppable = r"^total_inactive_file (\d+)"
        else:
            mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
            droppable = r"^inactive_file (\d+)"
        group = mount / path.lstrip("/")
        # A container sees its own group as the root, whatever its path is called outside.
        for folder in [group, *(parent for parent in group.parents if parent.is_relative_to(mount))]:
            limit, used = (_read(folder / name).strip() for name in names)
            if limit.isdigit() and used.isdigit():
                files = re.search(droppable, _read(folder / "memory.stat"), re.MULTILINE)
                free = int(limit) - int(used) + (int(files[1]) if files else 0)
                found.append((free, f"the memory limit of control group {folder.relative_to(mount) or '/'}"))
    return found


def _own_limit(root: Path) -> list[tuple[int, str]]:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    mapped = re.search(r"^VmSize:\s+(\d+) kB", _read(root / "proc/self/status"), re.MULTILINE)
    if limit == resource.RLIM_INFINITY or not mapped:
        return []
    return [(limit - int(mapped[1]) * 1024, "the limit of this process's address space (ulimit -v)")]


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
