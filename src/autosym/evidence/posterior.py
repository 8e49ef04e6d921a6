"""The posterior of the linearised network, with the Gauss-Newton matrix of the whole network: a mean, and draws around it.

    q(w) = N(m, (D + sum_n J_n^T E[Lambda_n] J_n)^-1),     D m + sum_n J_n^T E[dloss_n / df] = 0,     E over f_n under q

A Laplace approximation takes Lambda at the outputs of the fit. Where a network is sure of its training data Lambda is almost zero, so
it believes that these data say nothing, and its predictions are far too timid. The Gaussian nearest to the posterior (in the sense of
variational inference) has the means of Lambda and of the slope under q in their place. It is found in rounds, from Laplace.

A draw is (H + D)^-1 (D^1/2 e + sum_n J_n^T R_n e_n) with standard normal noise, by conjugate gradients, preconditioned by the Kronecker
factors. All draws and the Newton step of the mean share a round's products.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from autosym.bayes import likelihoods
from autosym.bayes.likelihoods import Gaussian, Likelihood
from autosym.bayes.priors import Prior
from autosym.curvature.gauss_newton import GaussNewton, flat, linear, parts_of
from autosym.curvature.krylov import Solution, solve
from autosym.curvature.owners import Site, sites
from autosym.curvature.passes import Pass
from autosym.evidence.laplace import Laplace
from autosym.evidence.leave_one_out import AS_IT_IS, Tuning, cavity, predicted_at, tune
from autosym.evidence.predictive import Link, Predictive, check_link, checked_inputs
from autosym.evidence.rows import rows_of, symmetric
from autosym.evidence.whitened import Whitened
from autosym.evidence.whole import refuse_other
from autosym.runtime import arithmetic, processes
from autosym.runtime.batching import Data

RESIDUAL, MOST_STEPS = 1e-2, 200  # of conjugate gradients: enough for draws, whose own noise is larger
ROUNDS, DRAWS = 1, 32
MORE = 128  # draws of a tuned posterior by rows: 32 make covariances of ten classes so noisy that a quarter of the gain is lost
FEW, BATCH = 8_000, 64  # rows (samples times outputs) whose matrix is factorised; samples whose Jacobian is formed at once
NUMBERS, SOME = 2**25, 8  # of a Jacobian at new inputs (256 MiB), and inputs it has to have at least

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

    @arithmetic.true_float32()
    def predictive(self, x: Tensor, link: Link = "probit") -> Predictive:
        """The predictive at ``x`` (B, ...), in closed form, or by "monte-carlo" over the draws and their mirror images about the mean."""
        check_link(link)
        x = checked_inputs(self.model, x)
        outputs = self._along(x)
        mean, deviations = outputs[0] + outputs[1], outputs[2:]
        covariance = spread(deviations)
        both = mirrored(torch.zeros_like(mean), deviations)
        return Predictive(mean, covariance, **predicted_at(self.likelihood, mean, covariance, both, link, self.tuning))

    def _along(self, x: Tensor) -> Tensor:
        """The outputs (2 + k, B, D) at x, their derivatives along the offset, and along the draws."""
        owned, vectors = sites(self.model), torch.cat([self.offset[None], self.draws]).to(x.device)
        with torch.no_grad():
            outputs = self.model(x[:1]).shape[1]
        together = min(NUMBERS // (vectors.shape[1] * outputs), BATCH)
        if outputs <= len(vectors) and together >= SOME:  # a row for each output is less than a vector for each draw
            return torch.cat([self._by_rows(owned, vectors, part) for part in x.split(together)], 1)
        parameters, found = [site.parameter for site in owned], []
        parts = parts_of(vectors, parameters)
        for part in x.split(256):
            f, along, _ = linear(self.model, parameters, part)
            found.append(torch.cat([f[None], along(parts)]).double())
        return torch.cat(found, 1)

    def _by_rows(self, owned: Sequence[Site], vectors: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            f = self.model(x)
        parts = vectors.split([site.parameter.numel() for site in owned], 1)
        named = {site.name: part for site, part in zip(owned, parts, strict=True)}
        paths = rows_of(self.model, x, Gaussian(), None, len(x))
        moved = sum((path.along(named[path.name]).double() for path in paths), torch.zeros((), device=x.device))
        return torch.cat([f[None].double(), moved.view(len(vectors), *f.shape)])


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
    of = _Linearised(model, data, laplace, prior, draws, seed, _route(laplace, how, memory), batch_size, memory)
    f = of.f
    offset, slope, hessian = torch.zeros_like(of.weights), torch.zeros_like(f), averages(of.likelihood, f[None], of.y)[1]
    for number in range(rounds + 1):
        D = of.system.precisions
        step = D * (of.weights + offset) + of.scale * of.system.back(slope[None])[0] if number else torch.zeros_like(D)
        moved, deviations = of.solved(hessian, step)
        offset = offset + moved
        if number < rounds:
            moved = of.system.along(torch.cat([offset[None], deviations]))
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
    how = _route(laplace, how, memory)
    draws = (MORE if how == "rows" else DRAWS) if draws is None else draws
    of = _Linearised(model, data, laplace, prior, draws, seed, how, batch_size, memory)
    slope, hessian = averages(of.likelihood, of.f[None], of.y)
    deviations = of.solved(hessian)[1]
    moved = of.system.along(deviations)
    averaged = averages(of.likelihood, mirrored(of.f, moved), of.y)[1]
    mean, covariance = of.without(slope, hessian, lambda: moved)
    means = (mean, of.without(slope, averaged, lambda: of.system.along(of.solved(averaged)[1]))[0])
    tuning = tune(of.likelihood, means, covariance, of.y, link, seed)
    return Posterior(of.model, of.likelihood, torch.zeros_like(of.weights), deviations, tuning)


def _route(laplace: Laplace, how: How | None, memory: float | None) -> How:
    """By a matrix of all rows where they are few, and it fits into ``memory`` (GiB) with all rows, or as it is asked for."""
    rows = laplace.samples * laplace.outputs
    weight = next(iter(laplace.parameters.values())).element_size()
    needs = 8 * 5 * rows**2 + 2 * weight * rows * float(laplace.sizes.sum())  # as ``costs`` counts them
    fits = rows <= FEW and (memory is None or needs <= memory * 2**30)
    how = ("rows" if fits else "steps") if how is None else how
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
        random = self.scale**0.5 * self.system.back(torch.einsum("nij,knj->kni", roots, self.noise))
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

    def along(self, vectors: Tensor) -> Tensor:
        """J v (k, N, D) for each row v of ``vectors``."""
        return self.H.along(vectors)[1]

    def back(self, cotangents: Tensor) -> Tensor:
        """sum_n J_n^T u_n (k, weights) for ``cotangents`` u (k, N, D)."""
        return self.H.back(cotangents)

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
        self.H, self.scale, self.outputs = H, float(laplace.likelihood.scale().detach()), laplace.outputs
        self.precisions = _precisions(H, laplace, precision)
        self.paths = {path.name: path for path in rows_of(H.model, x, Gaussian(), None, BATCH)}
        counted = [path for path in self.paths.values() if path.name not in laplace.left_out]
        rows = len(x) * laplace.outputs
        self.kernel = torch.zeros(rows, rows, dtype=torch.float64, device=H.device)
        for path in counted:
            path.finite().double().add_kernel(self.kernel, 1 / precision[path.name])
        self.kernel = symmetric(self.kernel)
        self.roots: Tensor | None = None

    def use(self, roots: Tensor) -> None:
        """Take R R^T of ``roots`` (N, D, D) for Lambda from now on."""
        if self.roots is not None and torch.equal(roots, self.roots):
            return
        self.roots = roots
        inside = self._turned(self._turned(self.kernel).mT)
        inside.diagonal().add_(1 / self.scale)
        self.factor = torch.linalg.cholesky(inside)

    def along(self, vectors: Tensor) -> Tensor:
        """J v (k, N, D) for each row v of ``vectors``."""
        parts = zip(self.H.sites, vectors.split(self.H.sizes, 1), strict=True)
        found = sum((self.paths[s.name].along(part).double() for s, part in parts), torch.zeros((), device=self.H.device))
        return found.view(len(vectors), -1, self.outputs)

    def back(self, cotangents: Tensor) -> Tensor:
        """sum_n J_n^T u_n (k, weights) for ``cotangents`` u (k, N, D)."""
        u = cotangents.flatten(1)
        return torch.cat([self.paths[site.name].back(u).double() for site in self.H.sites], 1)

    def solve(self, right: Tensor) -> Tensor:
        R = self.roots
        assert R is not None
        variances = torch.where(self.precisions > 0, 1 / self.precisions, 0.0)
        kept = right * variances
        rows = torch.cholesky_solve((self.along(kept)[:, :, None] @ R).flatten(1).mT, self.factor).mT
        return kept - self.back((R @ rows.reshape(-1, *R.shape[:2], 1))[..., 0]) * variances

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
        assert self.roots is not None
        samples, outputs = self.roots.shape[:2]
        return (self.roots.mT @ matrix.reshape(samples, outputs, -1)).view(matrix.shape)


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
