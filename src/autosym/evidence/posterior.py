"""The posterior of the linearised network, with the Gauss-Newton matrix of the whole network: a mean, and draws around it.

    q(w) = N(m, (D + sum_n J_n^T E[Lambda_n] J_n)^-1),     D m + sum_n J_n^T E[dloss_n / df] = 0,     E over f_n under q

A Laplace approximation takes Lambda at the outputs of the fit. Where a network is sure of its training data Lambda is almost zero, so
it believes that these data say nothing, and its predictions are far too timid. The Gaussian nearest to the posterior (in the sense of
variational inference) has the means of Lambda and of the slope under q in their place. It is found in rounds, from Laplace.

A draw is (H + D)^-1 (D^1/2 e + sum_n J_n^T R_n e_n) with standard normal noise, by conjugate gradients, preconditioned by the Kronecker
factors. All draws and the Newton step of the mean share a round's products.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from autosym.bayes import likelihoods
from autosym.bayes.likelihoods import Gaussian, Likelihood
from autosym.bayes.priors import Prior
from autosym.curvature.gauss_newton import GaussNewton, flat, linear, parts_of
from autosym.curvature.krylov import Solution, solve
from autosym.curvature.owners import sites
from autosym.curvature.passes import Pass
from autosym.evidence.kernel import rows_of
from autosym.evidence.laplace import Laplace
from autosym.evidence.leave_one_out import AS_IT_IS, Tuning, cavity, predicted_at, tune
from autosym.evidence.predictive import Link, Predictive, check_link, checked_inputs
from autosym.evidence.probes import Whitened
from autosym.evidence.whole import refuse_other
from autosym.runtime import arithmetic, processes
from autosym.runtime.batching import Data

RESIDUAL, MOST_STEPS = 1e-2, 200  # of conjugate gradients: enough for draws, whose own noise is larger
ROUNDS, DRAWS = 1, 32
MORE = 128  # draws of a tuned posterior by rows: 32 make covariances of ten classes so noisy that a quarter of the gain is lost
FEW, BATCH = 8_000, 64  # rows (samples times outputs) whose matrix is factorised; samples whose Jacobian is formed at once

How = Literal["rows", "steps"]


@dataclass(frozen=True)
class Posterior:
    """A Gaussian over the weights: its mean is ``offset`` (weights,) from those of the model, and ``draws`` (k, weights) are about it.

    The weights of all paths are in a row, as in ``curvature.gauss_newton``. What is said of y goes by ``tuning``.
    """

    model: nn.Module
    likelihood: Likelihood
    offset: Tensor
    draws: Tensor
    tuning: Tuning = AS_IT_IS

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
        covariance = spread(deviations)
        both = mirrored(torch.zeros_like(mean), deviations)
        return Predictive(mean, covariance, **predicted_at(self.likelihood, mean, covariance, both, link, self.tuning))


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
    of = _Linearised(model, data, laplace, prior, draws, seed, _route(laplace, how), batch_size, memory)
    H, f = of.H, of.f
    offset, slope, hessian = torch.zeros_like(of.weights), torch.zeros_like(f), averages(of.likelihood, f[None], of.y)[1]
    for number in range(rounds + 1):
        D = of.system.precisions
        step = D * (of.weights + offset) + of.scale * H.back(slope[None])[0] if number else torch.zeros_like(D)
        moved, deviations = of.solved(hessian, step)
        offset = offset + moved
        if number < rounds:
            _, moved = H.along(torch.cat([offset[None], deviations]))
            slope, hessian = averages(of.likelihood, mirrored(f + moved[0], moved[1:]), of.y)
    return Posterior(of.model, of.likelihood, offset, deviations)


@arithmetic.true_float32()
def tuned(
    model: nn.Module,
    data: Data,
    laplace: Laplace,
    prior: Prior,
    *,
    link: Link = "probit",
    draws: int | None = None,
    seed: int = 0,
    how: How | None = None,
    batch_size: int | None = None,
    memory: float | None = None,
) -> Posterior:
    """The Laplace posterior about the weights of the fit, with the temperature and scale that leave-one-out on ``data`` asks for.

    It is for classes. Leave-one-out is estimated twice, with the curvature of the loss at the outputs of the fit and with its mean over the
    posterior: the first moves outputs too far where a network is sure of its data, the second not far enough. Both must see a gain.
    """
    check_link(link)
    if likelihoods.classes(laplace.likelihood, laplace.outputs) is None:
        raise ValueError(
            f"the {laplace.likelihood.name} likelihood has no classes, so there is nothing to tune: use posterior.at"
        )
    how = _route(laplace, how)
    draws = (MORE if how == "rows" else DRAWS) if draws is None else draws
    of = _Linearised(model, data, laplace, prior, draws, seed, how, batch_size, memory)
    slope, hessian = averages(of.likelihood, of.f[None], of.y)
    deviations = of.solved(hessian)[1]
    moved = of.H.along(deviations)[1]
    averaged = averages(of.likelihood, mirrored(of.f, moved), of.y)[1]
    mean, covariance = of.without(slope, hessian, lambda: moved)
    means = (mean, of.without(slope, averaged, lambda: of.H.along(of.solved(averaged)[1])[1])[0])
    tuning = tune(of.likelihood, means, covariance, of.y, link, seed)
    return Posterior(of.model, of.likelihood, torch.zeros_like(of.weights), deviations, tuning)


def _route(laplace: Laplace, how: How | None) -> How:
    """By a matrix of all rows where they are few, or as it is asked for."""
    how = ("rows" if laplace.samples * laplace.outputs <= FEW else "steps") if how is None else how
    if how not in ("rows", "steps"):
        raise ValueError(f"how must be 'rows', 'steps' or None, got {how!r}")
    return how


class _Linearised:
    """The network linearised at its weights, its data in memory, and systems with H + D."""

    def __init__(
        self,
        model: nn.Module,
        data: Data,
        laplace: Laplace,
        prior: Prior,
        draws: int,
        seed: int,
        how: How,
        batch_size: int | None,
        memory: float | None,
    ):
        self.model, self.likelihood = processes.unwrapped(model), laplace.likelihood
        refuse_other(self.model, data, laplace, prior)
        shown = [(x, y) for x, y, _, _ in Pass(self.model, data, self.likelihood, alone=True)]
        x, self.y = (torch.cat(part) for part in zip(*shown, strict=True))
        self.H = H = GaussNewton(self.model, (x, self.y), self.likelihood, batch_size=batch_size, memory=memory)
        self.system: _Rows | _Steps = (_Rows if how == "rows" else _Steps)(H, laplace, prior.precision(), x)
        self.weights, self.scale = flat(H.parameters), float(self.likelihood.scale().detach())
        self.f, _ = H.along()
        generator = torch.Generator().manual_seed(seed)  # one noise for every sample, however they are divided among batches
        self.own = torch.randn(draws, len(self.weights), dtype=torch.float64, generator=generator).to(H.device)
        self.noise = torch.randn(draws, *self.f.shape, dtype=torch.float64, generator=generator).to(H.device)

    def solved(self, hessian: Tensor, step: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """-(H + D)^-1 step, and draws of N(0, (H + D)^-1), with ``hessian`` (N, D, D) in H."""
        roots = root(hessian)
        self.system.use(roots)
        random = self.scale**0.5 * self.H.back(torch.einsum("nij,knj->kni", roots, self.noise))
        random = random + self.system.precisions.sqrt() * self.own
        step = torch.zeros_like(self.weights) if step is None else step
        found = self.system.solve(torch.cat([-step[None], random]))
        return found[0], found[1:]

    def without(self, slope: Tensor, hessian: Tensor, moved: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        """Outputs and covariance of each sample by the others (``cavity``); ``moved`` gives J times draws (k, N, D), if they are needed."""
        covariance = self.system.covariance(root(hessian), moved)
        return cavity(self.f, covariance, self.scale * slope, self.scale * hessian)


class _Steps:
    """(H + D)^-1 z by conjugate gradients."""

    def __init__(self, H: GaussNewton, laplace: Laplace, precision: Mapping[str, float], x: Tensor):
        self.H, self.precisions = H, _precisions(H, laplace, precision)
        self.whitened = Whitened(H, laplace, precision)

    def use(self, roots: Tensor) -> None:
        """Take R R^T of ``roots`` (N, D, D) for Lambda from now on."""
        self.H.roots = roots

    def solve(self, right: Tensor) -> Tensor:
        def enough(found: Solution) -> bool:
            return bool((found.residuals < RESIDUAL).all())

        B = self.whitened.turned
        return B(solve(self.whitened, B(right, True), enough, MOST_STEPS).x, False)

    def covariance(self, roots: Tensor, moved: Callable[[], Tensor]) -> Tensor:
        """J_n (H + D)^-1 J_n^T of every sample (N, D, D), from J times draws."""
        return spread(moved())


class _Rows:
    """(H + D)^-1 z = D^-1 z - D^-1 J^T R (1 / scale + R^T K R)^-1 R^T J D^-1 z, with K = J D^-1 J^T of all samples and outputs."""

    def __init__(self, H: GaussNewton, laplace: Laplace, precision: Mapping[str, float], x: Tensor):
        self.H, self.scale = H, float(laplace.likelihood.scale().detach())
        self.precisions = _precisions(H, laplace, precision)
        paths = [path for path in rows_of(H.model, x, Gaussian(), None, BATCH) if path.name not in laplace.left_out]
        self.kernel = sum(
            (path.double().kernel().div_(precision[path.name]) for path in paths), torch.zeros((), dtype=torch.float64)
        )

    def use(self, roots: Tensor) -> None:
        """Take R R^T of ``roots`` (N, D, D) for Lambda from now on."""
        self.H.roots, K = roots, self.kernel
        inside = self._turned(self._turned(K).mT)
        inside.diagonal().add_(1 / self.scale)
        self.factor = torch.linalg.cholesky(inside)

    def solve(self, right: Tensor) -> Tensor:
        R = self.H.roots
        assert R is not None
        kept = right * torch.where(self.precisions > 0, 1 / self.precisions, 0.0)
        _, along = self.H.along(kept)
        rows = torch.cholesky_solve((along[:, :, None] @ R).flatten(1).mT, self.factor).mT
        back = self.H.back((R @ rows.view(-1, *R.shape[:2], 1))[..., 0])
        return kept - back * torch.where(self.precisions > 0, 1 / self.precisions, 0.0)

    def covariance(self, roots: Tensor, moved: Callable[[], Tensor]) -> Tensor:
        """J_n (H + D)^-1 J_n^T of every sample (N, D, D), exactly: the blocks of K - K R (1 / scale + R^T K R)^-1 R^T K."""
        self.use(roots)
        samples, outputs = roots.shape[:2]
        each = torch.arange(samples, device=self.kernel.device)
        known = torch.linalg.solve_triangular(self.factor, self._turned(self.kernel), upper=False).view(-1, samples, outputs)
        blocks = self.kernel.view(samples, outputs, samples, outputs)[each, :, each]
        return blocks - torch.einsum("rni,rnj->nij", known, known)

    def _turned(self, matrix: Tensor) -> Tensor:
        """R^T M, with R of all samples as one block-diagonal matrix."""
        assert self.H.roots is not None
        samples, outputs = self.H.roots.shape[:2]
        return (self.H.roots.mT @ matrix.reshape(samples, outputs, -1)).view(matrix.shape)


def _precisions(H: GaussNewton, laplace: Laplace, precision: Mapping[str, float]) -> Tensor:
    """The diagonal of D, and 0 for weights that the evidence leaves out."""
    kept = [precision[site.name] * (site.name not in laplace.left_out) for site in H.sites]
    sizes = torch.tensor(H.sizes, device=H.device)
    return torch.tensor(kept, dtype=torch.float64, device=H.device).repeat_interleave(sizes)


def spread(deviations: Tensor) -> Tensor:
    """The covariance (B, D, D) of draws ``deviations`` (k, B, D) about their mean, which is 0."""
    return torch.einsum("kbi,kbj->bij", deviations, deviations) / len(deviations)


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
