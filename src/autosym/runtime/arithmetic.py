"""Settings of arithmetic: no denormal numbers and one thread on a CPU, sums in a fixed order and true float32 on a GPU."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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


@contextmanager
def true_float32(wanted: bool = True) -> Iterator[None]:
    """Compute float32 products and convolutions with all 24 bits: no TF32 (a GPU's default for convolutions), no bfloat16.

    torch has two sets of switches for this. The old ones are read and set only where they agree with the new ones: elsewhere
    reading them is an error. Afterwards every switch has the value that it had.
    """
    if not wanted:
        yield
        return
    cudnn, mkldnn = torch.backends.cudnn, torch.backends.mkldnn
    parts: tuple[Any, ...] = torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul, mkldnn.conv  # type: ignore
    before = [part.fp32_precision for part in parts]
    products, convolutions = _known(torch.get_float32_matmul_precision), _known(lambda: cudnn.allow_tf32)
    try:
        _set_old(None if products is None else "highest", None if convolutions is None else False)
        for part in parts:
            part.fp32_precision = "ieee"
        yield
    finally:
        _set_old(products, convolutions)
        for part, precision in zip(parts, before, strict=True):
            part.fp32_precision = precision


def _known(read: Callable[[], Any]) -> Any:
    """An old switch, or None where it contradicts the new ones."""
    try:
        return read()
    except RuntimeError:
        return None


def _set_old(products: str | None, convolutions: bool | None) -> None:
    """Set the old switches, which set the new ones too. None leaves one as it is."""
    if products is not None:
        torch.set_float32_matmul_precision(products)
    if convolutions is not None:
        torch.backends.cudnn.allow_tf32 = convolutions
