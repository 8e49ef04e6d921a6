"""Several runs at a time, each in a process of its own."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

import torch


def at_a_time(call: Callable[..., None], todo: Sequence[tuple], jobs: int) -> None:
    """``call`` each of ``todo`` in one of ``jobs`` processes. The runs that fail are named at the end.

    The first of the arguments is a name. A process that is killed (out of memory, say) takes the others with it: what they left undone is
    begun once more, one after the other.
    """
    failed: list[str] = []
    undone = _together(call, todo, jobs, failed)
    for arguments in undone:
        failed += [unfinished[0] for unfinished in _together(call, [arguments], 1, failed)]
    if failed:
        raise ValueError(f"{len(failed)} of {len(todo)} runs failed: {', '.join(failed)}")


def _together(call: Callable[..., None], todo: Sequence[tuple], jobs: int, failed: list[str]) -> list[tuple]:
    """Run ``todo``. Adds the names of runs that fail to ``failed``; returns the runs that another one's death ended."""
    undone = []
    with workers(jobs, initializer=_share_cores, initargs=(jobs,)) as pool:
        running = {pool.submit(call, *arguments): arguments for arguments in todo}
        for future in as_completed(running):
            name, error = running[future][0], future.exception()
            if isinstance(error, BrokenProcessPool):
                undone.append(running[future])
            elif error:
                failed.append(name)
                print(f"{name} failed ({type(error).__name__}: {error})", file=sys.stderr, flush=True)
    return undone


@contextmanager
def workers(jobs: int, **options: Any) -> Iterator[ProcessPoolExecutor]:
    """A pool whose processes end when this one is interrupted. By itself a pool would first finish all that waits."""
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), **options)
    try:
        yield pool
    except BaseException:
        running = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for process in running:
            process.terminate()
        raise
    pool.shutdown()


def _share_cores(jobs: int) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // jobs))
