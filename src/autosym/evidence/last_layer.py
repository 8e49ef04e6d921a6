"""Variational evidence of a network's last layer, with a full covariance for every output (Learning Invariant Weights, Eq. 10).

    f(x) = W phi(x),      q(W) = prod_c N(w_c | mu_c, L_c L_c^T),      p(W) = N(0, I / delta)
    ELBO = sum_n E_q log p(y_n | f(x_n)) - KL(q | p)  <=  log p(D)

phi is everything before the last layer: random Fourier features, or a hidden layer that is a point estimate inside of the bound. Under q
the outputs of a sample are independent Gaussians with mean mu_c . phi and variance |L_c^T phi|^2, so noise is drawn for outputs and not
for weights: the same expectation with less noise. For Gaussian noise it is in closed form, and nothing is drawn at all. Where phi averages
over transformations (``averaging``) their widths are learned with all else, by the bound.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autosym import averaging, likelihoods
from autosym.batching import Data, Stream, batches, size_of, to_model
from autosym.evidence.differentiable import asking
from autosym.evidence.record import Evidence
from autosym.likelihoods import Gaussian, Likelihood

TINY = 1e-20  # a variance below has no slope: of features that are all zero the root would have an infinite one


class RandomFeatures(nn.Module):
    """phi(x) = sqrt(2/M) cos(omega x + b) with omega ~ N(0, frequency^2) and b uniform: fixed, and of unit norm on average."""

    omega: Tensor
    phase: Tensor

    def __init__(self, inputs: int, features: int = 1024, frequency: float = 0.3, seed: int = 0):
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.register_buffer("omega", frequency * torch.randn(features, inputs, generator=draw))
        self.register_buffer("phase", 2 * math.pi * torch.rand(features, generator=draw))

    def forward(self, x: Tensor) -> Tensor:
        return math.sqrt(2 / len(self.phase)) * torch.cos(x.flatten(1) @ self.omega.T + self.phase)


class ReluFeatures(nn.Module):
    """phi(x) = sqrt(2/M) max(W x + b, 0), with Xavier's initial weights, which are trained."""

    def __init__(self, inputs: int, features: int = 1024):
        super().__init__()
        self.linear = nn.Linear(inputs, features)
        nn.init.xavier_uniform_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return math.sqrt(2 / self.linear.out_features) * self.linear(x.flatten(1)).relu()


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
    """sum_n E_q log p(y_n | f_n): in closed form for Gaussian noise, else at f = mean + sqrt(variance) ``noise`` (B, D)."""
    mean, variance = head.moments(phi)
    if isinstance(likelihood, Gaussian):
        squares = likelihood.statistic(mean, targets).double() + variance.sum().double()
        return likelihood.log_likelihood(squares, mean.numel())
    if noise is None:
        raise ValueError(f"the expectation of a {likelihood.name} likelihood is not in closed form: give noise (B, outputs)")
    return likelihood.statistic(mean + variance.clamp_min(TINY).sqrt() * noise, targets)


def at(
    features: nn.Module,
    head: LastLayer,
    data: Data,
    likelihood: str | Likelihood = "categorical",
    draws: int = 8,
    seed: int = 0,
) -> Evidence:
    """The ELBO of all of ``data``, a lower bound of the log evidence; ``draws`` of noise for each sample where it is needed."""
    likelihood = likelihoods.of(likelihood)
    generator, total, samples = torch.Generator().manual_seed(seed), torch.zeros((), dtype=torch.float64), 0
    with torch.no_grad():
        for x, y in batches(data, 500):
            x, y = to_model(x, y, head, "the data")
            phi = features(x)
            noises = [torch.randn(len(x), len(head.mean), generator=generator).to(phi) for _ in range(draws)]
            terms = [expected_log_likelihood(head, phi, y, likelihood, noise).double() for noise in noises]
            total += torch.stack(terms).mean().cpu()
            samples += len(x)
        kl = head.kl().double().cpu()
        squares = (head.root().square().sum() + head.mean.square().sum()).double().cpu()
        size, log_precision = head.mean.numel(), head.log_precision.double().cpu()
        log_prior = 0.5 * (size * (log_precision - math.log(2 * math.pi)) - log_precision.exp() * squares)
        return Evidence(total, log_prior, kl + log_prior, samples, "the log evidence")


@dataclass(frozen=True)
class Fitted:
    """Features and last layer after training, the history of the run, and the bound at the end."""

    features: nn.Module
    head: LastLayer
    likelihood: Likelihood
    history: list[dict[str, Any]]
    evidence: Evidence

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """The mean of the outputs."""
        return self.head(self.features(x.to(self.head.mean)))


def learn(
    features: nn.Module,
    data: Data,
    outputs: int,
    likelihood: str | Likelihood = "categorical",
    *,
    epochs: int = 50,
    batch_size: int = 128,
    lr: float = 1e-3,
    range_lr: float = 1e-2,
    precision: float = 1.0,
    point_estimate: bool = False,
    seed: int = 0,
    log: Callable[[dict[str, Any]], None] | None = None,
) -> Fitted:
    """Adam, by cosine to 0, on the ELBO: of q, the prior's precision, what is trainable in ``features``, and widths of transformations.

    ``features`` gives (B, M); draws of transformations are new at every step. ``point_estimate`` leaves out the variance of q and the
    KL: the training loss alone, which learns no invariance (Fig. 5).
    """
    likelihood = copy.deepcopy(likelihoods.of(likelihood))
    parts = list(averaging.transformations(features).values())
    head = _head(features, next(batches(data, 2))[0], outputs, precision)
    stream = Stream(data, batch_size, head, lambda y: likelihood.check(outputs, y), seed)
    count = size_of(data) or sum(len(x) for x, _ in batches(data, batch_size))
    weights = [*head.parameters(), *(p for p in features.parameters() if p.requires_grad), *likelihood.parameters()]
    widths = [part.raw for part in parts if part.learn]
    optimiser = torch.optim.Adam([{"params": weights, "lr": lr}, *([{"params": widths, "lr": range_lr}] if widths else [])])
    anneal = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, epochs * math.ceil(count / batch_size))
    generator = torch.Generator(head.mean.device).manual_seed(seed)
    lines: list[dict[str, Any]] = []
    with asking(widths):
        for epoch in range(1, epochs + 1):
            total = torch.zeros((), dtype=torch.float64, device=head.mean.device)
            for number, (x, y) in enumerate(stream.epoch(epoch)):
                for place, part in enumerate(parts):
                    part.redraw(((seed * 1_000_003 + epoch) * 1_000_003 + number) * 1_003 + place)
                noise = torch.randn(len(x), outputs, generator=generator, device=head.mean.device)
                loss = _loss(head, features(x), y, likelihood, count, None if point_estimate else noise)
                optimiser.zero_grad()
                (loss / count).backward()
                optimiser.step()
                anneal.step()
                for part in parts:
                    part.limit()
                total += loss.detach() * len(x) / count
            if not math.isfinite(float(total)):
                raise ValueError(f"the bound is {float(-total)} in epoch {epoch}: lower lr (now {lr}), or rescale the inputs")
            found = {f"{name} ({r.unit})": r.value for name, r in averaging.ranges(features).items()}
            lines.append({"epoch": epoch, "bound": -float(total), "ranges": found})
            if log is not None:
                log(lines[-1])
    for part in parts:
        part.settle()
    return Fitted(features, head, likelihood, lines, at(features, head, data, likelihood, seed=seed))


def _head(features: nn.Module, example: Tensor, outputs: int, precision: float) -> LastLayer:
    """A last layer as wide as the features, where they are."""
    device = next((t.device for t in (*features.parameters(), *features.buffers())), torch.device("cpu"))
    with torch.no_grad():
        phi = features(example.float().to(device))
    if phi.dim() != 2:
        raise ValueError(f"features must be (B, M), one row for each sample, got {tuple(phi.shape)}: flatten them")
    return LastLayer(phi.shape[1], outputs, precision).to(device)


def _loss(head: LastLayer, phi: Tensor, y: Tensor, likelihood: Likelihood, count: int, noise: Tensor | None) -> Tensor:
    """Minus the bound of all ``count`` samples, from those of a batch; without noise, of a point estimate."""
    if noise is None:
        return -count / len(phi) * likelihood.log_likelihood(likelihood.statistic(head(phi), y), len(phi) * len(head.mean))
    return head.kl() - count / len(phi) * expected_log_likelihood(head, phi, y, likelihood, noise)
