"""Kernel evidence: the Laplace evidence with the full Gauss-Newton matrix, computed in data space.

    log det (J^T Lambda J + P_0) - log det P_0 = log det (I + R^T K R),    K = sum_i J_i J_i^T / delta_i,  Lambda = R R^T

Each row of R^T J belongs to a sample and an output. With all rows this is exact (no blocks, no Kronecker factors), and the
matrix has samples times outputs rows. Dividing the rows into parts can only raise the sum of log-determinants (Fischer), so
parts give a lower bound on the evidence. A random part of the samples, or one random output of each, scaled up, gives a lower
bound in expectation. With one output the cost does not depend on the number of outputs.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from autosym.bayes import likelihoods
from autosym.bayes.likelihoods import Likelihood
from autosym.bayes.priors import Prior
from autosym.curvature.owners import sites
from autosym.curvature.passes import Pass
from autosym.curvature.verification import refuse_batch_dependence, verify
from autosym.evidence import possible
from autosym.evidence.laplace import closed_form_step, left_out
from autosym.evidence.record import Evidence
from autosym.evidence.rows import rows_of
from autosym.runtime import arithmetic, processes
from autosym.runtime.arithmetic import NotFinite
from autosym.runtime.batching import Data, check_seen, size_of

FULL = "the Laplace evidence with the full Gauss-Newton matrix"


@dataclass(frozen=True)
class Kernel:
    """Evidence as a differentiable function of the prior, at fixed weights and data."""

    names: tuple[str, ...]
    kernels: tuple[Tensor, ...]  # R^T J_i J_i^T R of each path and part: (parts, rows, rows), at unit scale of the likelihood
    weight: float  # factor of the log-determinants: all rows / rows taken
    square_norms: Tensor
    sizes: Tensor
    statistic: Tensor
    samples: int
    outputs: int
    likelihood: Likelihood
    bound_of: str | None
    fingerprint: Tensor | None = None  # of the data
    classes_seen: int = 0  # see ``Curvature``

    @property
    def nbytes(self) -> int:
        """What its kernels take."""
        return sum(kernel.nbytes for kernel in self.kernels)

    def __call__(self, prior: Prior) -> Evidence:
        log_det = self.weight * 2 * self._roots(prior).diagonal(dim1=1, dim2=2).log().sum()
        log_likelihood = self.likelihood.log_likelihood(self.statistic, self.samples * self.outputs)
        log_prior = prior.log_density(self.square_norms, self.sizes).sum()
        complexity = 0.5 * (log_det + (self.sizes * (prior.log_precision - math.log(2 * math.pi))).sum())
        most = possible.most(self.likelihood, self.outputs, self.classes_seen)
        return Evidence(log_likelihood, log_prior, complexity, self.samples, self.bound_of, most)

    def effective_parameters(self, prior: Prior) -> Tensor:
        """gamma_i = tr (I + K)^-1 K_i / delta_i."""
        roots, scale = self._roots(prior), self.likelihood.scale()
        shares = [torch.cholesky_solve(k, roots).diagonal(dim1=1, dim2=2).sum() for k in self.kernels]
        return self.weight * scale * torch.stack(shares) / prior.log_precision.exp()

    def mackay(self, prior: Prior, damping: float = 1.0, trust: float = math.inf) -> None:
        """The closed-form step for precisions and noise, in place (see ``Laplace.mackay``)."""
        closed_form_step(self, prior, self.statistic, damping, trust)

    def _roots(self, prior: Prior) -> Tensor:
        if prior.names != self.names:
            raise ValueError(f"this prior is over {prior.names}, the evidence over {self.names}: use Prior(evidence.names)")
        if math.isfinite(prior.nu):
            raise ValueError("kernel evidence is for Gaussian priors: pass nu=inf, or use the Laplace evidence")
        whole = sum(k / d for k, d in zip(self.kernels, prior.log_precision.exp(), strict=True))
        assert isinstance(whole, Tensor)
        return torch.linalg.cholesky(torch.eye(whole.shape[1], dtype=whole.dtype) + self.likelihood.scale() * whole)


def at(
    model: nn.Module,
    data: Data,
    likelihood: str | Likelihood = "categorical",
    *,
    samples: int | None = None,
    parts: int = 1,
    outputs: Literal["all", "one"] = "all",
    batch_size: int = 64,
    seed: int = 0,
    tf32: bool = False,
) -> Kernel:
    """The expensive pass: kernels of ``parts`` disjoint random parts of ``samples`` samples each (by default one part of all).

    ``outputs="one"`` takes one random output of each sample: one backward pass in total. The log-likelihood always covers all
    samples. With ``tf32`` arithmetic is as torch is set (see ``curvature.kfac``).
    """
    likelihood, model = likelihoods.of(likelihood), processes.unwrapped(model)
    refuse_batch_dependence(model)
    if outputs not in ("all", "one"):
        raise ValueError(f"outputs must be 'all' or 'one', got {outputs!r}")
    owned = {site.name: site.parameter.detach() for site in sites(model)}
    shown = Pass(model, data, likelihood, batch_size, partial(verify, model), memory=math.inf, alone=True)
    with arithmetic.true_float32(not tf32):
        x = _chosen(shown, samples, parts, seed)
        size, width, per_part = shown.samples, shown.outputs, len(x) // parts
        generator = torch.Generator().manual_seed(seed + 1)  # independent of the choice of samples
        rows = torch.randint(width, (len(x),), generator=generator) if outputs == "one" else None
        kernels: dict[str, list[Tensor]] = {name: [] for name in owned}
        for part in range(parts):
            inside = slice(part * per_part, (part + 1) * per_part)
            chosen = None if rows is None else rows[inside]
            for path in rows_of(model, x[inside], likelihood, chosen, batch_size):
                kernels[path.name].append(path.kernel())
    out = left_out(model, tuple(owned))
    counted = {name: float(name not in out) for name in owned}
    return Kernel(
        names=tuple(owned),  # in the order of the model, not of its forward pass, so that a fit's prior fits here too
        kernels=tuple(counted[name] * torch.stack(kernels[name]).cpu() for name in owned),
        weight=size / len(x) * (1 if rows is None else width),
        square_norms=torch.stack([counted[name] * owned[name].double().square().sum() for name in owned]).cpu(),
        sizes=torch.tensor([owned[name].numel() for name in owned], dtype=torch.float64),
        statistic=shown.statistic,
        samples=size,
        outputs=width,
        likelihood=likelihood,
        bound_of=_bound(size, len(x), parts, outputs),
        fingerprint=shown.fingerprint,
        classes_seen=shown.classes_seen,
    )


def _bound(size: int, taken: int, parts: int, outputs: str) -> str | None:
    if taken == size and outputs == "all":
        return None if parts == 1 else FULL
    what = f"{taken} of {size} samples" + (", one output of each" if outputs == "one" else "")
    return f"{FULL}, in expectation: an estimate from {what}"


def _chosen(shown: Pass, samples: int | None, parts: int, seed: int) -> Tensor:
    """The inputs of randomly chosen samples, in random order, from one pass over all samples."""
    size = size_of(shown.data)
    if size is None:
        raise ValueError("kernel evidence needs data whose length is known: pass tensors, a dataset, or a loader of one")
    check_seen(size, shown.data)
    per_part = size // max(parts, 1) if samples is None else samples
    if parts < 1 or per_part < 1 or per_part * parts > size:
        raise ValueError(f"{parts} parts of {per_part} samples cannot be taken from {size}: ask for fewer or smaller parts")
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))[: per_part * parts]
    place = torch.full((size,), -1)
    place[order] = torch.arange(len(order))
    found: dict[int, Tensor] = {}
    for x, y, _, numbers in shown:
        with torch.no_grad():
            shown.add(shown.model(x), y)
        found |= {int(place[n]): row for n, row in zip(numbers.tolist(), x, strict=True) if place[n] >= 0}
    shown.finish()
    if not torch.isfinite(shown.statistic):
        raise NotFinite("the log-likelihood is not finite (NaN or Inf): check the model's outputs on these data")
    return torch.stack([found[i] for i in range(len(order))])
