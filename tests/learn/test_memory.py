"""What is free, on a machine made of files."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from nextstate.learn.memory import Available, forget_peak, free_memory, resident_bytes


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with 8,000 kB to be had, and no groups."""
    write(tmp_path, "proc/meminfo", "MemTotal: 16000 kB\nMemFree: 100 kB\nMemAvailable:    8000 kB\n")
    write(tmp_path, "proc/self/status", "VmSize:\t   3000 kB\nVmHWM:\t    900 kB\nVmRSS:\t    700 kB\n")
    write(tmp_path, "proc/self/cgroup", "0::/user/me\n")
    return tmp_path


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def test_of_what_the_machine_has_free_a_tenth_is_left_to_the_server(root: Path):
    assert free_memory(root) == Available(
        bytes=int(0.9 * 8000 * 1024), source="nine tenths of what the machine leaves free"
    )


def test_a_limit_of_an_outer_control_group_counts_and_pages_of_files_do_not(root: Path):
    group = "sys/fs/cgroup/user"
    for name, text in (("memory.max", "3000000\n"), ("memory.current", "2500000\n")):
        write(root, f"{group}/{name}", text)
    write(root, f"{group}/memory.stat", "anon 7\ninactive_file 1500000\n")
    write(root, f"{group}/me/memory.max", "max\n")
    write(root, f"{group}/me/memory.current", "1\n")
    found = free_memory(root)
    assert found.bytes == int(0.9 * 2_000_000)  # 3.0 - 2.5 + 1.5
    assert found.source.endswith("the memory limit of control group user leaves free")


def test_control_groups_of_the_first_version_count_too(root: Path):
    write(root, "proc/self/cgroup", "9:name=systemd:/\n4:memory:/docker/abc\n1:cpu,cpuacct:/x\n")
    # In a container the group is mounted as the root, and its path outside does not exist.
    for name, text in (("limit_in_bytes", "1000000"), ("usage_in_bytes", "400000")):
        write(root, f"sys/fs/cgroup/memory/memory.{name}", text)
    assert free_memory(root).bytes == int(0.9 * 600_000)


def test_a_group_that_is_full_leaves_nothing(root: Path):
    for name, text in (("max", "1000"), ("current", "2000")):
        write(root, f"sys/fs/cgroup/memory.{name}", text)
    assert free_memory(root).bytes == 0


def test_a_limit_on_this_process_counts_less_what_it_has_mapped(root: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (5_000_000, 5_000_000))
    assert free_memory(root).bytes == int(0.9 * (5_000_000 - 3000 * 1024))


def test_the_peak_is_read_and_begins_again(root: Path):
    assert resident_bytes(root) == (700 * 1024, 900 * 1024)
    large = bytearray(60_000_000)
    del large
    if not forget_peak():
        pytest.skip("what is tested is missing here: a system that does not say the peak")
    now, peak = resident_bytes() or (0, 0)
    assert peak - now < 30_000_000
    large = bytearray(60_000_000)
    large[::4096] = b"x" * len(large[::4096])
    assert (resident_bytes() or (0, 0))[1] - now > 50_000_000


def test_where_there_is_no_proc_half_of_the_machine_is_taken(tmp_path: Path):
    assert free_memory(tmp_path).source == "half of the machine's memory"
