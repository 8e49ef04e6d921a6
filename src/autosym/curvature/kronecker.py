"""Kronecker-factored generalised Gauss-Newton (KFAC) of a model, by the path law alone (Sec. 5).

For a path with columns a: (S, K, in) and cotangents g: (S, K, out) of every sample,

    A_k = 1/N sum_n sum_s a a^T        G_k = sum_n 1/S sum_s g Lambda g^T        GGN block k ~ kron(G_k, A_k)

for row-major weights (out, in). It is exact for S = 1 and a single sample, and for linear networks with squared loss. Over
shared positions it is KFAC-expand. Exact curvature takes one backward pass per output, sampled curvature one in total. Both
differentiate with respect to the outputs of paths only. Sums and counts are accumulated, so batch size and order do not matter.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autosym.bayes.likelihoods import Likelihood
from autosym.curvature.eigenvalues import LARGE, _eigvalsh
from autosym.curvature.owners import sites
from autosym.curvature.passes import Pass, columns_within
from autosym.curvature.tape import Tape
from autosym.curvature.verification import Verified, check_factors, refuse_batch_dependence, verify
from autosym.linear.path import Definition, Path
from autosym.linear.products import add_gram, gram, mirrored
from autosym.runtime import arithmetic, processes, room
from autosym.runtime.batching import Data


@dataclass(frozen=True)
class Factors:
    """A: (K, in, in), a mean over samples, and G: (K, out, out), a sum over all samples, of one path."""

    A: Tensor
    G: Tensor

    @property
    def nbytes(self) -> int:
        return self.A.nbytes + self.G.nbytes


@dataclass(frozen=True)
class FewColumns:
    """Factors of a path that was shown fewer columns than its A has rows: A = columns^T columns, and only formed if asked for.

    ``columns`` (K, n, in) take less memory than A, and their small Gram matrix has all its eigenvalues but zeros.
    """

    columns: Tensor
    G: Tensor

    @property
    def nbytes(self) -> int:
        return self.columns.nbytes + self.G.nbytes

    @property
    @arithmetic.true_float32()
    def A(self) -> Tensor:
        return mirrored(add_gram(self.columns.new_zeros(len(self.columns), *[self.columns.shape[2]] * 2), self.columns))

    @arithmetic.true_float32()
    def small(self) -> Tensor:
        """columns columns^T (K, n, n), in float64 unless that is large."""
        t = self.columns if self.columns.shape[1] > LARGE else self.columns.double()
        return t @ t.mT


@dataclass(frozen=True)
class Curvature:
    """Factors of every path, the statistic of the log-likelihood, and the true counts of samples and outputs.

    ``fingerprint`` tells data sets apart, regardless of order and batches (see ``fingerprint``); None if it was not taken.
    ``classes_seen`` counts the classes that occur, if the prior does not know which is which (see ``evidence.possible``); else 0.
    """

    factors: dict[str, Factors | FewColumns]
    statistic: Tensor
    samples: int
    outputs: int
    fingerprint: Tensor | None = None
    classes_seen: int = 0

    def eigenvalues(self) -> dict[str, tuple[Tensor, Tensor]]:
        """lambda: (K, out) of G and mu: (K, in) of A for every path, in float64."""
        letters = {f"G of {name}": f.G for name, f in self.factors.items()}
        letters |= {f"A of {name}": f.small() if isinstance(f, FewColumns) else f.A for name, f in self.factors.items()}
        values = _eigvalsh(letters)
        found = {}
        for name, f in self.factors.items():
            inside = (f.columns if isinstance(f, FewColumns) else f.A).shape[-1]
            found[name] = values[f"G of {name}"], _padded(values[f"A of {name}"], inside)
        return found

    def eigenvectors(self, scales: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
        """lambda mu: (K, out, in) with eigenvectors U (K, out, out) of G and V (K, in, in) of A, in float64.

        If the prior of a path has ``scales`` tau (K, out), tau^-1/2 G tau^-1/2 replaces G, and U is tau^-1/2 times its
        eigenvectors. The posterior covariance is (U x V) (lambda mu + delta)^-1 (U x V)^T in both cases.
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
    rest: float = 0.0,
    subset: int | None = None,
    share_blocks: bool = False,
    expand_bias: bool = False,
    dtype: torch.dtype | None = None,
    batch_size: int | None = None,
    memory: float | None = None,
    seed: int = 0,
    allow_partial: bool = False,
    verified: Verified | None = None,
    without: Collection[str] = (),
    tf32: bool = False,
) -> Curvature:
    """The Kronecker factors of ``model`` on ``data``, at unit likelihood scale (see ``likelihoods``), in one pass.

    ``sampled`` makes one backward pass in total, not one per output, with noise drawn per sample from ``seed``. G is unbiased,
    but its log-determinant is a little too small, and the evidence a little too large. With ``rest`` only as many of a sample's
    smallest columns of the output Hessian's root are sampled as have that part of its trace, over all data: with many classes
    most are next to nothing, and ``rest=0.02`` takes a few backward passes in place of one per output. (If it would not save half of
    them, all are taken.) ``subset`` takes the curvature from
    that many randomly chosen samples, scaled to all; the log-likelihood always covers all samples. ``share_blocks`` replaces
    the G of every block by the mean over blocks, as the paper does. Factors are in ``dtype``, by default the model's. The
    model's mode, gradients, buffers and hooks are left as they were.

    ``batch_size`` samples are taken at a time: by default 256, or 8192 on a GPU; a loader has its own batches. Fewer are taken
    if they would need more than ``memory`` GiB beside the factors: by default 2, or on a GPU half of the free memory, at most
    16. The result does not depend on either. ``verified`` is what an earlier pass found out about the model. Paths that ``without``
    names get no factors, and take neither time nor memory for them. Each of several
    processes (``torch.distributed``) takes its part of the samples, and all get the same result. Arithmetic has the full
    precision of float32, on a GPU too; with ``tf32`` it is as torch is set, which by default means TF32 for convolutions.
    """
    model = processes.unwrapped(model)
    refuse_batch_dependence(model)
    sums = _Sums(dtype, without)
    owned = sites(model, expand_bias) if verified is None else verified.sites
    tape = Tape(owned, sums.add_inputs, few=True)

    def check(x: Tensor) -> Verified:
        return verify(model, x, expand_bias, owned) if verified is None else verified

    options: dict[str, Any] = {"subset": subset, "sampled": sampled, "seed": seed, "allow_partial": allow_partial}
    options |= {"batch_size": batch_size, "verify": check, "memory": memory}
    if rest and not sampled:
        with arithmetic.true_float32(not tf32):
            largest = columns_within(model, data, likelihood, rest, **options)
        options |= {} if largest is None else {"sampled": True, "largest": largest}
    shown = Pass(model, data, likelihood, **options)
    with processes.agreeing(), room.kept(), arithmetic.true_float32(not tf32), tape, torch.enable_grad():
        for x, y, record, places in shown:
            f = tape.record(model, x) if record else tape.forward(model, x)
            shown.add(f.detach(), y)
            for column in shown.columns(f.detach(), places) if record else ():
                for names, g in tape.backward(f, column):
                    sums.add_rows(names, g)
    shown.finish(*sums.A.values(), *sums.G.values())
    factors = sums.factors(
        [site.name for site in tape.sites if site.name not in without], shown.samples, shown.used, share_blocks
    )
    return Curvature(factors, shown.statistic, shown.samples, shown.outputs, shown.fingerprint, shown.classes_seen)


def _padded(values: Tensor, size: int) -> Tensor:
    """Eigenvalues (K, size), ascending, of which the given ones are all but zeros."""
    return F.pad(values, (size - values.shape[1], 0))


LONG = 128  # sides of A that are shorter take no time: their columns are never kept


def few_columns(inside: int, positions: int, samples: int) -> int:
    """How many rows are kept of a path's A: all its columns while they are few, else as many as it has.

    Processes add up A, so each has to form it.
    """
    few = inside >= LONG and samples * positions < inside and processes.count() == 1
    return samples * positions if few else inside


class _Sums:
    """sum A and sum G of every path but those ``without``.

    While a path has shown fewer columns than its A has rows, they are kept instead of A.
    """

    def __init__(self, dtype: torch.dtype | None, without: Collection[str] = ()):
        self.dtype, self.without = dtype, without
        self.positions: dict[str, int] = {}
        self.A: dict[str, Tensor] = {}
        self.columns: dict[str, list[Tensor]] = {}
        self.G: dict[tuple[str, ...], Tensor] = {}  # one sum for all paths that share their rows

    def add_inputs(self, name: str, path: Definition, x: Tensor) -> None:
        if name in self.without:
            return
        x, faster = x.to(self.dtype or x.dtype), type(path).gram is not Path.gram  # than the product of all columns
        columns = path.columns(x[:1] if faster else x)
        self.positions[name] = columns.shape[1]
        if self._are_few(name, len(x), columns):
            kept = (
                path.columns(x) if faster else columns
            )  # a view of the input, often, which the model or a loader may overwrite
            self.columns.setdefault(name, []).append(kept.clone())
            return
        for kept in self.columns.pop(name, ()):
            _add(self.A, name, kept)
        if faster:
            term = path.gram(x)
            self.A[name] = self.A[name].add_(term) if name in self.A else term.clone()
        else:
            _add(self.A, name, columns)

    def _are_few(self, name: str, samples: int, columns: Tensor) -> bool:
        """Whether the columns of so many samples, with those before, are fewer than the rows of A."""
        positions, _, inside = columns.shape[1:]
        before = sum(t.shape[0] * t.shape[1] for t in self.columns.get(name, ()))
        return name not in self.A and few_columns(inside, 1, before + samples * positions) < inside

    def add_rows(self, names: tuple[str, ...], rows: Tensor) -> None:
        names = tuple(name for name in names if name not in self.without)
        if not names:
            return
        _add(self.G, names, rows.to(self.dtype or rows.dtype), 1 / self.positions[names[0]])

    def factors(self, names: Sequence[str], samples: int, used: int, share_blocks: bool) -> dict[str, Factors | FewColumns]:
        """Means of A and sums of G. The sums are scaled from the samples used to all samples, in place."""
        if not used:
            raise ValueError("none of the samples chosen by subset was shown: use a larger subset, or a loader that shows all")
        whole: dict[str, Tensor] = {}
        for factor in (*self.A.values(), *self.G.values()):
            mirrored(factor)
        for G in self.G.values():
            G.mul_(samples / used)
        for together, G in self.G.items():
            whole |= {name: G if name not in whole else whole[name] + G for name in together}
        factors: dict[str, Factors | FewColumns] = {}
        seen: dict[tuple[str, str], Tensor] = {}
        for name in names:
            G = whole[name]
            if share_blocks:
                G = G.mean(0, keepdim=True).expand_as(G)
            seen[name, "G"] = G
            if name in self.columns:
                columns = torch.cat([t.flatten(0, 1) for t in self.columns.pop(name)]).transpose(0, 1).contiguous()
                columns /= used**0.5
                seen[name, "A"] = columns.square().sum(1)  # its diagonal: no entry is larger
                factors[name] = FewColumns(columns, G)
            else:
                A = self.A[name].div_(used)
                seen[name, "A"] = A
                factors[name] = Factors(A, G)
        check_factors(seen)
        return factors


def _add(sums: dict, key: str | tuple[str, ...], t: Tensor, weight: float = 1.0) -> None:
    """sums[key] += weight * (sum over samples and positions of t t^T), for t: (B, S, K, d). Call ``mirrored`` at the end."""
    positions, blocks, width = t.shape[1:]
    if key not in sums:
        sums[key] = t.new_zeros(blocks, width, width)
    if positions > 1 or weight != 1:
        sums[key].add_(gram(t), alpha=weight)
    else:  # in place: no temporary as large as the factor
        add_gram(sums[key], t[:, 0].transpose(0, 1))
