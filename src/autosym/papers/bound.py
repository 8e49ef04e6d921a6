"""The bound of a last layer with a full covariance for every output, and natural-gradient steps of q (Learning Invariant Weights, Eq. 10).

    f(x) = W phi(x),      q(W) = prod_c N(w_c | mu_c, L_c L_c^T),      p(W) = N(0, I / delta)
    ELBO = sum_n E_q log p(y_n | f(x_n)) - KL(q | p)  <=  log p(D)

Under q the outputs of a sample are independent Gaussians with mean mu_c . phi and variance |L_c^T phi|^2. So noise is drawn for outputs,
not for weights: the expectation is the same, with less noise. For a Gaussian likelihood it is in closed form, and nothing is drawn.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from autosym.bayes import likelihoods
from autosym.bayes.likelihoods import Likelihood
from autosym.curvature.passes import Pass
from autosym.evidence.record import Evidence
from autosym.runtime.batching import Data

TRUST = 0.2  # log delta moves by at most this at a factorisation
PARTS = (1 / 64, 1 / 8, 1.0)  # fractions of a step; the longest that gains is taken
TINY = 1e-20  # smaller variances get no slope: at zero (if all features are zero) the slope of the square root is infinite


class LastLayer(nn.Module):
    """q(W): ``mean`` (D, M) and ``root()`` (D, M, M), a lower triangle with a positive diagonal; the prior's precision is learned."""

    def __init__(self, features: int, outputs: int, precision: float = 1.0):
        super().__init__()
        if not 0 < precision < math.inf:
            raise ValueError(f"a prior precision must be positive and finite, got {precision}")
        self.mean = nn.Parameter(torch.zeros(outputs, features))
        self.lower = nn.Parameter(torch.zeros(outputs, features, features))  # below the diagonal; the rest is not read
        self.log_diagonal = nn.Parameter(torch.full((outputs, features), -0.5 * math.log(precision)))
        self.log_precision = nn.Parameter(torch.tensor(math.log(precision)))

    def root(self) -> Tensor:
        """L: (D, M, M)."""
        return self.lower.tril(-1) + torch.diag_embed(self.log_diagonal.exp())

    def moments(self, phi: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance (B, D) of the outputs under q, for features (B, M)."""
        spread = torch.einsum("cij,bi->bcj", self.root(), phi)
        return phi @ self.mean.T, spread.square().sum(-1)

    def kl(self) -> Tensor:
        """KL(q | p) = 1/2 sum_c [delta (tr L_c L_c^T + |mu_c|^2) - M - log det L_c L_c^T - M log delta], in closed form."""
        squares = self.root().square().sum() + self.mean.square().sum()
        log_det = 2 * self.log_diagonal.sum()
        return 0.5 * (self.log_precision.exp() * squares - self.mean.numel() * (1 + self.log_precision) - log_det)

    def forward(self, phi: Tensor) -> Tensor:
        return phi @ self.mean.T


def expected_log_likelihood(
    head: LastLayer, phi: Tensor, targets: Tensor, likelihood: Likelihood, noise: Tensor | None = None
) -> Tensor:
    """sum_n E_q log p(y_n | f_n): in closed form for Gaussian noise, else a mean over f = mean + sqrt(variance) ``noise`` (K, B, D)."""
    return expected(*head.moments(phi), targets, likelihood, noise)[0]


def expected(
    mean: Tensor, variance: Tensor, targets: Tensor, likelihood: Likelihood, noise: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """sum_n E_q log p(y_n | f_n), E_q of minus its second derivative in each output (B, D), and E_q of the statistic."""
    found = likelihood.expected(mean, variance, targets)
    if found is None:
        if noise is None:
            raise ValueError(
                f"the expectation of a {likelihood.name} likelihood has no closed form: pass noise (K, B, outputs)"
            )
        f = (mean + variance.clamp_min(TINY).sqrt() * noise).flatten(0, -2)
        draws = f.shape[0] // len(mean)
        again = targets.repeat(draws, *(1,) * (targets.dim() - 1))
        found = likelihood.statistic(f, again) / draws, likelihood.diagonal(f).unflatten(0, (draws, -1)).mean(0)
    statistic, diagonal = found
    return likelihood.log_likelihood(statistic, mean.numel()), diagonal * likelihood.scale(), statistic


def at(
    features: nn.Module,
    head: LastLayer,
    data: Data,
    likelihood: str | Likelihood = "categorical",
    draws: int = 8,
    seed: int = 0,
) -> Evidence:
    """The ELBO of all of ``data``, a lower bound of the log evidence; ``draws`` of noise for each sample if needed."""
    likelihood = likelihoods.of(likelihood)
    generator, total = torch.Generator().manual_seed(seed), torch.zeros((), dtype=torch.float64)
    shown = Pass(head, data, likelihood, 500, alone=True)
    with torch.no_grad():
        for x, y, _, _ in shown:
            noise = torch.randn(draws, len(x), len(head.mean), generator=generator).to(x)
            total += expected_log_likelihood(head, features(x), y, likelihood, noise).double().cpu()
        shown.finish()
        kl = head.kl().double().cpu()
        squares = (head.root().square().sum() + head.mean.square().sum()).double().cpu()
        size, log_precision = head.mean.numel(), head.log_precision.double().cpu()
        log_prior = 0.5 * (size * (log_precision - math.log(2 * math.pi)) - log_precision.exp() * squares)
        return Evidence(total, log_prior, kl + log_prior, shown.samples, "the log evidence")


class Natural:
    """Natural-gradient steps of q: the same bound as by Adam, in far fewer steps.

        H_c  <- (1 - r) H_c + r N/B sum_b h_bc phi_b phi_b^T                   Sigma_c = (H_c + delta I)^-1
        mu_c <- mu_c + r Sigma_c (N/B sum_b g_bc phi_b - delta mu_c)           delta <- (D M - delta tr Sigma) / |mu|^2

    g is the slope of E_q log p(y | f) in the mean of an output, and h is minus its curvature. Both are expectations of derivatives of
    log p itself (Bonnet, Price), so h is never negative. ``rate`` is r for means, ``memory`` is r for H. ``gather`` and ``move`` work in
    place and may be recorded as a CUDA graph. ``refresh`` factorises: call it between them, outside the graph.
    """

    def __init__(self, head: LastLayer, likelihood: Likelihood, count: int):
        self.head, self.data = head, torch.zeros_like(head.lower)
        self.likelihood, self.count = likelihood, count
        self.rate, self.memory, self.squares = (head.mean.new_zeros(()) for _ in range(3))

    @torch.no_grad()
    def gather(self, curvature: Tensor, squares: Tensor) -> None:
        """Move H towards the ``curvature`` (D, M, M) of all samples, and E_q of the statistic (|y - f|^2 if Gaussian) to ``squares``."""
        self.data.lerp_(curvature, self.memory)
        self.squares.lerp_(squares.to(self.squares), self.memory)

    @torch.no_grad()
    def move(self, slope: Tensor, curvature: Tensor, fit: Callable[[Tensor], Tensor] | None = None) -> None:
        """Move means by the ``slope`` (D, M) of the log-likelihood of all samples, only as far as it gains.

        A whole step could throw q far off, because H lags behind features that are trained. It is still zero in directions where
        features begin to vary, and the ``curvature`` (D, M, M) itself vanishes once samples become certain. So a step ends at the
        optimum of the quadratic along it at the latest. ``fit`` is the log-likelihood at other means: if the step does not gain,
        an eighth of it is tried, then a 64th; if none gains, means stay.
        """
        root, delta = self.head.root(), self.head.log_precision.exp()
        slope = slope - delta * self.head.mean
        step = (root @ (root.mT @ slope[:, :, None]))[:, :, 0]
        bend = (step * ((curvature @ step[:, :, None])[:, :, 0] + delta * step)).sum(1, keepdim=True)
        step *= torch.minimum(self.rate, (slope * step).sum(1, keepdim=True) / bend.clamp_min(TINY))
        if fit is not None:
            means = [self.head.mean + part * step for part in (0.0, *PARTS)]
            start, *ends = (fit(mean) - 0.5 * delta * mean.square().sum() for mean in means)
            longest = torch.zeros_like(start)
            for part, end in zip(PARTS, ends, strict=True):
                longest = torch.where(end >= start, part, longest)
            step *= longest
        self.head.mean.add_(step)

    @torch.no_grad()
    def refresh(self) -> None:
        """Compute Sigma and delta anew, in float64. Rows and columns are reversed, so that the root of Sigma is a lower triangle."""
        head, eye = self.head, torch.eye(self.data.shape[1], dtype=torch.float64, device=self.data.device)
        prior = head.log_precision.double().exp() * eye
        for c, own in enumerate(self.data):  # one by one: GPU libraries are slow with a batch of a few large matrices
            factor, failed = torch.linalg.cholesky_ex((own.double() + prior).flip(0, 1))
            root = torch.linalg.solve_triangular(factor, eye, upper=False).T.flip(0, 1)
            head.lower[c], head.log_diagonal[c] = root, torch.where(failed > 0, math.nan, root.diagonal()).log()
        size, squares = head.mean.numel(), head.mean.double().square().sum()
        determined = size - head.log_precision.double().exp() * head.root().double().square().sum()
        wanted = (determined.clamp_min(1e-3 * size) / squares.clamp_min(1e-30)).log()
        head.log_precision.add_((wanted - head.log_precision).clamp(-TRUST, TRUST))
        grown = self.likelihood.update(self.squares, self.count * len(head.mean), trust=TRUST)
        self.data.mul_(grown)  # H is in units of the noise
