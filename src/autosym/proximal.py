"""Weight steps: the likelihood by gradients, the prior by its proximal map, in one metric."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from autosym.likelihoods import Likelihood
from autosym.priors import Prior


class Weights:
    """Proximal Adam or SGD, at unit likelihood scale (a small noise does not blow up the step).

    The likelihood's gradient g, averaged as m, moves the weights by lr m / M, where M is 1 for SGD and Adam's root of the second
    moment, kept above a hundredth of its mean over the path. The prior's proximal step is in the same metric,
    w <- w / (1 + lr delta / (N M)): it is stable at any precision and leaves g = - delta w / N, the MAP, fixed.

    With ``relative``, Adam's rate is in units of the initial size (root mean square) of each path's weights: a map with many inputs
    has small weights, and would otherwise run ahead of one with few. Weights that start at zero count as of the size
    that ``start_sizes`` gives them, and as of size 0.1 without one, as biases do.

    All paths move together, as one flat vector, and everything a step reads or writes is a tensor that stays where it is: a step
    can be captured in a CUDA graph. ``loss`` sums the loss until ``take_loss``.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        count: int,
        optimiser: str,
        momentum: float = 0.9,
        clip: float = math.inf,
        relative: bool = False,
        start_sizes: Mapping[str, float] | None = None,
    ):
        self.parameters, self.count = parameters, count
        self.optimiser, self.momentum, self.clip = optimiser, momentum, clip
        sizes = torch.tensor([p.numel() for p in parameters.values()])
        flat = _flat(parameters.values()).detach()
        self._first, self._second, self._delta = (torch.zeros_like(flat) for _ in range(3))
        self.first, self.second = self._by_name(self._first), self._by_name(self._second)
        self._sizes = sizes.to(flat)
        self._path = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32), sizes).to(flat.device)
        rms = torch.stack([p.detach().square().mean().sqrt() for p in parameters.values()])
        at_zero = rms.new_tensor([(start_sizes or {}).get(name) or 0.1 for name in parameters])
        self.rates = rms.where(rms > 0, at_zero) if relative and optimiser == "adam" else torch.ones_like(rms)
        self.loss, self.lr, self.steps = (torch.zeros((), dtype=torch.float64, device=flat.device) for _ in range(3))

    def set_prior(self, prior: Prior, likelihood: Likelihood) -> None:
        """Take the prior's precisions, relative to the likelihood's scale, for the steps that follow."""
        precision, weight = prior.precision(), float(likelihood.scale().detach()) * self.count
        with torch.no_grad():
            for (name, parameter), delta in zip(self.parameters.items(), self._by_name(self._delta).values(), strict=True):
                delta.fill_(precision[name] / weight).mul_(prior.scale_of(name, parameter))

    def step(self, model: nn.Module, likelihood: Likelihood, x: Tensor, y: Tensor) -> None:
        """One step on a batch, at the rate ``lr``."""
        loss = likelihood.loss(model(x), y)
        g = _flat(torch.autograd.grad(loss / len(x), list(self.parameters.values())))
        with torch.no_grad():
            if self.clip < math.inf:
                g = g * (self.clip / g.norm()).clamp_max(1)
            self.loss += loss
            self.steps += 1
            moved = self._move(_flat(self.parameters.values()), g)
            torch._foreach_copy_(list(self.parameters.values()), list(self._by_name(moved).values()))

    def take_loss(self) -> float:
        """The loss summed over all samples since it was last taken."""
        loss = float(self.loss)
        self.loss.zero_()
        return loss

    def _move(self, w: Tensor, g: Tensor) -> Tensor:
        beta, m, v = self.momentum, self._first, self._second
        m.lerp_(g, 1 - beta)
        lr = self.lr * self.rates.index_select(0, self._path)
        if self.optimiser == "sgd":
            rate = lr / (1 - beta)  # the rate of SGD with momentum, whose buffer is a sum and not a mean
            return (w - rate * m) / (1 + rate * self._delta)
        v.lerp_(g.square(), 0.001)
        metric = (v / (1 - 0.999**self.steps)).sqrt_()
        means = torch.stack(torch._foreach_norm(list(self._by_name(metric).values()), 1)) / self._sizes
        rate = lr / torch.maximum(metric, (0.01 * means + 1e-8).index_select(0, self._path))
        return (w - m * rate / (1 - beta**self.steps)) / (1 + self._delta * rate)

    def _by_name(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of the parts of a flat vector, in the shapes of the parameters."""
        parts = flat.split([p.numel() for p in self.parameters.values()])
        return {name: part.view(p.shape) for (name, p), part in zip(self.parameters.items(), parts, strict=True)}


def _flat(tensors) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])
