"""The log-determinant of a whole network by random probes and conjugate gradients (stochastic Lanczos quadrature).

    E z^T log(A) z,        A = B^T (H + D) B with B B^T = (t kron(G, A) + D)^-1

The Kronecker factors precondition. Of z^T A z the mean is known, so a multiple of it takes away most of the chance. One run gives the
effective parameters of every path too.
"""

import math
import time
import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

from autosym.curvature.gauss_newton import GaussNewton
from autosym.curvature.krylov import Solution, solve
from autosym.evidence.factorised import Found, Jacobians
from autosym.evidence.laplace import Laplace
from autosym.evidence.rows import Rows
from autosym.runtime import processes

STRENGTH = (
    0.05  # t: of the Kronecker factors in the preconditioner. A small spectrum below 1 takes more steps than a large one above
)
AT_ONCE, FEWEST = 8, 4  # probes at once, and where little work is allowed (fewer tell too little of their spread)
LEAST_STEPS, USUAL_STEPS, MOST_STEPS = 5, 25, 120  # of each probe
TRACE = 1e9  # rows times weights: with more, the mean of z^T A z costs too much


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


def by_probes(whitened: "Whitened", nats: float, seed: int, most: int, memory: float | None, allowance: Allowance) -> Found:
    """Probes, a few at a time, until their standard error is small enough. The first find the number of steps, for all.

    Steps are enough if truncation is within half of ``nats``, or within the standard error that the rest of the allowance can reach.
    Where all of the first probes cannot come so far, the rest of the allowance goes to fewer of them (``Depth``).
    """
    mean = whitened.trace(memory) if whitened.cheap_trace else None
    values: list[Tensor] = []
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
        lower, upper = found.log_bracket(whitened.least)
        slope = slope if values or mean is None else found.log_slope()
        values += list(_centred(upper, found, slope, mean))
        gammas += list(whitened.gammas(z[: len(found.x)], found.x).cpu())
        steps, truncation = found.steps, max(truncation, float((upper - lower).mean()) / 2)
        error = 0.5 * standard_error(torch.stack(values)) if len(values) >= FEWEST else depth.error(len(values))
        count = min(AT_ONCE, int(allowance.left() / steps))
    log_det = whitened.log_det + float(torch.stack(values).mean())
    gamma = {site.name: float(g) for site, g in zip(whitened.H.sites, torch.stack(gammas).mean(0), strict=True)}
    return Found(log_det, gamma, error, truncation, len(values), steps)


class Depth:
    """How the rest of an allowance is spent: k of the probes that were begun go on, so that truncation and standard error are least in sum.

        k = argmin gap(steps + left / k) + error(k)             error(k) ~ spread / sqrt(k)

    ``gap`` bounds the truncation in nats. It is taken to fall by the same factor each step as it did since half as many. ``spread`` is the
    standard deviation of one probe in nats, by all that were begun: a few that go on could not tell it.
    """

    def __init__(self, allowance: Allowance, least: float, mean: float | None):
        self.allowance, self.least, self.mean = allowance, least, mean
        self.gaps: dict[int, float] = {}
        self.spread, self.begun = math.inf, 0

    def see(self, found: Solution) -> float:
        """The gap of these steps."""
        lower, upper = found.log_bracket(self.least)
        if len(upper) >= FEWEST:
            slope = 0.0 if self.mean is None else found.log_slope()
            self.spread, self.begun = 0.5 * float(_centred(upper, found, slope, self.mean).std()), len(upper)
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
            return self.gaps[now] * fall ** (min(now + left / k, MOST_STEPS) - now) + self.error(k)

        return min((count // 2**halving for halving in range(count.bit_length())), key=doubt)

    def error(self, count: int) -> float:
        """The standard error of the mean of so many, as ``standard_error`` has it."""
        return self.spread / math.sqrt(count) * math.sqrt((self.begun - 1) / (self.begun - 3))


def _centred(values: Tensor, found: Solution, slope: float, mean: float | None) -> Tensor:
    """Values of probes less what is known of their chance: ``mean`` is that of z^T A z over all probes."""
    return values if mean is None else values - slope * (found.forms - mean)


def standard_error(values: Tensor) -> float:
    """The standard deviation of Student's t-distribution of the mean: its spread is not known, but estimated from ``values``."""
    count = len(values)
    return float(values.std()) / math.sqrt(count) * math.sqrt((count - 1) / (count - 3))


class Whitened:
    """v -> B^T (H + D) B v, with B B^T = (t kron(G, A) + D)^-1 for every path: near to the identity.

    B is U (t lambda mu + delta)^-1/2 V^T in the eigenbasis of the factors. D becomes ``kept``, the diagonal delta / (t lambda mu +
    delta), so no eigenvalue is below its ``least``. Weights that the evidence leaves out stay zero.
    """

    def __init__(self, H: GaussNewton, laplace: Laplace, precision: Mapping[str, float]):
        self.H, self.laplace, self.scale = H, laplace, float(laplace.likelihood.scale().detach())
        self.names, self.left_out = [site.name for site in H.sites], laplace.left_out  # their part of a probe is zero
        self.parts: list[tuple[Tensor, Tensor, Tensor] | None] = []
        kept: list[Tensor] = []
        self.log_det = 0.0
        decomposed = laplace.curvature.eigenvectors({})
        for site in H.sites:
            if site.name in laplace.left_out:
                self.parts.append(None)
                kept.append(torch.ones(site.parameter.numel(), dtype=torch.float64, device=H.device))
                continue
            products, U, V = (t.to(H.device) for t in decomposed[site.name])
            ratio = STRENGTH * self.scale / precision[site.name] * products
            self.log_det += float(ratio.log1p().sum())
            self.parts.append((((1 + ratio) * precision[site.name]).rsqrt(), U, V))
            kept.append((1 / (1 + ratio)).flatten())
        self.kept = torch.cat(kept)
        self.least = float(self.kept.min()) * (1 - 1e-6)

    def __call__(self, v: Tensor) -> Tensor:
        return self.kept * v + self.scale * self.turned(self.H(self.turned(v, back=False)), back=True)

    @property
    def cheap_trace(self) -> bool:
        """Whether the mean of z^T A z costs little beside the products."""
        return self.laplace.samples * self.laplace.outputs * float(self.laplace.sizes.sum()) <= TRACE

    def trace(self, memory: float | None) -> float:
        """The mean of z^T A z over all probes: the sum of squares of R^T J B, and what is kept of D."""
        jacobians = Jacobians(self.H, self.laplace, memory, alone=False)
        total = torch.zeros((), dtype=torch.float64, device=self.H.device)
        with processes.agreeing():
            for paths in jacobians:
                rows = {path.name: path for path in paths}
                for name, part in zip(self.names, self.parts, strict=True):
                    if part is not None:
                        total += _squares(rows[name].double(), *part)
        jacobians.shown.finish(total)
        kept = zip(self.parts, self.kept.split(self.H.sizes), strict=True)
        return float(self.scale * total + sum(k.sum() for part, k in kept if part is not None))

    def turned(self, vectors: Tensor, back: bool) -> Tensor:
        """B v, or B^T v, for each row v."""
        found = []
        for part, piece in zip(self.parts, vectors.split(self.H.sizes, 1), strict=True):
            if part is None:
                found.append(torch.zeros_like(piece))
                continue
            d, U, V = part
            w = piece.view(len(piece), *d.shape)
            found.append(((U.mT @ w @ V) * d if back else U @ (w * d) @ V.mT).flatten(1))
        return torch.cat(found, 1)

    def probes(self, seed: int, begin: int, count: int) -> Tensor:
        """Random signs (count, weights). A path of the same name and size has the same ones in another network."""
        found = []
        for name, size in zip(self.names, self.H.sizes, strict=True):
            signs = []
            for number in range(begin, begin + count):
                generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {number} {name}".encode()))
                signs.append(2.0 * torch.randint(2, (size,), generator=generator) - 1)
            found.append(torch.stack(signs) * (name not in self.left_out))
        return torch.cat(found, 1).to(self.H.device, torch.float64)

    def gammas(self, z: Tensor, x: Tensor) -> Tensor:
        """The effective parameters (k, paths) by each probe, from x = A^-1 z: sum of 1 - kept z x over a path."""
        spent = (z.square() - self.kept * z * x).split(self.H.sizes, 1)
        return torch.stack([part.sum(1) for part in spent], 1)


def _squares(rows: Rows, d: Tensor, U: Tensor, V: Tensor) -> Tensor:
    """The sum of squares of U^T w V d over all rows w."""
    if rows.inputs is not None:  # w is an outer product
        g, a = (rows.gradients @ U).square(), (rows.inputs @ V).square()
        return ((g.unflatten(1, (a.shape[1], -1)).sum(2) @ d.square()) * a).sum()
    w = rows.gradients.view(-1, *d.shape)
    return ((U.mT @ w @ V) * d).square().sum()
