"""Annealed importance sampling (Neal 2001): a log evidence that is right in the limit of many temperatures, for small models.

    p_b(z) ~ N(z | 0, I) p(D | z)^b,   b from 0 to 1,       log w = sum_t (b_{t+1} - b_t) log p(D | z_t)

z_t is moved by Hamiltonian Monte Carlo that leaves p_{b_t} unchanged. The mean of w over chains is an unbiased estimate of p(D), so its log
is too small on average (forwards, from the prior); from samples of the posterior down to the prior it is too large (backwards; Grosse et
al. 2015). Where the two meet, the number is known. Weights are taken as z = w delta^1/2, so that every prior is the same.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from autosym.bayes.likelihoods import Likelihood
from autosym.bayes.priors import Prior
from autosym.curvature.owners import sites

Pair = tuple[Tensor, Tensor]
LogLikelihood = Callable[[Tensor], Tensor]  # (chains, P) to (chains,)


@dataclass(frozen=True)
class Estimate:
    """log p(D) forwards and backwards, each with the standard error over chains (delta method)."""

    forwards: float
    forwards_error: float
    backwards: float
    backwards_error: float
    acceptance: float

    @property
    def middle(self) -> float:
        return (self.forwards + self.backwards) / 2

    @property
    def uncertainty(self) -> float:
        """Half the distance of the two directions, or the larger standard error."""
        return max(abs(self.forwards - self.backwards) / 2, self.forwards_error, self.backwards_error)


def log_evidence(
    log_likelihood: LogLikelihood, size: int, temperatures: int = 1000, chains: int = 16, leaps: int = 8, seed: int = 0
) -> Estimate:
    """Forwards from the prior, then backwards from where long chains end at the posterior.

    A pilot run finds the length of leapfrog steps at every temperature, which then stays as it is: steps that are adapted on the
    way would not leave p_b unchanged.
    """
    betas = (torch.arange(temperatures + 1, dtype=torch.float64) / temperatures) ** 4
    draw = torch.Generator().manual_seed(seed)
    start = torch.randn(chains, size, generator=draw, dtype=torch.float64)
    lengths = torch.full((temperatures + 1,), 0.5, dtype=torch.float64)
    _anneal(log_likelihood, start, betas, lengths, leaps, draw, adapt=True)
    start = torch.randn(chains, size, generator=draw, dtype=torch.float64)
    z, forwards, acceptance = _anneal(log_likelihood, start, betas, lengths, leaps, draw)
    z = z[torch.multinomial(torch.softmax(forwards, 0), chains, replacement=True, generator=draw)]
    for _ in range(temperatures // 4):  # chains that were drawn twice part again
        z, _ = _move(log_likelihood, z, 1.0, lengths[-1], leaps, draw)
    _, backwards, _ = _anneal(log_likelihood, z, betas.flip(0), lengths.flip(0), leaps, draw)
    low, low_error = _log_mean(forwards)
    high, high_error = _log_mean(backwards)
    return Estimate(low, low_error, -high, high_error, acceptance)


def _anneal(
    log_likelihood: LogLikelihood,
    z: Tensor,
    betas: Tensor,
    lengths: Tensor,
    leaps: int,
    draw: torch.Generator,
    adapt: bool = False,
) -> tuple[Tensor, Tensor, float]:
    """The states at the last temperature, log weights (chains,), and the mean acceptance."""
    total, accepted = torch.zeros(len(z), dtype=torch.float64), 0.0
    for t in range(1, len(betas)):
        total += (betas[t] - betas[t - 1]) * log_likelihood(z).detach()
        z, rate = _move(log_likelihood, z, float(betas[t]), lengths[t], leaps, draw)
        accepted += rate / (len(betas) - 1)
        if adapt:
            lengths[t] *= math.exp(0.5 * (rate - 0.8))
            lengths[t + 1 :] = lengths[t]
    return z, total, accepted


def _move(
    log_likelihood: LogLikelihood, z: Tensor, beta: float, length: Tensor, leaps: int, draw: torch.Generator
) -> tuple[Tensor, float]:
    """One trajectory of every chain, accepted or not."""
    step = float(length) * (0.8 + 0.4 * torch.rand(len(z), 1, generator=draw, dtype=torch.float64))
    momentum = torch.randn(z.shape, generator=draw, dtype=torch.float64)
    energy, slope = _energy(log_likelihood, z, beta)
    at, p, now = z, momentum - step / 2 * slope, energy
    for leap in range(leaps):
        at = at + step * p
        now, slope = _energy(log_likelihood, at, beta)
        p = p - (step / 2 if leap == leaps - 1 else step) * slope
    change = energy - now + 0.5 * (momentum.square().sum(1) - p.square().sum(1))
    chance = change.nan_to_num(-math.inf).clamp(max=0).exp()
    taken = torch.rand(len(z), generator=draw, dtype=torch.float64) < chance
    return torch.where(taken[:, None], at, z), float(chance.mean())


def _energy(log_likelihood: LogLikelihood, z: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """-log p_b(z) without constants, and its slope."""
    z = z.detach().requires_grad_(True)
    energy = 0.5 * z.square().sum(1) - beta * log_likelihood(z)
    (slope,) = torch.autograd.grad(energy.sum(), z)
    return energy.detach(), slope


def _log_mean(log_weights: Tensor) -> tuple[float, float]:
    """log of the mean weight, and the standard error of that."""
    count = len(log_weights)
    mean = float(log_weights.logsumexp(0)) - math.log(count)
    spread = (log_weights - mean).exp().std()
    return mean, float(spread / math.sqrt(count))


class Whitened:
    """A model with its prior as a function of z = w delta^1/2, flat: the log-likelihood and outputs of one z or of many."""

    def __init__(self, model: nn.Module, prior: Prior, likelihood: Likelihood, pair: Pair):
        self.model, self.likelihood, self.pair = model, likelihood, pair
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        owned = {site.name: site.parameter for site in sites(model)}
        deviation = {name: precision**-0.5 for name, precision in prior.precision().items()}
        self.parts = [(names[id(owned[name])], owned[name].shape, deviation[name]) for name in prior.names]
        self.size = sum(p.numel() for p in owned.values())
        self.z = torch.cat([owned[name].detach().flatten() / deviation[name] for name in prior.names])

    def weights(self, z: Tensor) -> dict[str, Tensor]:
        pieces = z.split([math.prod(shape) for _, shape, _ in self.parts])
        return {name: (piece * s).reshape(shape) for piece, (name, shape, s) in zip(pieces, self.parts, strict=True)}

    def outputs(self, z: Tensor) -> Tensor:
        return functional_call(self.model, self.weights(z), (self.pair[0],))

    def log_likelihood(self, z: Tensor) -> Tensor:
        """(chains, P) to (chains,)."""

        def one(row: Tensor) -> Tensor:
            f = self.outputs(row)
            return self.likelihood.log_likelihood(self.likelihood.statistic(f, self.pair[1]), f.numel())

        return vmap(one)(z)

    def to_mode(self, steps: int = 1000) -> None:
        """Bring the model's weights to the nearest mode of the posterior."""
        z = self.z.clone().requires_grad_(True)
        optimiser = torch.optim.LBFGS(
            [z], max_iter=steps, tolerance_grad=1e-9, tolerance_change=1e-14, line_search_fn="strong_wolfe"
        )

        def loss() -> Tensor:
            optimiser.zero_grad()
            value = 0.5 * z.square().sum() - self.log_likelihood(z[None])[0]
            value.backward()
            return value

        optimiser.step(loss)
        self.z = z.detach()
        parameters = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, weight in self.weights(self.z).items():
                parameters[name].copy_(weight)

    def ggn(self) -> Tensor:
        """J^T Lambda J with respect to z: (P, P)."""
        f = self.outputs(self.z)
        rows = jacrev(self.outputs)(self.z)  # (N, D, P)
        rows = torch.einsum("ndp,ndr->nrp", rows, self.likelihood.root(f)).flatten(0, 1)
        return self.likelihood.scale().detach() * rows.mT @ rows

    def laplace(self, ggn: Tensor) -> float:
        """log p(D | z) - |z|^2 / 2 - 1/2 log det (I + GGN): the prior of z is standard."""
        log_det = torch.linalg.slogdet(torch.eye(self.size, dtype=torch.float64) + ggn)[1]
        return float(self.log_likelihood(self.z[None])[0] - 0.5 * self.z.square().sum() - 0.5 * log_det)
