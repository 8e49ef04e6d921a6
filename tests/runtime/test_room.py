"""Free memory: the least of what the machine and the container say, and None where neither does."""

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
