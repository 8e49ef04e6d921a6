"""Kronecker-factored generalised Gauss-Newton (KFAC) of a model, by the path law alone (Sec. 5).

For a path with columns a: (S, K, in) and cotangents g: (S, K, out) of every sample,

    A_k = 1/N sum_n sum_s a a^T        G_k = sum_n 1/S sum_s g Lambda g^T        GGN block k ~ kron(G_k, A_k)

for row-major weights (out, in). It is exact where S = 1 at one sample and for linear networks with squared loss; over shared
positions it is KFAC-expand. Exact curvature takes one backward pass per output, sampled curvature one in all; both
differentiate with respect to the outputs of paths only. Sums and counts are accumulated, so batch size and order do not matter.
"""

import math
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autosym import processes
from autosym.batching import Data, Numbered, check_loader, check_seen, size_of, to_model
from autosym.likelihoods import Likelihood
from autosym.paths import Path
from autosym.products import add_gram, gram, mirrored
from autosym.sites import Definition, Tape, refuse_batch_dependence, sites, verify


@dataclass(frozen=True)
class Factors:
    """sum A: (K, in, in), sum G: (K, out, out) of one path over the samples used."""

    A: Tensor
    G: Tensor


@dataclass(frozen=True)
class Curvature:
    """Factors of every path, the data's part of the log-likelihood, and the true counts of samples and outputs.

    ``fingerprint`` tells data apart, whatever their order and batches (see ``fingerprint``); None where it was not taken.
    """

    factors: dict[str, Factors]
    statistic: Tensor
    samples: int
    outputs: int
    fingerprint: Tensor | None = None

    def eigenvalues(self) -> dict[str, tuple[Tensor, Tensor]]:
        """lambda: (K, out) of G and mu: (K, in) of A for every path, in float64."""
        letters = {f"{letter} of {name}": getattr(f, letter) for name, f in self.factors.items() for letter in "GA"}
        values = _eigvalsh(letters)
        return {name: (values[f"G of {name}"], values[f"A of {name}"]) for name in self.factors}

    def eigenvectors(self, scales: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
        """lambda mu: (K, out, in) with eigenvectors U (K, out, out) of G and V (K, in, in) of A, in float64.

        With ``scales`` tau (K, out) of a path's prior they are those of tau^-1/2 G tau^-1/2, and U is tau^-1/2 times its vectors:
        the posterior covariance is (U x V) (lambda mu + delta)^-1 (U x V)^T either way.
        """
        return {name: (lam[:, :, None] * mu[:, None, :], U, V) for name, (lam, U, mu, V) in self.decompositions(scales).items()}

    def decompositions(self, scales: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor, Tensor, Tensor]]:
        """lambda and U of G, mu and V of A for every path, as in ``eigenvectors``."""
        decomposed = {}
        for name, f in self.factors.items():
            root = scales[name].rsqrt().double() if name in scales else torch.ones_like(f.G[:, :, 0], dtype=torch.float64)
            lam, U = torch.linalg.eigh(root[:, :, None] * f.G.double() * root[:, None, :])
            mu, V = torch.linalg.eigh(f.A.double())
            decomposed[name] = (lam.clamp_min(0), root[:, :, None] * U, mu.clamp_min(0), V)
        return decomposed


def kfac(
    model: nn.Module,
    data: Data,
    likelihood: Likelihood,
    *,
    sampled: bool = False,
    subset: int | None = None,
    share_blocks: bool = False,
    expand_bias: bool = False,
    dtype: torch.dtype | None = None,
    batch_size: int | None = None,
    memory: float | None = None,
    seed: int = 0,
    allow_partial: bool = False,
) -> Curvature:
    """The Kronecker factors of ``model`` on ``data``, at unit likelihood scale (see ``likelihoods``), in one pass.

    ``sampled`` replaces one backward per output by one in all, with noise drawn per sample from ``seed``: an unbiased G, whose
    log-determinant is therefore a little too small, and the evidence a little too large. ``subset`` takes
    the curvature from that many randomly chosen samples, scaled to all; the log-likelihood is always that of all.
    ``share_blocks`` replaces the G of every block by their mean, as the paper does. Factors are in ``dtype``, by default that
    of the model. The model's mode, gradients, buffers and hooks are left as they were.

    Samples are taken ``batch_size`` at a time (256, or 8192 on a GPU; a loader has its own batches), and fewer where that many would take
    more than ``memory`` GiB beside the factors (2, or on a GPU half of what is free, 16 at most: others may be using it): the result does
    not depend on it. Several processes (``torch.distributed``) take a part of the samples each, and all have the result.
    """
    model = processes.unwrapped(model)
    refuse_batch_dependence(model)
    check_loader(data, allow_partial)
    used = choose(subset, size_of(data), seed)
    signs = Signs(seed)
    sums = _Sums(dtype)
    tape = Tape(sites(model, expand_bias), sums.add_inputs)
    device = next(model.parameters()).device
    statistic = torch.zeros((), dtype=torch.float64, device=device)
    shown = torch.zeros(5, dtype=torch.float64, device=device)
    samples = outputs = limit = 0
    parts = shares(data)
    batch_size = (8192 if device.type == "cuda" else 256) if batch_size is None else batch_size
    stream = Numbered(data, batch_size, processes.rank() % parts, parts)
    with processes.agreeing(), tape, torch.enable_grad():
        for x, y, places in stream:
            x, y = to_model(x, y, model, f"samples {places[0]} to {places[-1]}")
            if not samples:
                limit = max(1, int(min(budget(memory, device) / verify(model, x[:2], expand_bias), 2**31)))
            mask = None if used is None else used[places % len(used)]
            samples += len(x)
            shown += fingerprint(x, y)
            for x_part, y_part, record, rows in split(x, y, mask, limit):
                f = tape.record(model, x_part) if record else tape.forward(model, x_part)
                likelihood.check(f.shape[1], y_part)
                if not outputs:
                    likelihood.check_outputs(f, model)
                statistic = statistic + likelihood.statistic(f.detach(), y_part).double()
                outputs = f.shape[1]
                if record:
                    roots = likelihood.root(f.detach())
                    if sampled:
                        roots = roots @ signs(places[rows], roots.shape[2]).to(roots)[:, :, None]
                    sums.used += len(f)
                    for column in roots.unbind(2):
                        for names, g in tape.backward(f, column):
                            sums.add_rows(names, g)
        if not samples and parts > 1:
            raise ValueError(f"no sample is left for process {processes.rank()} of {parts}: use fewer processes")
    if parts > 1:
        samples = sums.add_up(samples, stream.seen, statistic, shown)
    check_seen(samples, data, allow_partial)
    factors = sums.factors((site.name for site in tape.sites), samples, share_blocks)
    return Curvature(factors, statistic.cpu(), samples, outputs, shown.cpu())


def fingerprint(x: Tensor, y: Tensor) -> Tensor:
    """Sums over samples that tell data sets apart: of targets y and y^2, of inputs x and x^2, and of x y.

    x is a sample's mean, weighted by place: a flip of the image changes it too.
    """
    flat = x.detach().flatten(1)
    weights = (1 + torch.arange(flat.shape[1], dtype=torch.float64, device=x.device).cos()) / flat.shape[1]
    mean = torch.cat([part.double() @ weights for part in flat.split(max(1, 2**22 // flat.shape[1]))])
    target = y.detach().double().reshape(len(y), -1)
    parts = (target.sum(), target.square().sum(), mean.sum(), mean.square().sum(), (mean * target.sum(1)).sum())
    return torch.stack(parts)


class _Sums:
    """sum A and sum G of every path, and the number of samples they were taken from."""

    def __init__(self, dtype: torch.dtype | None):
        self.dtype = dtype
        self.A: dict[str, Tensor] = {}
        self.G: dict[tuple[str, ...], Tensor] = {}  # of paths that share their rows, once
        self.used = 0

    def add_inputs(self, name: str, path: Definition, x: Tensor) -> None:
        x = x.to(self.dtype or x.dtype)
        if type(path).gram is Path.gram:  # no faster form than from columns
            _add(self.A, name, path.columns(x))
        else:
            term = path.gram(x)
            self.A[name] = self.A[name].add_(term) if name in self.A else term.clone()

    def add_rows(self, names: tuple[str, ...], rows: Tensor) -> None:
        _add(self.G, names, rows.to(self.dtype or rows.dtype), 1 / rows.shape[1])

    def add_up(self, samples: int, seen: int, *others: Tensor) -> int:
        """Sums and counts of all processes, which have ``seen`` the same samples, in place; returns the number of samples."""
        counts = torch.tensor([samples, self.used, seen], dtype=torch.float64, device=others[0].device)
        processes.add(counts, *others, *self.A.values(), *self.G.values())
        samples, self.used, total = (int(n) for n in counts)
        if total != processes.count() * seen:
            raise ValueError(
                f"process {processes.rank()} was shown {seen} samples, all {processes.count()} together {total}: not as many in each (an "
                "extra batch in one?); give all processes the same data, of which each takes its part"
            )
        return samples

    def factors(self, names: Iterable[str], samples: int, share_blocks: bool) -> dict[str, Factors]:
        """Means of A and sums of G, the latter scaled from the samples used to all."""
        if not self.used:
            raise ValueError("none of the samples chosen by subset was shown: take a larger subset, or a loader that shows all")
        whole: dict[str, Tensor] = {}
        for factor in (*self.A.values(), *self.G.values()):
            mirrored(factor)
        for together, G in self.G.items():
            whole |= {name: G if name not in whole else whole[name] + G for name in together}
        factors = {}
        for name in names:
            A = self.A[name] / self.used
            G = whole[name] * (samples / self.used)
            if share_blocks:
                G = G.mean(0, keepdim=True).expand_as(G)
            for letter, factor in (("A", A), ("G", G)):
                if not torch.isfinite(factor).all():
                    raise ValueError(
                        f"the factor {letter} of {name} overflowed {factor.dtype}: rescale the inputs or the targets, use model.double(), "
                        "or pass dtype=torch.float64 to log_evidence"
                    )
            factors[name] = Factors(A, G)
        return factors


def _add(sums: dict, key: str | tuple[str, ...], t: Tensor, weight: float = 1.0) -> None:
    """sums[key] += weight sum over samples and positions of outer products of t: (B, S, K, d); whole once ``mirrored``."""
    positions, blocks, width = t.shape[1:]
    if key not in sums:
        sums[key] = t.new_zeros(blocks, width, width)
    if positions > 1:
        sums[key].add_(gram(t), alpha=weight)
    else:  # in place: without a product as large as the factor
        add_gram(sums[key], t[:, 0].transpose(0, 1))


def _eigvalsh(factors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Eigenvalues (K, d) of positive semi-definite matrices (K, d, d), in float64; processes share the work, and send eigenvalues only."""
    owners = processes.owners([len(f) * f.shape[-1] ** 3 for f in factors.values()])
    with processes.agreeing():
        own = _decomposed({name: factors[name] for name, o in zip(factors, owners, strict=True) if o == processes.rank()})
    found = {name: own.get(name, f.new_zeros(f.shape[:2], dtype=torch.float64)) for name, f in factors.items()}
    processes.add(*found.values())
    return found


LARGE = (
    2048  # sides of matrices that are solved by all threads, and in their own precision: float64 would take twice the memory
)
SOLVING = threading.Lock()  # the number of threads is one for the whole process


def _decomposed(factors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Eigenvalues (K, d) of positive semi-definite matrices (K, d, d), in float64.

    Matrices are scaled to unit trace first: solvers fail on nearly zero and on badly scaled ones in float32. All but the largest are solved
    in float64: null eigenvalues that are rounded to 1e-7 instead weigh against wide paths. Small ones are solved on the CPU, one a thread,
    also those of a GPU, which solves the large ones meanwhile: it has no solver for many small ones that is as fast.
    """
    traces = {name: f.diagonal(dim1=-2, dim2=-1).double().sum(-1) for name, f in factors.items()}

    def scaled(name: str) -> Tensor:
        f = factors[name]
        t = f / traces[name].clamp_min(torch.finfo(torch.float64).tiny)[:, None, None]
        return t if f.shape[-1] <= LARGE else t.to(f.dtype)

    small = [name for name, f in factors.items() if f.shape[-1] <= (512 if f.is_cuda else LARGE)]
    large = [name for name in factors if name not in small]
    with SOLVING, ThreadPoolExecutor(threads := torch.get_num_threads()) as pool:
        torch.set_num_threads(1)  # for each of those that follow
        try:
            parts = {n: scaled(n).cpu().split(-(-len(factors[n]) // threads)) for n in small}
            solving = {n: [pool.submit(_solve, part) for part in parts[n]] for n in small}
            values = {n: _solve(scaled(n)) for n in large if factors[n].is_cuda}
            values |= {n: torch.cat([part.result() for part in solving[n]]) for n in small}
        finally:
            torch.set_num_threads(threads)
    values |= {n: _solve(scaled(n)) for n in large if n not in values}
    failed = [name for name, found in values.items() if not torch.isfinite(found).all()]
    if failed:
        raise ValueError(f"the eigenvalues of {', '.join(failed)} did not converge, even in float64")
    return {n: values[n].to(trace.device).clamp_min(0) * trace[:, None] for n, trace in traces.items()}


def _solve(matrices: Tensor) -> Tensor:
    """Eigenvalues in float64; where the solver fails in the given precision, by that in float64, and NaN where it fails too."""
    for dtype in (matrices.dtype, torch.float64):
        with suppress(torch.linalg.LinAlgError):
            values = torch.linalg.eigvalsh(matrices.to(dtype)).double()
            if torch.isfinite(values).all():
                return values
    return matrices.new_full(matrices.shape[:-1], torch.nan, dtype=torch.float64)


def shares(data: Data) -> int:
    """Among how many processes the samples are shared out: all, or, if there are fewer samples, none (each takes all)."""
    return processes.count() if (size_of(data) or math.inf) >= processes.count() else 1


def split(x: Tensor, y: Tensor, mask: Tensor | None, limit: int) -> Iterator[tuple[Tensor, Tensor, bool, Tensor]]:
    """The samples of a batch to take curvature from (True), then the rest (False), at most ``limit`` at a time, and their rows."""
    chosen = mask if mask is not None else torch.ones(len(x), dtype=torch.bool)
    for part, record in ((chosen, True), (~chosen, False)):
        for rows in part.nonzero().flatten().split(limit) if part.any() else ():
            whole = len(rows) == len(x)
            yield (x, y, record, rows) if whole else (x[rows.to(x.device)], y[rows.to(y.device)], record, rows)


def budget(memory: float | None, device: torch.device) -> float:
    """Bytes for the activations of one batch."""
    if memory is not None:
        if not memory > 0:
            raise ValueError(f"memory is in GiB and must be positive, got {memory}")
        return memory * 2**30
    return min(torch.cuda.mem_get_info(device)[0] / 2, 16 * 2**30) if device.type == "cuda" else 2 * 2**30


def choose(subset: int | None, size: int | None, seed: int) -> Tensor | None:
    """Which samples of the stream to use: None for all, else a mask of ``subset`` of ``size``."""
    if subset is None:
        return None
    if size is None:
        raise ValueError("subset needs data whose length is known: pass tensors, a dataset, or a loader of one")
    if not 0 < subset <= size:
        raise ValueError(f"subset must be between 1 and the {size} samples of the data, got {subset}")
    mask = torch.zeros(size, dtype=torch.bool)
    mask[torch.randperm(size, generator=torch.Generator().manual_seed(seed))[:subset]] = True
    return mask


class Signs:
    """Independent signs, one row for each place in the stream, whatever the batches and processes; asked for in ascending order."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)
        self.block, self.end = torch.empty(0), 0  # the last rows drawn, and the place after them

    def __call__(self, places: Tensor, width: int) -> Tensor:
        kept = []
        while len(places):
            here = int((places < self.end).sum())
            if here:
                kept.append(self.block[places[:here] - self.end])
            places = places[here:]
            if len(places):
                self.block, self.end = 2 * torch.randint(2, (1024, width), generator=self.generator) - 1, self.end + 1024
        return torch.cat(kept)
