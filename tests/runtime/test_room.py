"""Free memory: the least of what the machine and the container say, and None where neither does. Memory that is used again."""

import platform
import subprocess
import sys

import pytest
import torch

from autosym.runtime import room

CPU = torch.device("cpu")


def test_the_least_counts(monkeypatch, tmp_path):
    info = tmp_path / "meminfo"
    monkeypatch.setattr(room, "MEMINFO", info)
    monkeypatch.setattr(room, "GROUP", tmp_path)
    assert room.free(CPU) is None
    info.write_text("MemTotal:       100 kB\nMemAvailable:    50 kB\n")
    assert room.free(CPU) == 50 * 1024
    (tmp_path / "memory.current").write_text("1024\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert room.free(CPU) == 50 * 1024
    (tmp_path / "memory.max").write_text("11264\n")
    assert room.free(CPU) == 10 * 1024
    info.write_text("nothing that is known\n")
    assert room.free(CPU) == 10 * 1024


def test_this_machine_says_something_sensible():
    found = room.free(CPU)
    assert found is None or found > 2**20


def test_thresholds_are_set_by_the_outermost_alone(monkeypatch):
    seen = []
    monkeypatch.setattr(room, "_glibc", lambda: seen.append)
    with room.kept():
        with room.kept():
            assert seen == [room.KEEPING]
        assert seen == [room.KEEPING]
    assert seen == [room.KEEPING, room.USUAL]
    with pytest.raises(KeyError), room.kept():
        raise KeyError
    assert seen[2:] == [room.KEEPING, room.USUAL], "also after an error"


IN_A_FRESH_PROCESS = """
import resource
from pathlib import Path
import torch
from autosym.runtime import room

def held():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6

with room.kept():
    before = held()
    torch.ones(10_000_000)
    inside = held()
print(inside - before, inside - held())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="settings of glibc")
def test_freed_memory_is_kept_inside_and_handed_back_at_the_end():
    """In a process of its own: in this one, other tests leave gaps in memory, and a tensor that fills a gap is not handed back."""
    run = subprocess.run([sys.executable, "-c", IN_A_FRESH_PROCESS], capture_output=True, text=True, check=True)
    kept, handed_back = map(float, run.stdout.split())
    assert kept > 20, "of 40 MB that were written and freed"
    assert handed_back > 20


def test_without_glibc_nothing_is_set(monkeypatch):
    monkeypatch.setattr(room.ctypes, "CDLL", lambda name: object())
    room._glibc.cache_clear()
    with room.kept():
        pass
    room._glibc.cache_clear()
