"""Variational evidence of a network's last layer, with a full covariance for every output (Learning Invariant Weights, Eq. 10).

    f(x) = W phi(x),      q(W) = prod_c N(w_c | mu_c, L_c L_c^T),      p(W) = N(0, I / delta)
    ELBO = sum_n E_q log p(y_n | f(x_n)) - KL(q | p)  <=  log p(D)

phi is everything before the last layer: random Fourier features, or a hidden layer that is a point estimate inside of the bound. Under q
the outputs of a sample are independent Gaussians with mean mu_c . phi and variance |L_c^T phi|^2, so noise is drawn for outputs and not
for weights: the same expectation with less noise. For Gaussian noise it is in closed form, and nothing is drawn at all. Where phi averages
over transformations (``averaging``) their widths are learned with all else, by the bound.

q takes natural-gradient steps (``Natural``), for which hundreds do what takes Adam many thousands; all else takes steps by Adam.
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
from autosym.papers.features import RandomFeatures as RandomFeatures
from autosym.papers.features import ReluFeatures as ReluFeatures
from autosym.runtime.batching import Data, Stream, batches, check_loader, check_repeatable, size_of, to_model
from autosym.runtime.graphs import Adam, Captured

DRAWS = 8  # of noise for each sample, at no cost beside that of its features
FIRST = 10  # steps in which H is gathered before anything moves,
REFRESH = 0.2  # part of H that is new at a factorisation, at which
TRUST = 0.2  # log delta moves by no more
POLISH = 20  # passes at the end,
KEPT = 2**28  # numbers for features that are computed once for all of them
SETTLED = 2.0  # epochs before widths move beside weights: at a q that is still wild their slope leads astray
PARTS = (1 / 64, 1 / 8, 1.0)  # of a step, of which the longest that gains is taken
TINY = 1e-20  # a variance below has no slope: of features that are all zero the root would have an infinite one


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
    return _expected(*head.moments(phi), targets, likelihood, noise)[0]


def _expected(
    mean: Tensor, variance: Tensor, targets: Tensor, likelihood: Likelihood, noise: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """sum_n E_q log p(y_n | f_n), E_q of minus its second derivative in each output (B, D), and E_q of the statistic."""
    found = likelihood.expected(mean, variance, targets)
    if found is None:
        if noise is None:
            raise ValueError(
                f"the expectation of a {likelihood.name} likelihood is not in closed form: give noise (K, B, outputs)"
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
    """The ELBO of all of ``data``, a lower bound of the log evidence; ``draws`` of noise for each sample where it is needed."""
    likelihood = likelihoods.of(likelihood)
    generator, total, samples = torch.Generator().manual_seed(seed), torch.zeros((), dtype=torch.float64), 0
    with torch.no_grad():
        for x, y in batches(data, 500):
            x, y = to_model(x, y, head, "the data")
            noise = torch.randn(draws, len(x), len(head.mean), generator=generator).to(x)
            total += expected_log_likelihood(head, features(x), y, likelihood, noise).double().cpu()
            samples += len(x)
        kl = head.kl().double().cpu()
        squares = (head.root().square().sum() + head.mean.square().sum()).double().cpu()
        size, log_precision = head.mean.numel(), head.log_precision.double().cpu()
        log_prior = 0.5 * (size * (log_precision - math.log(2 * math.pi)) - log_precision.exp() * squares)
        return Evidence(total, log_prior, kl + log_prior, samples, "the log evidence")


@dataclass(frozen=True)
class Fitted:
    """Features and last layer after training, the history of the run, and the bound at the end; a point estimate has none."""

    features: nn.Module
    head: LastLayer
    likelihood: Likelihood
    history: list[dict[str, Any]]
    evidence: Evidence | None

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """The mean of the outputs."""
        return self.head(self.features(x.to(self.head.mean)))


class Natural:
    """Natural-gradient steps of q: the same bound as by Adam, in far fewer steps.

        H_c  <- (1 - r) H_c + r N/B sum_b h_bc phi_b phi_b^T                   Sigma_c = (H_c + delta I)^-1
        mu_c <- mu_c + r Sigma_c (N/B sum_b g_bc phi_b - delta mu_c)           delta <- (D M - delta tr Sigma) / |mu|^2

    g and h are the slope and minus the curvature of E_q log p(y | f) in the mean of an output: expectations of those of log p itself
    (Bonnet, Price), so that h is never negative. ``rate`` is the r of means, ``memory`` that of H. ``gather`` and ``move`` work in place,
    and may be recorded as a CUDA graph; ``refresh``, which factorises, is called between them.
    """

    def __init__(self, head: LastLayer, likelihood: Likelihood, count: int):
        self.head, self.data = head, torch.zeros_like(head.lower)
        self.likelihood, self.count = likelihood, count
        self.rate, self.memory, self.squares = (head.mean.new_zeros(()) for _ in range(3))

    @torch.no_grad()
    def gather(self, curvature: Tensor, squares: Tensor) -> None:
        """H towards the ``curvature`` (D, M, M) of all samples; and E_q of the statistic, the squares |y - f|^2 of Gaussian noise."""
        self.data.lerp_(curvature, self.memory)
        self.squares.lerp_(squares.to(self.squares), self.memory)

    @torch.no_grad()
    def move(self, slope: Tensor, curvature: Tensor, fit: Callable[[Tensor], Tensor] | None = None) -> None:
        """A step of means by the ``slope`` (D, M) of the log-likelihood of all samples, no further than it gains by.

        H lags behind features that are trained: where they begin to vary it has nothing yet, and where samples become certain the
        ``curvature`` (D, M, M) itself vanishes. A whole step would throw q far off, so it ends at the optimum of the quadratic
        along it, at the most, and at an eighth of that or a 64th if ``fit``, the log-likelihood at other means, falls.
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
        """Sigma and delta anew, in float64. Factorised from behind, the root of Sigma is a lower triangle."""
        head, eye = self.head, torch.eye(self.data.shape[1], dtype=torch.float64, device=self.data.device)
        prior = head.log_precision.double().exp() * eye
        for c, own in enumerate(self.data):  # one by one: GPU libraries are slow with a few large ones in a batch
            factor, failed = torch.linalg.cholesky_ex((own.double() + prior).flip(0, 1))
            root = torch.linalg.solve_triangular(factor, eye, upper=False).T.flip(0, 1)
            head.lower[c], head.log_diagonal[c] = root, torch.where(failed > 0, math.nan, root.diagonal()).log()
        size, squares = head.mean.numel(), head.mean.double().square().sum()
        determined = size - head.log_precision.double().exp() * head.root().double().square().sum()
        wanted = (determined.clamp_min(1e-3 * size) / squares.clamp_min(1e-30)).log()
        head.log_precision.add_((wanted - head.log_precision).clamp(-TRUST, TRUST))
        grown = self.likelihood.update(self.squares, self.count * len(head.mean), trust=TRUST)
        self.data.mul_(grown)  # H is in units of the noise


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
    """The ELBO by natural gradients of q, and by Adam of what is trainable in ``features`` and of widths.

    Rates fall as a cosine; that of weights is sin^2(pi t^2) at a part t of the run, largest at 0.7. They are a point estimate, free of
    charge: once they fit the data alone, the bound asks for no more invariance. So widths are learned first, at features as they start.
    ``features`` gives (B, M); draws of transformations are new at every step. ``lr`` and ``range_lr`` are Adam's rates: of weights at every
    step, of widths twice in an epoch, by the slope since q has followed the last one (at a q of other widths the slope leads back to
    those). ``rate`` is that of q, which follows over 1 / ``rate`` epochs, and takes some passes over all data to its optimum at the end.
    ``point_estimate`` leaves out the variance of q and the KL: the training loss alone, by Adam (Fig. 5). On a GPU steps are recorded as
    CUDA graphs, unless ``capture`` is False, and with ``tensor_cores`` features are products in TF32 until the passes at the end.
    """
    check_repeatable(data)
    check_loader(data)
    refuse_batch_dependence(features)
    likelihood = copy.deepcopy(likelihoods.of(likelihood))
    parts = list(symmetrised.transformations(features).values())
    head = _head(features, next(batches(data, 2))[0], outputs, precision)
    device = head.mean.device
    stream = Stream(data, batch_size, head, lambda y: likelihood.check(outputs, y), seed)
    count = size_of(data) or sum(len(x) for x, _ in batches(data, batch_size))
    weights = [p for p in features.parameters() if p.requires_grad]
    widths = [part.raw for part in parts if part.learn]
    learned = list(likelihood.hyperparameters().values())
    for tensor in learned:
        tensor.data = tensor.data.to(device)
    natural = None if point_estimate else Natural(head, likelihood, count)
    adam, ranges = Adam(weights + ([head.mean, *learned] if point_estimate else [])), Adam(widths)
    steps = _Steps(features, head, likelihood, count, adam, ranges, natural, tensor_cores and device.type == "cuda")
    step, generator = Captured(steps, capture), torch.Generator(device).manual_seed(seed)
    done, position, new, lines = 0, 0.0, REFRESH, list[dict[str, Any]]()
    with asking(widths):
        for epoch in range(1, epochs + 1):
            for x, y in stream.epoch(epoch):
                for place, part in enumerate(parts):
                    part.redraw((seed * 1_000_003 + done) * 1_003 + place)
                gathered = done >= FIRST or position >= epochs / 4
                past = min(position / epochs, 1.0)
                falling = 0.5 * (1 + math.cos(math.pi * past)) if gathered else 0.0
                late = falling if point_estimate else gathered * math.sin(math.pi * past**2) ** 2
                quick = max(falling, late) if weights else falling  # q follows as long as weights move
                followed = quick * min(rate * len(x) / count, 0.2)  # more would throw q about by single samples
                steps.set_rates(lr * late, range_lr * falling, followed, 1 / (done + 1))
                step(x, y, torch.randn(DRAWS, len(x), outputs, generator=generator, device=device, dtype=head.mean.dtype))
                done += 1
                new += followed
                if natural is not None and gathered and new >= REFRESH:
                    natural.refresh()
                    new = 0.0
                before, position = position, epoch - 1 + (stream.shown + len(x)) / count
                settled = gathered and (point_estimate or not weights or before >= min(SETTLED, epochs / 4))
                if settled and int(2 * position) > int(2 * before):  # every half of an epoch,
                    steps.move_widths()
                elif int(4 * position) > int(4 * before):  # by the slope of its second half
                    steps.forget_slope()
            bound = steps.take_bound()
            if not math.isfinite(bound):
                raise ValueError(f"the bound is {bound} in epoch {epoch}: lower lr (now {lr}), or rescale the inputs")
            found = {f"{name} ({r.unit})": r.value for name, r in symmetrised.ranges(features).items()}
            lines.append({"epoch": epoch, "bound": bound, "ranges": found})
            if log is not None:
                log(lines[-1])
    for part in parts:
        part.settle()
    if natural is not None:
        steps.polish(natural, stream, generator)
    evidence = None if natural is None else at(features, head, stream.data, likelihood, seed=seed)
    return Fitted(features, head, likelihood, lines, evidence)


class _Steps:
    """One step of all that is learned, on a batch: natural gradients of q, where it is one, and Adam for the rest."""

    def __init__(
        self,
        features: nn.Module,
        head: LastLayer,
        likelihood: Likelihood,
        count: int,
        weights: Adam,
        widths: Adam,
        natural: Natural | None,
        fast: bool,
    ):
        self.features, self.head, self.likelihood, self.count, self.fast = features, head, likelihood, count, fast
        self.weights, self.widths, self.natural = weights, widths, natural
        self.slope = [torch.zeros_like(raw) for raw in widths.parameters]
        self.sum = torch.zeros((), dtype=torch.float64, device=head.mean.device)

    def set_rates(self, lr: float, range_lr: float, rate: float, least: float) -> None:
        """Of the steps that follow; H forgets no slower than by ``least``."""
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
            moved = lambda mean: weight * _expected(phi @ mean.T, variance, y, self.likelihood, noise)[0]  # noqa: E731
            self.natural.move(weight * slope, weight * curvature, moved)
        gradients = [-g / len(x) for g in gradients]
        number = len(self.weights.parameters)
        self.weights.step(gradients[:number])
        for sum_, g in zip(self.slope, gradients[number:], strict=True):
            sum_.add_(g)
        self.sum.add_(fit.detach())

    def forget_slope(self) -> None:
        """Of widths, so far."""
        for sum_ in self.slope:
            sum_.zero_()

    def move_widths(self) -> None:
        """A step of the widths by their slope, which starts anew."""
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
            fit, curvature, squares = _expected(mean + shift, variance, y, self.likelihood, noise)
        with fast_products(self.fast):
            slope, *gradients = torch.autograd.grad(fit, [shift, *learned])
        phi = phi.detach()
        weighted = curvature.detach().T[:, :, None].sqrt() * phi
        return fit, slope.T @ phi, weighted.mT @ weighted, squares.detach().to(mean.dtype), variance.detach(), gradients

    def take_bound(self) -> float:
        """The bound over an epoch, as it was while q moved; of a point estimate the log-likelihood."""
        with torch.no_grad():
            found = float(self.sum) - (0.0 if self.natural is None else float(self.head.kl()))
        self.sum.zero_()
        return found

    @torch.no_grad()
    def polish(self, natural: Natural, stream: Stream, generator: torch.Generator) -> None:
        """q towards its optimum for features that no longer change: steps on all data, ever shorter, which averages out their noise."""

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
    """A last layer as wide as the features, where they are."""
    like = next((t for t in (*features.parameters(), *features.buffers()) if t.is_floating_point()), torch.zeros(()))
    with torch.no_grad():
        phi = features(example.to(like))
    if phi.dim() != 2:
        raise ValueError(f"features must be (B, M), one row for each sample, got {tuple(phi.shape)}: flatten them")
    return LastLayer(phi.shape[1], outputs, precision).to(phi)
