"""Kronecker-factored generalised Gauss-Newton (KFAC) of a model, by the path law alone (Sec. 5).

For a path with columns a: (S, K, in) and cotangents g: (S, K, out) of every sample,

    A_k = 1/N sum_n sum_s a a^T        G_k = sum_n 1/S sum_s g Lambda g^T        GGN block k ~ kron(G_k, A_k)

for row-major weights (out, in). It is exact where S = 1 at one sample and for linear networks with squared loss; over shared
positions it is KFAC-expand. Exact curvature takes one backward pass per output, sampled curvature one in all; both
differentiate with respect to the outputs of paths only. Sums and counts are accumulated, so batch size and order do not matter.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autosym.bayes.likelihoods import Likelihood
from autosym.curvature.eigenvalues import _eigvalsh
from autosym.curvature.owners import sites
from autosym.curvature.passes import Signs, budget, choose, fingerprint, shares, split
from autosym.curvature.tape import Tape
from autosym.curvature.verification import refuse_batch_dependence, verify
from autosym.linear.path import Definition, Path
from autosym.linear.products import add_gram, gram, mirrored
from autosym.runtime import processes
from autosym.runtime.batching import Data, Numbered, check_loader, check_seen, size_of, to_model


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
