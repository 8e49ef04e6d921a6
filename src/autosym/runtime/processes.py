"""Several processes (``torch.distributed``, e.g. under torchrun): each takes a part of the samples, and sums and counts are added up.

Every process holds the whole model and takes the same decisions from the same sums. In a single process nothing here does anything.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autosym.runtime.arithmetic import NotFinite


class Lost(RuntimeError):
    """Another process of the run has ended."""


_apart = False  # whether this process works alone for a while


def count() -> int:
    """How many processes there are that work together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() and not _apart else 1


@contextmanager
def alone() -> Iterator[None]:
    """What happens inside is the work of this process alone: a fit of its own, while others make other fits."""
    global _apart
    before, _apart = _apart, True
    try:
        yield
    finally:
        _apart = before


def shared(found: Any, owner: int) -> Any:
    """What the process ``owner`` has found, in all of them."""
    if count() == 1:
        return found
    held = [found]
    _together(dist.broadcast_object_list, held, owner)
    return held[0]


def rank() -> int:
    """Which of them this is, from 0."""
    return dist.get_rank() if count() > 1 else 0


def first() -> bool:
    """Whether this is the process that prints and writes."""
    return rank() == 0


def add(*tensors: Tensor) -> None:
    """Replace tensors by their sums over all processes, in place."""
    for tensor in tensors:
        _together(dist.all_reduce, tensor)


def make_same(model: nn.Module) -> None:
    """Give every process the parameters and buffers of the first."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            _together(dist.broadcast, tensor.data, 0)


def agreed(value: float) -> float:
    """The number that the first process has: a decision by it is the same in every process."""
    shared = torch.tensor(value, dtype=torch.float64, device="cuda" if count() > 1 and dist.get_backend() == "nccl" else "cpu")
    _together(dist.broadcast, shared, 0)
    return float(shared)


@contextmanager
def agreeing() -> Iterator[None]:
    """For work without communication: an error in one process becomes an error in every process."""
    if count() == 1:
        yield
        return
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    messages: list[Any] = [None] * count()
    _together(dist.all_gather_object, messages, None if error is None else (str(error), isinstance(error, NotFinite)))
    if error is not None:
        raise error
    for other, found in enumerate(messages):
        if found is not None:
            raise (NotFinite if found[1] else ValueError)(f"in process {other} of {len(messages)}: {found[0]}")


def owners(costs: Sequence[float]) -> list[int]:
    """Which process does which piece of work: the most expensive first, each to the process with the least to do."""
    loads = [0.0] * count()
    chosen = [0] * len(costs)
    for piece in sorted(range(len(costs)), key=lambda i: -costs[i]):
        chosen[piece] = loads.index(min(loads))
        loads[chosen[piece]] += costs[piece]
    return chosen


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel, whose hooks these passes do not need."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


@contextmanager
def joined() -> Iterator[None]:
    """Join the processes that torchrun started. All but the first are silent."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        yield
        return
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        if not first():
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        yield
    finally:
        dist.destroy_process_group()


def _together(work: Any, *arguments: Any) -> None:
    if count() == 1:
        return
    try:
        work(*arguments)
    except RuntimeError as error:
        raise Lost(
            f"another process of this run has ended, or cannot be reached ({str(error).splitlines()[0]}): see its own message above; "
            "a run with a checkpoint goes on by resume"
        ) from error
