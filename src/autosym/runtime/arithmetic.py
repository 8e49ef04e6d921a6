"""Arithmetic for the time of a run: no denormal numbers on a CPU, the same sums in the same order on a GPU."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_denormals() -> Iterator[None]:
    """Numbers below 1e-38 count as zero: the weights of a path that is going through them are many times slower on a CPU."""
    already = float(torch.tensor(1e-310, dtype=torch.float64) * 1) == 0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(already)


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """The same sums in the same order every time, on a GPU too (where cuBLAS needs a setting, which stays)."""
    if not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = benchmark
