"""Which paths are clearly worth their evidence, or clearly are not: all candidates in one pass over the data, of forward passes alone.

    nats ~ [log p(D | w) - log p(D | w without the path)] - [what the path's own prior and curvature cost]

The log-likelihood without a path is exact. Factors of all other paths are kept as they are with it, and precisions and noise are learned
again. But other factors change with the function: in six fits of digits the estimate was too low by up to half of what a path moves, and
by 8 nats where it moves next to nothing.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.func import functional_call

from autosym.bayes.likelihoods import Likelihood
from autosym.curvature.owners import is_under
from autosym.curvature.passes import Pass
from autosym.curvature.verification import verify
from autosym.evidence.laplace import LOG_PRECISION_RANGE, Laplace
from autosym.runtime import arithmetic, processes
from autosym.runtime.batching import Data
from autosym.training.fitted import Fit

ABOVE, BELOW = 0.5, 1.0  # parts of ``moved`` by which an estimate has to be above or below a threshold,
ERROR = 8.0  # and nats beside


@dataclass(frozen=True)
class Estimate:
    """What a path is worth by kept factors, and ``moved``: nats of log-likelihood and of complexity that go with it."""

    nats: float
    moved: float

    def decides(self, threshold: float) -> bool:
        """Whether the worth is above or below ``threshold`` beyond doubt."""
        return self.nats - threshold > ERROR + ABOVE * self.moved or threshold - self.nats > ERROR + BELOW * self.moved


def _outputs(model: nn.Module, x: Tensor, names: Sequence[str]) -> Tensor:
    """The outputs of the model with the named parameters at zero."""
    own = dict(model.named_parameters())
    return functional_call(model, {name: torch.zeros_like(own[name]) for name in names}, (x,))


@torch.no_grad()
def screen(
    fitted: Fit, data: Data, stems: Sequence[str], steps: int, batch_size: int | None = None, memory: float | None = None
) -> dict[str, Estimate]:
    """An estimate for each path in ``stems``; ``fitted`` has its evidence by Kronecker factors, at its best precisions and noise.

    ``steps`` closed-form steps of precisions and noise are made for each.
    """
    model, likelihood = processes.unwrapped(fitted.model), fitted.likelihood
    under = {stem: [name for name, _ in model.named_parameters() if is_under(name, stem)] for stem in stems}
    shown = Pass(model, data, likelihood, batch_size, lambda x: verify(model, x), memory=memory, allow_partial=True)
    sums = {stem: torch.zeros_like(shown.statistic) for stem in stems}
    with processes.agreeing(), arithmetic.true_float32():
        for x, y, _, _ in shown:
            shown.add(model(x), y)
            for stem, names in under.items():
                sums[stem] += likelihood.statistic(_outputs(model, x, names), y).double()
    shown.finish(*sums.values())
    return {stem: _estimate(fitted, stem, statistic.cpu(), steps) for stem, statistic in sums.items()}


def _estimate(fitted: Fit, stem: str, statistic: Tensor, steps: int) -> Estimate:
    at, prior = fitted.laplace, copy.deepcopy(fitted.prior)
    gone = [is_under(name, stem) for name in at.names]
    prior.log_precision[torch.tensor(gone)] = LOG_PRECISION_RANGE[1]
    kept = _without(at, gone, statistic, copy.deepcopy(fitted.likelihood))
    for _ in range(steps):
        kept.mackay(prior)
    before, after = fitted.evidence, kept(prior)
    nats = float(before.log_evidence - after.log_evidence)
    fitting = float(before.log_likelihood - after.log_likelihood)
    return Estimate(nats, abs(fitting) + abs(fitting - nats))


def _without(at: Laplace, gone: Sequence[bool], statistic: Tensor, likelihood: Likelihood) -> Laplace:
    """Evidence with the factors of ``at``, but none of the paths that are gone."""
    eigenvalues = tuple(
        (torch.zeros_like(lam), torch.zeros_like(mu)) if out else (lam, mu)
        for out, (lam, mu) in zip(gone, at.eigenvalues, strict=True)
    )
    return replace(
        at,
        eigenvalues=eigenvalues,
        square_norms=at.square_norms * ~torch.tensor(gone),
        curvature=replace(at.curvature, statistic=statistic),
        likelihood=likelihood,
        left_out=tuple(name for name, out in zip(at.names, gone, strict=True) if out or name in at.left_out),
    )
