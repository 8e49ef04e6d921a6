"""Variational evidence with a matrix normal posterior for every path.

    W = M + L_S E L_A,   E ~ N(0, I)          so that  cov(vec W) = kron(L_S L_S^T, L_A^T L_A)
    log p(D) >= E_q log p(D | W) - sum over paths of KL(q || N(0, I / delta))
    KL = 1/2 [ delta (|L_S|^2 |L_A|^2 + |M|^2) - d - d log delta ] - in log det L_S - out log det L_A

L_S (out, out) is lower and L_A (in, in) upper triangular. Every block of a path has one of each, and both are learned.
Precisions have a closed form. Unlike Laplace, this needs no mode and no curvature, only samples of the log-likelihood.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from autosym.bayes import likelihoods
from autosym.bayes.likelihoods import Likelihood
from autosym.curvature.owners import sites
from autosym.curvature.passes import Pass
from autosym.evidence.record import Evidence
from autosym.runtime import arithmetic
from autosym.runtime.batching import Data


class MatrixNormal(nn.Module):
    """q(W) of one path's weight (K, out, in). Its mean starts at the weight, with standard deviation ``std`` of each entry."""

    def __init__(self, weight: Tensor, std: float = 0.01):
        super().__init__()
        blocks, rows, columns = weight.shape
        self.mean = nn.Parameter(weight.detach().clone())
        log_root = torch.full((blocks, rows), math.log(std) / 2).to(weight)
        self.log_row, self.log_column = nn.Parameter(log_root), nn.Parameter(log_root[:, :1].repeat(1, columns))
        self.row, self.column = (nn.Parameter(torch.zeros(blocks, n, n).to(weight)) for n in (rows, columns))

    def factors(self) -> tuple[Tensor, Tensor]:
        """L_S (K, out, out), lower, and L_A (K, in, in), upper triangular; their diagonals are positive."""
        S = self.row.tril(-1) + torch.diag_embed(self.log_row.exp())
        return S, self.column.triu(1) + torch.diag_embed(self.log_column.exp())

    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """``count`` weights, (count, K, out, in)."""
        S, A = self.factors()
        noise = torch.randn(count, *self.mean.shape, generator=generator, dtype=self.mean.dtype, device=self.mean.device)
        return self.mean + S @ noise @ A

    def expected_square(self) -> Tensor:
        """E |W|^2 = |M|^2 + sum_k |L_S|^2 |L_A|^2."""
        rows, columns = (L.square().sum((1, 2)) for L in self.factors())  # not prod(): its gradient waits for the device
        return self.mean.square().sum() + (rows * columns).sum()

    def entropy(self) -> Tensor:
        """d/2 log(2 pi e) + in log det L_S + out log det L_A, summed over blocks."""
        _, rows, columns = self.mean.shape
        log_det = columns * self.log_row.sum() + rows * self.log_column.sum()
        return self.mean.numel() / 2 * math.log(2 * math.pi * math.e) + log_det


class Posterior(nn.Module):
    """q over all weights of a model made of paths (or torch's Linear and Conv), and the prior precision delta of each path."""

    log_precision: Tensor
    sizes: Tensor

    def __init__(self, model: nn.Module, std: float = 0.01, precision: float = 1.0):
        super().__init__()
        owned = sites(model)
        by_identity = {id(parameter): name for name, parameter in model.named_parameters()}
        self.names = tuple(by_identity[id(site.parameter)] for site in owned)  # the names that torch.func.functional_call takes
        self.shapes = tuple(site.parameter.shape for site in owned)
        self.parts = nn.ModuleList(MatrixNormal(_blocks(site.parameter), std) for site in owned)
        start = torch.full((len(owned),), math.log(precision), dtype=torch.float64, device=owned[0].parameter.device)
        self.register_buffer("log_precision", start)
        self.register_buffer("sizes", start.new_tensor([p.mean.numel() for p in self._parts()]), persistent=False)

    def _parts(self) -> list[MatrixNormal]:
        return list(self.parts)  # type: ignore[arg-type]

    def sample(self, count: int, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Weight-space sampling: ``count`` sets of weights (count, *shape), by name, for vmap of torch.func.functional_call."""
        drawn = (part.sample(count, generator) for part in self._parts())
        return {
            name: weights.reshape(count, *shape) for name, shape, weights in zip(self.names, self.shapes, drawn, strict=True)
        }

    def means(self) -> dict[str, Tensor]:
        """The means by name: the network to predict with."""
        return {
            name: part.mean.reshape(shape) for name, shape, part in zip(self.names, self.shapes, self._parts(), strict=True)
        }

    def kl(self) -> Tensor:
        """KL(q || prior) of every path, (paths,)."""
        square = torch.stack([part.expected_square() for part in self._parts()]).to(self.log_precision)
        entropy = torch.stack([part.entropy() for part in self._parts()]).to(self.log_precision)
        return -entropy - _log_prior(square, self.sizes, self.log_precision)

    def evidence(self, log_likelihood: Tensor, samples: int) -> Evidence:
        """The bound, given E_q log p(D | W) over all ``samples``."""
        square = torch.stack([part.expected_square() for part in self._parts()]).to(self.log_precision)
        entropy = torch.stack([part.entropy() for part in self._parts()]).sum().to(self.log_precision)
        log_prior = _log_prior(square, self.sizes, self.log_precision).sum()
        return Evidence(log_likelihood, log_prior, -entropy, samples, "the evidence")

    def update_precisions(self, rate: float = 1.0) -> None:
        """delta <- d / E |W|^2, the best for this q, by a moving average of variances: (1 - rate) of the old one stays."""
        with torch.no_grad():
            square = torch.stack([part.expected_square() for part in self._parts()]).to(self.log_precision)
            variance = (1 - rate) * torch.exp(-self.log_precision) + rate * square / self.sizes
            self.log_precision.copy_(-variance.log())


def _log_prior(square: Tensor, sizes: Tensor, log_precision: Tensor) -> Tensor:
    """E_q log N(W | 0, I / delta) of every path."""
    return 0.5 * (sizes * (log_precision - math.log(2 * math.pi)) - log_precision.exp() * square)


def _blocks(weight: Tensor) -> Tensor:
    """A parameter as (K, out, in), as a path's weight is. torch's are one matrix: filters are rows, a bias is one column."""
    return weight if weight.dim() == 3 else weight.reshape(1, len(weight) if weight.dim() else 1, -1)


def expected_statistic(model: nn.Module, weights: Mapping[str, Tensor], x: Tensor, y: Tensor, likelihood: Likelihood) -> Tensor:
    """The mean over sets of weights (count, *shape) of the likelihood's statistic of one batch."""
    outputs = torch.func.vmap(lambda w: torch.func.functional_call(model, w, (x,)))(dict(weights))
    return torch.stack([likelihood.statistic(f, y) for f in outputs]).mean()


@arithmetic.true_float32()
def at(
    model: nn.Module,
    data: Data,
    posterior: Posterior,
    likelihood: str | Likelihood = "categorical",
    count: int = 10,
    batch_size: int = 1000,
) -> Evidence:
    """An unbiased estimate of the bound over all of ``data``, from ``count`` sets of weights, the same for all samples."""
    likelihood = likelihoods.of(likelihood)
    shown, weights = Pass(model, data, likelihood, batch_size, alone=True), posterior.sample(count)
    total = torch.zeros((), dtype=torch.float64)
    for x, y, _, _ in shown:
        with torch.no_grad():
            shown.check(model(x[:2]), y)
        total = total + expected_statistic(model, weights, x, y, likelihood).to(total)
    shown.finish()
    return posterior.evidence(likelihood.log_likelihood(total, shown.samples * shown.outputs), shown.samples)
