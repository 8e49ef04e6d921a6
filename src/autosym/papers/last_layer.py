"""Learning a network's last layer by its variational evidence (Learning Invariant Weights, Eq. 10).

phi is everything before the last layer: random Fourier features, or a hidden layer whose weights are a point estimate inside the bound.
If phi averages over transformations (``nn.symmetrised``), the bound learns their widths too.

q takes natural-gradient steps (``Natural``): hundreds of them do what takes Adam many thousands. Everything else takes steps by Adam.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autosym.bayes import likelihoods
from autosym.bayes.likelihoods import Likelihood
from autosym.curvature.verification import refuse_batch_dependence
from autosym.evidence.gradient import asking
from autosym.evidence.record import Evidence
from autosym.linear.products import fast_products
from autosym.nn import symmetrised
from autosym.papers.bound import LastLayer as LastLayer
from autosym.papers.bound import Natural as Natural
from autosym.papers.bound import at as at
from autosym.papers.bound import expected
from autosym.papers.bound import expected_log_likelihood as expected_log_likelihood
from autosym.papers.features import RandomFeatures as RandomFeatures
from autosym.papers.features import ReluFeatures as ReluFeatures
from autosym.runtime.batching import Data, Stream, batches, check_loader, check_repeatable, size_of, to_model
from autosym.runtime.graphs import Adam, Captured

DRAWS = 8  # of noise for each sample; they cost next to nothing compared with its features
FIRST = 10  # steps that only gather H, before anything moves
REFRESH = 0.2  # H is factorised again once this part of it is new
POLISH = 20  # passes over all data at the end
KEPT = 2**28  # features of at most this many numbers are computed once for all these passes
SETTLED = 2.0  # epochs before widths move, if weights are trained too: while q is far off, the slope of widths misleads


@dataclass(frozen=True)
class Fitted:
    """Features and last layer after training, the history of the run, and the bound at the end (None for a point estimate)."""

    features: nn.Module
    head: LastLayer
    likelihood: Likelihood
    history: list[dict[str, Any]]
    evidence: Evidence | None

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
    rate: float = 1.0,
    precision: float = 1.0,
    point_estimate: bool = False,
    capture: bool = True,
    tensor_cores: bool = True,
    seed: int = 0,
    log: Callable[[dict[str, Any]], None] | None = None,
) -> Fitted:
    """Maximise the ELBO: natural gradients for q, Adam for widths and for the trainable weights of ``features``.

    ``features`` gives ``(B, M)``; draws of transformations are new at every step.

    Rates fall as a cosine, except the rate of weights: sin^2(pi t^2) at a part t of the run, largest at t = 0.7. Weights are a point
    estimate, so the bound does not charge for them: once they fit the data alone, it asks for no more invariance. Widths are therefore
    learned first, while features are still near their start.

    ``lr`` is Adam's rate for weights, which move at every step. ``range_lr`` is Adam's rate for widths, which move twice an epoch. Their
    slope is gathered only after q has followed the last move: if q still fits the old widths, the slope leads back to them.
    ``rate`` is the rate of q, which follows over 1 / ``rate`` epochs. Some passes over all data take q to its optimum at the end.

    ``point_estimate`` leaves out the variance of q and the KL: Adam on the training loss alone (Fig. 5). On a GPU steps are recorded as
    CUDA graphs, unless ``capture`` is False. With ``tensor_cores``, products in features are in TF32 until the passes at the end.
    """
    check_repeatable(data)
    check_loader(data)
    refuse_batch_dependence(features)
    likelihood = copy.deepcopy(likelihoods.of(likelihood))
    head = _head(features, next(batches(data, 2))[0], outputs, precision)
    stream = Stream(data, batch_size, head, lambda y: likelihood.check(outputs, y), seed)
    count = size_of(data) or sum(len(x) for x, _ in batches(data, batch_size))
    steps = _Steps(features, head, likelihood, count, point_estimate, tensor_cores and head.mean.is_cuda)
    course = _Course(steps, Captured(steps, capture), epochs, (lr, range_lr, rate), seed)
    lines: list[dict[str, Any]] = []
    with asking(steps.widths.parameters):
        for epoch in range(1, epochs + 1):
            for x, y in stream.epoch(epoch):
                course.take(x, y, epoch - 1 + (stream.shown + len(x)) / count)
            lines.append(course.line(epoch))
            if log is not None:
                log(lines[-1])
    for part in course.parts:
        part.settle()
    if steps.natural is None:
        return Fitted(features, head, likelihood, lines, None)
    steps.polish(steps.natural, stream, course.generator)
    return Fitted(features, head, likelihood, lines, at(features, head, stream.data, likelihood, seed=seed))


class _Course:
    """The ``position`` of a run (in epochs), and what depends on it: rates, new draws, and when to refresh q and move widths.

    ``rates`` are the largest rates: of weights, of widths, and of q.
    """

    def __init__(self, steps: "_Steps", step: Captured, epochs: int, rates: tuple[float, float, float], seed: int):
        self.steps, self.step, self.epochs, self.rates, self.seed = steps, step, epochs, rates, seed
        self.generator = torch.Generator(steps.head.mean.device).manual_seed(seed)
        self.parts = list(symmetrised.transformations(steps.features).values())
        self.done, self.position, self.new = 0, 0.0, REFRESH

    def take(self, x: Tensor, y: Tensor, end: float) -> None:
        """A step on a batch, then whatever is due after it; ``end`` is the position of the run after the batch."""
        for place, part in enumerate(self.parts):
            part.redraw((self.seed * 1_000_003 + self.done) * 1_003 + place)
        gathered = self.done >= FIRST or self.position >= self.epochs / 4
        followed = self._set_rates(len(x), gathered)
        mean, natural = self.steps.head.mean, self.steps.natural
        size = (DRAWS, len(x), len(mean))
        self.step(x, y, torch.randn(size, generator=self.generator, device=mean.device, dtype=mean.dtype))
        self.done += 1
        self.new += followed
        if natural is not None and gathered and self.new >= REFRESH:
            natural.refresh()
            self.new = 0.0
        before, self.position = self.position, end
        settled = gathered and (natural is None or not self.steps.trained or before >= min(SETTLED, self.epochs / 4))
        if settled and int(2 * end) > int(2 * before):  # every half epoch, widths move
            self.steps.move_widths()
        elif int(4 * end) > int(4 * before):  # by the slope of the second half of that time
            self.steps.forget_slope()

    def line(self, epoch: int) -> dict[str, Any]:
        """The line of the history for an epoch."""
        bound = self.steps.take_bound()
        if not math.isfinite(bound):
            raise ValueError(f"the bound is {bound} in epoch {epoch}: lower lr (now {self.rates[0]}), or rescale the inputs")
        ranges = {f"{name} ({r.unit})": r.value for name, r in symmetrised.ranges(self.steps.features).items()}
        return {"epoch": epoch, "bound": bound, "ranges": ranges}

    def _set_rates(self, samples: int, gathered: bool) -> float:
        """Set the rates of a step on so many samples; returns the rate of q."""
        lr, range_lr, rate = self.rates
        past = min(self.position / self.epochs, 1.0)
        falling = 0.5 * (1 + math.cos(math.pi * past)) if gathered else 0.0
        late = falling if self.steps.natural is None else gathered * math.sin(math.pi * past**2) ** 2
        quick = max(falling, late) if self.steps.trained else falling  # q follows as long as weights move
        followed = quick * min(rate * samples / self.steps.count, 0.2)  # at larger rates single samples would throw q about
        self.steps.set_rates(lr * late, range_lr * falling, followed, 1 / (self.done + 1))
        return followed


class _Steps:
    """One step on a batch of everything learned: natural gradients for q (none for a point estimate), Adam for the rest."""

    def __init__(
        self, features: nn.Module, head: LastLayer, likelihood: Likelihood, count: int, point_estimate: bool, fast: bool
    ):
        self.features, self.head, self.likelihood, self.count, self.fast = features, head, likelihood, count, fast
        learned = list(likelihood.hyperparameters().values())
        for tensor in learned:
            tensor.data = tensor.data.to(head.mean.device)
        self.natural = None if point_estimate else Natural(head, likelihood, count)
        self.trained = [p for p in features.parameters() if p.requires_grad]  # beside q
        self.weights = Adam(self.trained + ([head.mean, *learned] if point_estimate else []))
        self.widths = Adam([part.raw for part in symmetrised.transformations(features).values() if part.learn])
        self.slope = [torch.zeros_like(raw) for raw in self.widths.parameters]
        self.sum = torch.zeros((), dtype=torch.float64, device=head.mean.device)

    def set_rates(self, lr: float, range_lr: float, rate: float, least: float) -> None:
        """Set the rates of the next steps; H forgets at a rate of at least ``least``."""
        self.weights.rate.fill_(lr)
        self.widths.rate.fill_(range_lr)
        if self.natural is not None:
            self.natural.rate.fill_(rate)
            self.natural.memory.fill_(max(rate, least))

    def __call__(self, x: Tensor, y: Tensor, noise: Tensor) -> None:
        learned = [*self.weights.parameters, *self.widths.parameters]
        with fast_products(self.fast):
            phi = self.features(x)
        if self.natural is None:
            fit = self.likelihood.log_likelihood(self.likelihood.statistic(self.head(phi), y), len(x) * len(self.head.mean))
            gradients: Sequence[Tensor] = torch.autograd.grad(fit, learned)
        else:
            fit, slope, curvature, squares, variance, gradients = self._slopes(phi, y, noise, learned)
            weight, phi = self.count / len(x), phi.detach()
            self.natural.gather(weight * curvature, weight * squares)
            moved = lambda mean: weight * expected(phi @ mean.T, variance, y, self.likelihood, noise)[0]  # noqa: E731
            self.natural.move(weight * slope, weight * curvature, moved)
        gradients = [-g / len(x) for g in gradients]
        number = len(self.weights.parameters)
        self.weights.step(gradients[:number])
        for sum_, g in zip(self.slope, gradients[number:], strict=True):
            sum_.add_(g)
        self.sum.add_(fit.detach())

    def forget_slope(self) -> None:
        """Drop the slope of widths gathered so far."""
        for sum_ in self.slope:
            sum_.zero_()

    def move_widths(self) -> None:
        """Move the widths by their slope, then gather it anew."""
        self.widths.step(self.slope, 0.3, 0.2)  # a few steps of a slope with little noise, which falls as widths grow
        self.forget_slope()
        for part in symmetrised.transformations(self.features).values():
            part.limit()

    def _slopes(
        self, phi: Tensor, y: Tensor, noise: Tensor, learned: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Sequence[Tensor]]:
        """E_q log p(y | f) of a batch; sum g phi (D, M) and sum h phi phi^T (D, M, M); E_q |y - f|^2; variances (B, D); gradients."""
        mean, variance = self.head.moments(phi)
        shift = torch.zeros_like(mean).requires_grad_()
        with torch.enable_grad():
            fit, curvature, squares = expected(mean + shift, variance, y, self.likelihood, noise)
        with fast_products(self.fast):
            slope, *gradients = torch.autograd.grad(fit, [shift, *learned])
        phi = phi.detach()
        weighted = curvature.detach().T[:, :, None].sqrt() * phi
        return fit, slope.T @ phi, weighted.mT @ weighted, squares.detach().to(mean.dtype), variance.detach(), gradients

    def take_bound(self) -> float:
        """The bound over an epoch, measured while q moved; for a point estimate, the log-likelihood."""
        with torch.no_grad():
            found = float(self.sum) - (0.0 if self.natural is None else float(self.head.kl()))
        self.sum.zero_()
        return found

    @torch.no_grad()
    def polish(self, natural: Natural, stream: Stream, generator: torch.Generator) -> None:
        """Move q to its optimum for features that no longer change: ever shorter steps on all data, which average out the noise."""

        def pairs() -> Iterator[tuple[Tensor, Tensor]]:
            for x, y in batches(stream.data, 1000):
                x, y = to_model(x, y, self.head, "the data")
                yield self.features(x), y

        kept = list(pairs()) if stream.resident is not None and self.count * self.head.mean.shape[1] <= KEPT else None
        for number in range(POLISH):
            slope, curvature, squares = (torch.zeros_like(t) for t in (self.head.mean, natural.data, natural.squares))
            for phi, y in kept or pairs():
                noise = phi.new_empty(DRAWS, len(phi), len(self.head.mean)).normal_(generator=generator)
                _, own, square, error, *_ = self._slopes(phi, y, noise, ())
                slope += own
                curvature += square
                squares += error.to(squares)
            natural.rate.fill_(1 / (number + 2))
            natural.memory.fill_(1 / (number + 2))
            natural.gather(curvature, squares)
            natural.refresh()
            natural.move(slope, curvature)
        natural.refresh()


def _head(features: nn.Module, example: Tensor, outputs: int, precision: float) -> LastLayer:
    """A last layer as wide as the features, on their device and in their precision."""
    like = next((t for t in (*features.parameters(), *features.buffers()) if t.is_floating_point()), torch.zeros(()))
    with torch.no_grad():
        phi = features(example.to(like))
    if phi.dim() != 2:
        raise ValueError(f"features must be (B, M), one row for each sample, got {tuple(phi.shape)}: flatten them")
    return LastLayer(phi.shape[1], outputs, precision).to(phi)
