"""Settings of arithmetic during a run: no denormal numbers and one thread on a CPU, sums in a fixed order on a GPU."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class NotFinite(ValueError):
    """Numbers that overflowed, or are none."""


@contextmanager
def no_denormals() -> Iterator[None]:
    """Count numbers below 1e-38 as zero. Weights that go to zero pass through them, and are many times slower there on a CPU."""
    already = float(torch.tensor(1e-310, dtype=torch.float64) * 1) == 0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(already)


@contextmanager
def one_thread(wanted: bool = True) -> Iterator[None]:
    """Work by one thread of a CPU: the number of cores changes no sum. Small matrices gain nothing by more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if wanted else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Sums in the same order every time, also on a GPU. (There cuBLAS needs an environment variable, which stays set.)"""
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
