"""The posterior of the linearised network, with the Gauss-Newton matrix of the whole network: a mean, and draws around it.

    q(w) = N(m, (D + sum_n J_n^T E[Lambda_n] J_n)^-1),     D m + sum_n J_n^T E[dloss_n / df] = 0,     E over f_n under q

A Laplace approximation takes Lambda at the outputs of the fit. Where a network is sure of its training data Lambda is almost zero, so
it believes that these data say nothing, and its predictions are far too timid. The Gaussian nearest to the posterior (in the sense of
variational inference) has the means of Lambda and of the slope under q in their place. It is found in rounds, from Laplace.

A draw is (H + D)^-1 (D^1/2 e + sum_n J_n^T R_n e_n) with standard normal noise, by conjugate gradients, preconditioned by the Kronecker
factors. All draws and the Newton step of the mean share a round's products.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from autosym.bayes.likelihoods import Gaussian, Likelihood
from autosym.bayes.priors import Prior
from autosym.curvature.gauss_newton import GaussNewton, flat, linear, parts_of
from autosym.curvature.krylov import Solution, solve
from autosym.curvature.owners import sites
from autosym.curvature.passes import Pass
from autosym.evidence.kernel import rows_of
from autosym.evidence.laplace import Laplace
from autosym.evidence.predictive import Link, Predictive, check_link, checked_inputs
from autosym.evidence.probes import Whitened
from autosym.evidence.whole import refuse_other
from autosym.runtime import arithmetic, processes
from autosym.runtime.batching import Data

RESIDUAL, MOST_STEPS = 1e-2, 200  # of conjugate gradients: enough for draws, whose own noise is larger
ROUNDS, DRAWS = 1, 32
FEW, BATCH = 8_000, 64  # rows (samples times outputs) whose matrix is factorised; samples whose Jacobian is formed at once

How = Literal["rows", "steps"]


@dataclass(frozen=True)
class Posterior:
    """A Gaussian over the weights: its mean is ``offset`` (weights,) from those of the model, and ``draws`` (k, weights) are about it.

    The weights of all paths are in a row, as in ``curvature.gauss_newton``.
    """

    model: nn.Module
    likelihood: Likelihood
    offset: Tensor
    draws: Tensor

    def predictive(self, x: Tensor, link: Link = "probit") -> Predictive:
        """The predictive at ``x`` (B, ...), in closed form, or by "monte-carlo" over the draws and their mirror images about the mean."""
        check_link(link)
        x = checked_inputs(self.model, x)
        parameters = [site.parameter for site in sites(self.model)]
        vectors = parts_of(torch.cat([self.offset[None], self.draws]).to(x.device), parameters)
        parts = []
        for part in x.split(256):
            f, along, _ = linear(self.model, parameters, part)
            parts.append(torch.cat([f[None], along(vectors)]).double())
        outputs = torch.cat(parts, 1)
        mean, deviations = outputs[0] + outputs[1], outputs[2:]
        covariance = torch.einsum("kbi,kbj->bij", deviations, deviations) / len(deviations)
        found = self.likelihood.predict(mean, covariance, None) if link == "probit" else None
        found = self.likelihood.predict(mean, covariance, mirrored(mean, deviations)) if found is None else found
        return Predictive(mean, covariance, **(found or {}))


@arithmetic.true_float32()
def at(
    model: nn.Module,
    data: Data,
    laplace: Laplace,
    prior: Prior,
    *,
    draws: int = DRAWS,
    rounds: int = ROUNDS,
    seed: int = 0,
    how: How | None = None,
    batch_size: int | None = None,
    memory: float | None = None,
) -> Posterior:
    """The posterior at ``prior``, of the weights and data that ``laplace`` was taken at, by ``draws`` draws.

    No ``rounds`` give the Laplace approximation. The data are held in memory, and E[Lambda] (samples, outputs, outputs) too.
    """
    if draws < 2 or rounds < 0:
        raise ValueError(f"draws must be at least 2 and rounds not negative, got {draws} and {rounds}")
    model, likelihood = processes.unwrapped(model), laplace.likelihood
    refuse_other(model, data, laplace, prior)
    shown = [(x, y) for x, y, _, _ in Pass(model, data, likelihood, alone=True)]
    x, y = (torch.cat(part) for part in zip(*shown, strict=True))
    H = GaussNewton(model, (x, y), likelihood, batch_size=batch_size, memory=memory)
    how = ("rows" if laplace.samples * laplace.outputs <= FEW else "steps") if how is None else how
    if how not in ("rows", "steps"):
        raise ValueError(f"how must be 'rows', 'steps' or None, got {how!r}")
    system = (_Rows if how == "rows" else _Steps)(H, laplace, prior.precision(), x)
    weights, D, scale = flat(H.parameters), system.precisions, float(likelihood.scale().detach())
    f, _ = H.along()
    generator = torch.Generator().manual_seed(seed)  # one noise for every sample, however they are divided among batches
    own = torch.randn(draws, len(weights), dtype=torch.float64, generator=generator).to(H.device)
    noise = torch.randn(draws, *f.shape, dtype=torch.float64, generator=generator).to(H.device)
    offset, slope, hessian = torch.zeros_like(weights), torch.zeros_like(f), averages(likelihood, f[None], y)[1]
    for number in range(rounds + 1):
        H.roots = root(hessian)
        random = scale**0.5 * H.back(torch.einsum("nij,knj->kni", H.roots, noise)) + D.sqrt() * own
        step = D * (weights + offset) + scale * H.back(slope[None])[0] if number else torch.zeros_like(D)
        solved = system.solve(torch.cat([-step[None], random]))
        offset, deviations = offset + solved[0], solved[1:]
        if number < rounds:
            _, moved = H.along(torch.cat([offset[None], deviations]))
            slope, hessian = averages(likelihood, mirrored(f + moved[0], moved[1:]), y)
    return Posterior(model, likelihood, offset, deviations)


class _Steps:
    """(H + D)^-1 z by conjugate gradients."""

    def __init__(self, H: GaussNewton, laplace: Laplace, precision: Mapping[str, float], x: Tensor):
        self.precisions = _precisions(H, laplace, precision)
        self.whitened = Whitened(H, laplace, precision)

    def solve(self, right: Tensor) -> Tensor:
        def enough(found: Solution) -> bool:
            return bool((found.residuals < RESIDUAL).all())

        B = self.whitened.turned
        return B(solve(self.whitened, B(right, True), enough, MOST_STEPS).x, False)


class _Rows:
    """(H + D)^-1 z = D^-1 z - D^-1 J^T R (1 / scale + R^T K R)^-1 R^T J D^-1 z, with K = J D^-1 J^T of all samples and outputs."""

    def __init__(self, H: GaussNewton, laplace: Laplace, precision: Mapping[str, float], x: Tensor):
        self.H, self.scale = H, float(laplace.likelihood.scale().detach())
        self.precisions = _precisions(H, laplace, precision)
        paths = [path for path in rows_of(H.model, x, Gaussian(), None, BATCH) if path.name not in laplace.left_out]
        self.kernel = sum(
            (path.double().kernel().div_(precision[path.name]) for path in paths), torch.zeros((), dtype=torch.float64)
        )

    def solve(self, right: Tensor) -> Tensor:
        R, K = self.H.roots, self.kernel
        assert R is not None
        samples, outputs = R.shape[:2]
        inside = (R.mT @ K.view(samples, outputs, -1)).view(K.shape)  # R^T K
        inside = (R.mT @ inside.mT.reshape(samples, outputs, -1)).view(K.shape)
        inside.diagonal().add_(1 / self.scale)
        kept = right * torch.where(self.precisions > 0, 1 / self.precisions, 0.0)
        _, along = self.H.along(kept)
        rows = torch.cholesky_solve((along[:, :, None] @ R).flatten(1).mT, torch.linalg.cholesky(inside)).mT
        back = self.H.back((R @ rows.view(-1, samples, outputs, 1))[..., 0])
        return kept - back * torch.where(self.precisions > 0, 1 / self.precisions, 0.0)


def _precisions(H: GaussNewton, laplace: Laplace, precision: Mapping[str, float]) -> Tensor:
    """The diagonal of D, and 0 for weights that the evidence leaves out."""
    kept = [precision[site.name] * (site.name not in laplace.left_out) for site in H.sites]
    sizes = torch.tensor(H.sizes, device=H.device)
    return torch.tensor(kept, dtype=torch.float64, device=H.device).repeat_interleave(sizes)


def mirrored(mean: Tensor, deviations: Tensor) -> Tensor:
    """``mean`` + and - ``deviations`` (k, ...)."""
    return torch.cat([mean + deviations, mean - deviations])


def averages(likelihood: Likelihood, draws: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The means over ``draws`` (k, N, D) of the slope of the loss (N, D) and of Lambda (N, D, D), at unit scale."""
    slope, hessian = (
        torch.zeros_like(draws[0]),
        torch.zeros(*draws.shape[1:], draws.shape[2], dtype=draws.dtype, device=draws.device),
    )
    for f in draws:
        with torch.enable_grad():
            f = f.clone().requires_grad_()
            slope += torch.autograd.grad(likelihood.loss(f, y), f)[0] / len(draws)
        columns = likelihood.root(f.detach())
        hessian += columns @ columns.mT / len(draws)
    return slope, hessian


def root(matrices: Tensor) -> Tensor:
    """R (N, D, D) with R R^T = each of the matrices."""
    values, vectors = torch.linalg.eigh(matrices)
    return vectors * values.clamp_min(0).sqrt()[:, None]
