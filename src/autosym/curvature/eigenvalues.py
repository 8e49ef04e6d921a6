"""Eigenvalues of Kronecker factors, divided among threads and processes."""

import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import torch
import torch.nn.functional as F
from torch import Tensor

from autosym.curvature import many_eigenvalues
from autosym.runtime import processes


def _eigvalsh(factors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Eigenvalues (K, d) of positive semi-definite matrices (K, d, d), in float64.

    Processes share the work, and exchange eigenvalues only.
    """
    owners = processes.owners([len(f) * f.shape[-1] ** 3 for f in factors.values()])
    with processes.agreeing():
        own = _decomposed({name: factors[name] for name, o in zip(factors, owners, strict=True) if o == processes.rank()})
    found = {name: own.get(name, f.new_zeros(f.shape[:2], dtype=torch.float64)) for name, f in factors.items()}
    processes.add(*found.values())
    return found


LARGE = 2048  # a longer side is solved by all threads, and in its own precision: float64 would take twice the memory
WIDE = 512  # a longer side is solved on a GPU, if it is there
SHORT, MANY = 64, 8  # on a GPU matrices of a longer side are solved together, if there are so many of one size,
TOGETHER = 2**28  # and so many entries at a time
SOLVING = threading.Lock()  # the number of threads is a setting of the whole process


def _decomposed(factors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Eigenvalues (K, d) of positive semi-definite matrices (K, d, d), in float64.

    Matrices are first scaled to unit trace: in float32 solvers fail on nearly zero and on badly scaled matrices. All but the
    largest are solved in float64: in float32 zero eigenvalues are rounded to 1e-7, which counts against wide paths. On a GPU many
    of one size are solved together. Others that are small are solved on the CPU, one per thread, also if they are on a GPU: its
    solver is slower for small ones. The GPU solves the large ones meanwhile.
    """
    traces = {name: f.diagonal(dim1=-2, dim2=-1).double().sum(-1) for name, f in factors.items()}

    def scaled(name: str) -> Tensor:
        f = factors[name]
        t = f / traces[name].clamp_min(torch.finfo(torch.float64).tiny)[:, None, None]
        return t if f.shape[-1] <= LARGE else t.to(f.dtype)

    there = {name: f for name, f in factors.items() if f.is_cuda}
    many = {name for names in _together(there).values() for name in names}
    with SOLVING, _pool(threads := torch.get_num_threads()) as pool:
        torch.set_num_threads(1)

        def begun(names: Iterable[str]) -> dict[str, list[Future[Tensor]]]:
            parts = {n: t.split(-(-len(t) // threads)) for n, t in _on_cpu({n: scaled(n) for n in names}).items()}
            submit = pool.submit if threads > 1 or there else _at_once
            return {n: [submit(_solve, part) for part in parts[n]] for n in parts}

        try:
            small = {n: f.shape[-1] <= (WIDE if f.is_cuda else LARGE) for n, f in factors.items()}
            solving = begun(n for n in factors if small[n] and n not in many)  # meanwhile the GPU does the others
            values = _of_many(there, scaled)
            solving |= begun(n for n in factors if small[n] and n not in values and n not in solving)
            large = [n for n in factors if n not in values and n not in solving]
            values |= {n: _solve(scaled(n)) for n in large if factors[n].is_cuda}
            values |= {n: torch.cat([part.result() for part in found]) for n, found in solving.items()}
        finally:
            torch.set_num_threads(threads)
    values |= {n: _solve(scaled(n)) for n in large if n not in values}
    failed = [name for name, found in values.items() if not torch.isfinite(found).all()]
    if failed:
        raise ValueError(f"the eigenvalues of {', '.join(failed)} did not converge, even in float64")
    return {n: values[n].to(trace.device).clamp_min(0) * trace[:, None] for n, trace in traces.items()}


def _pool(threads: int) -> ThreadPoolExecutor:
    """Solvers of one thread each. A new thread would have OpenMP's default, all cores, whatever torch was told in another one."""
    return ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))


def _at_once(solve: Callable[[Tensor], Tensor], matrices: Tensor) -> Future[Tensor]:
    """The same in this thread: where there is one core, a second thread would only wait for it."""
    found: Future[Tensor] = Future()
    found.set_result(solve(matrices))
    return found


def _on_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the CPU; those of a GPU in one transfer, as each would wait for it."""
    there = {name: t for name, t in tensors.items() if t.is_cuda}
    if not there:
        return tensors
    flat = torch.cat([t.flatten() for t in there.values()]).cpu().split([t.numel() for t in there.values()])
    return tensors | {name: part.view(t.shape) for (name, t), part in zip(there.items(), flat, strict=True)}


def _together(factors: Mapping[str, Tensor]) -> dict[int, list[str]]:
    """The names of matrices by the side with which they are solved together, where there are many of one size.

    Large ones of a size that is not there as often are made as large as the next that is, by zeros: one more costs next to nothing.
    """
    sizes: dict[int, list[str]] = {}
    for name, f in factors.items():
        if SHORT < f.shape[-1] <= LARGE:
            sizes.setdefault(f.shape[-1], []).append(name)
    found = {size: names for size, names in sizes.items() if sum(len(factors[name]) for name in names) >= MANY}
    for size in sorted(sizes.keys() - found.keys()):
        larger = [other for other in found if other > size]
        if larger and size > WIDE:
            found[min(larger)] += sizes[size]
    return found


def _of_many(factors: Mapping[str, Tensor], scaled: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """Eigenvalues of those matrices on a GPU that are solved together; without the ones that could not be."""
    found: dict[str, Tensor] = {}
    for size, names in _together(factors).items():
        counts = {name: len(factors[name]) for name in names}
        for part in _portions(counts, TOGETHER // size**2):
            spare = {name: size - factors[name].shape[-1] for name in part}
            values = many_eigenvalues.eigenvalues(torch.cat([F.pad(scaled(n), (0, spare[n], 0, spare[n])) for n in part]))
            if values is not None:
                split = values.split([counts[name] for name in part])
                found |= {name: own[:, spare[name] :] for name, own in zip(part, split, strict=True)}  # without the zeros
    return found


def _portions(counts: Mapping[str, int], most: int) -> list[list[str]]:
    """The names in order, in groups whose counts add up to ``most`` at most; one that has more is alone."""
    groups: list[list[str]] = []
    room = 0
    for name, count in counts.items():
        if count > room:
            groups.append([])
            room = most
        groups[-1].append(name)
        room -= count
    return groups


def _solve(matrices: Tensor) -> Tensor:
    """Eigenvalues in float64. If the solver fails in the given precision it is run in float64; if that fails too, NaN."""
    for dtype in (matrices.dtype, torch.float64):
        with suppress(torch.linalg.LinAlgError):
            values = torch.linalg.eigvalsh(matrices.to(dtype)).double()
            if torch.isfinite(values).all():
                return values
    return matrices.new_full(matrices.shape[:-1], torch.nan, dtype=torch.float64)
