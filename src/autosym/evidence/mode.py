"""The mode of the linearised network: where its Laplace evidence is exact to second order.

Training stops short of a mode. The network linearised at the weights w, f(w) + J d, has a convex loss, so its mode w + d is a few
Newton steps away, each by conjugate gradients preconditioned with Kronecker factors. The evidence there is the linearised network's.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autosym.bayes.priors import Prior
from autosym.curvature.gauss_newton import GaussNewton, flat
from autosym.curvature.krylov import Solution, solve
from autosym.evidence.laplace import Laplace
from autosym.evidence.whitened import Whitened
from autosym.evidence.whole import refuse_other
from autosym.runtime import processes
from autosym.runtime.batching import Data

NEWTON, HALVINGS = 20, 20  # at most so many Newton steps, and halvings of each
STEPS = 200  # of conjugate gradients in a Newton step, at most


@dataclass(frozen=True)
class Mode:
    """The mode of the linearised network, ``offset`` away from the weights (all in a row).

    ``gain`` is by how many nats the log joint density of data and weights is larger there. ``left`` is what one more Newton step
    would still gain, and ``steps`` how many there were.
    """

    offset: Tensor
    gain: float
    left: float
    steps: int


def linearised(
    model: nn.Module,
    data: Data,
    laplace: Laplace,
    prior: Prior,
    *,
    nats: float = 0.01,
    batch_size: int | None = None,
    memory: float | None = None,
) -> Mode:
    """Newton steps from the weights that ``laplace`` was taken at, until one more would gain less than ``nats``.

    The likelihood must be log-concave in the outputs, as those of the library are. Its Gauss-Newton matrix is then the Hessian of the
    linearised network, and steps are halved if they go too far. For a Gaussian one step is exact.
    """
    refuse_other(model, data, laplace, prior)
    H = GaussNewton(processes.unwrapped(model), data, laplace.likelihood, batch_size=batch_size, memory=memory)
    precision = prior.precision()
    whitened = Whitened(H, laplace, precision)
    delta = torch.cat([torch.full((size,), precision[site.name]) for site, size in zip(H.sites, H.sizes, strict=True)])
    delta, w = delta.to(H.device, torch.float64), flat(H.parameters)
    H.offset = torch.zeros_like(w)
    begun = joint, slope = _joint(H, delta, w)
    left, steps = float("inf"), 0
    while steps < NEWTON:
        direction = _newton(whitened, slope, nats)
        left = 0.5 * processes.agreed(float(slope @ direction))
        if left < nats:
            break
        offset = H.offset
        for halving in range(HALVINGS):
            H.offset = offset + 0.5**halving * direction
            now, slope = _joint(H, delta, w)
            if processes.agreed(now) > joint:
                break
        else:
            H.offset = offset
            break
        joint, steps = now, steps + 1
    return Mode(H.offset, joint - begun[0], left, steps)


def _joint(H: GaussNewton, delta: Tensor, w: Tensor) -> tuple[float, Tensor]:
    """The log joint density at the offset, up to a constant, and its slope."""
    assert H.offset is not None
    statistic, gradient = H.slope()
    scale, moved = H.likelihood.scale().detach().item(), w + H.offset
    value = float(H.likelihood.log_likelihood(statistic, 0).detach()) - 0.5 * float((delta * moved.square()).sum())
    return value, -scale * gradient - delta * moved


def _newton(whitened: Whitened, slope: Tensor, nats: float) -> Tensor:
    """(H + D)^-1 times the slope, to an error of the gain below ``nats``."""
    right = whitened.turned(slope[None], back=True)

    def enough(found: Solution) -> bool:
        residual = right - whitened(found.x)
        return 0.5 * float(residual.square().sum()) / whitened.least < nats

    return whitened.turned(solve(whitened, right, enough, STEPS, check=10).x, back=False)[0]
