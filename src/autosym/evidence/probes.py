"""The log-determinant of a whole network by random probes and conjugate gradients (stochastic Lanczos quadrature).

    E z^T log(A) z                    A is H + D, preconditioned by Kronecker factors and, if it pays, a few samples (``whitened``)
    var z^T h z <= 2 tr h^2           for random signs z and h = log(A) - a A - b I, whatever a and b

Where the mean of z^T A z is known, a multiple of it takes away much of the chance. The quadrature gives tr h^2 too, so even one probe knows
its standard error. One run gives the effective parameters of every path.
"""

import math
import time

import torch
from torch import Tensor

from autosym.curvature.gauss_newton import GaussNewton
from autosym.curvature.krylov import Solution, solve
from autosym.evidence.factorised import Found
from autosym.evidence.whitened import Whitened
from autosym.runtime import processes

AT_ONCE, FEWEST = 8, 4  # probes at once, and where little work is allowed
LEAST_STEPS, USUAL_STEPS, MOST_STEPS = 5, 25, 120  # of each probe


class Allowance:
    """How many products with H may still be made: so many ``products`` in all, and as many as fit into ``seconds`` since ``begun``.

    Seconds are those of the first process, for all.
    """

    def __init__(self, H: GaussNewton, products: int, seconds: float | None = None, begun: float = 0.0):
        self.H, self.products, self.seconds = H, products, seconds
        self.begun, self.before, self.ready = begun, H.products, time.perf_counter()

    def left(self) -> float:
        made = self.H.products - self.before
        left = float(self.products - made)
        if self.seconds is not None and made:
            now = time.perf_counter()
            rest = self.seconds - (now - self.begun)
            left = min(left, processes.agreed(rest / ((now - self.ready) / made)))
        return left


def by_probes(whitened: Whitened, nats: float, seed: int, most: int, memory: float | None, allowance: Allowance) -> Found:
    """Probes, a few at a time, until their standard error is small enough. The first find the number of steps, for all.

    Steps are enough if truncation is within half of ``nats``, or within the standard error that the rest of the allowance can reach.
    Where all of the first probes cannot come so far, the rest of the allowance goes to fewer of them (``Depth``).
    """
    mean = whitened.mean(memory)
    values: list[Tensor] = []
    chances: list[Tensor] = []
    gammas: list[Tensor] = []
    steps, error, truncation, slope = MOST_STEPS, math.inf, 0.0, 0.0
    plenty = allowance.seconds is None and allowance.left() >= AT_ONCE * USUAL_STEPS
    count = AT_ONCE if plenty else FEWEST
    depth = Depth(allowance, whitened.least, mean)

    def enough(found: Solution) -> bool:
        if values:
            return False
        gap, left = depth.see(found), allowance.left()
        reached = depth.spread / math.sqrt(len(found.x) + max(left, 0.0) / found.steps)
        return found.steps >= LEAST_STEPS and (gap <= max(nats / 2, reached) or left < len(found.x))

    while 2 * error > nats and len(values) < most and count > 0:
        z = whitened.probes(seed, len(values), min(count, most - len(values)))
        going_on = None if values else depth.going_on
        found = solve(whitened, z, enough, steps, 5 if plenty else 1, going_on)
        if not values:
            depth.see(found)
        lower, upper = found.log_bracket(whitened.least)
        slope = slope if values or mean is None else found.log_slope()
        values += list(_centred(upper, found, slope, mean))
        chances += list(found.log_chances(slope))
        gammas += list(whitened.gammas(z[: len(found.x)], found.x).cpu())
        steps, truncation = found.steps, max(truncation, float((upper - lower).mean()) / 2)
        error = max(_spread(torch.stack(values), torch.stack(chances)), depth.spread) / math.sqrt(len(values))
        count = min(AT_ONCE, int(allowance.left() / steps))
    log_det = whitened.log_det + float(torch.stack(values).mean())
    gamma = {site.name: float(g) for site, g in zip(whitened.H.sites, torch.stack(gammas).mean(0), strict=True)}
    return Found(log_det, gamma, error, truncation, len(values), steps)


class Depth:
    """How the rest of an allowance is spent: k of the probes that were begun go on, so that truncation and standard error are least in sum.

        k = argmin gap(steps + left / k) + error(k)             error(k) ~ spread / sqrt(k)

    ``gap`` bounds the truncation in nats. It is taken to fall by the same factor each step as it did since half as many. ``spread`` is the
    standard deviation of one probe in nats: at least what all that were begun said, as a few that go on might not tell it.
    """

    def __init__(self, allowance: Allowance, least: float, mean: float | None):
        self.allowance, self.least, self.mean = allowance, least, mean
        self.gaps: dict[int, float] = {}
        self.begun, self.common = 0, 0.0  # how many probes there were, and the spread that all of them told
        self.spread = math.inf

    def see(self, found: Solution) -> float:
        """The gap of these steps."""
        lower, upper = found.log_bracket(self.least)
        slope = 0.0 if self.mean is None else found.log_slope()
        spread = _spread(_centred(upper, found, slope, self.mean), found.log_chances(slope))
        if len(upper) >= self.begun:
            self.begun, self.common = len(upper), spread
        self.spread = max(spread, self.common)
        self.gaps[found.steps] = float((upper - lower).mean()) / 2
        return self.gaps[found.steps]

    def going_on(self, found: Solution) -> int:
        """How many probes go on from here."""
        now, count, left = found.steps, len(found.x), self.allowance.left()
        before = max((step for step in self.gaps if step <= now / 2), default=0)
        if now < LEAST_STEPS or not before:
            return count
        fall = min(self.gaps[now] / self.gaps[before], 1.0) ** (1 / (now - before))

        def doubt(k: int) -> float:
            return self.gaps[now] * fall ** (min(now + left / k, MOST_STEPS) - now) + self.spread / math.sqrt(k)

        return min((count // 2**halving for halving in range(count.bit_length())), key=doubt)


def _centred(values: Tensor, found: Solution, slope: float, mean: float | None) -> Tensor:
    """Values of probes less what is known of their chance: ``mean`` is that of z^T A z over all probes."""
    return values if mean is None else values - slope * (found.forms - mean)


def _spread(values: Tensor, chances: Tensor) -> float:
    """The standard deviation of one probe in nats: by the quadrature, or by the values themselves if these say more."""
    several = float(values.var()) if len(values) >= FEWEST else 0.0
    return 0.5 * math.sqrt(max(float(chances.mean()), several))
