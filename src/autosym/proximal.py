"""Weight steps: the likelihood by gradients, the prior by its proximal map, in one metric."""

import math

import torch
from torch import Tensor, nn

from autosym.likelihoods import Likelihood
from autosym.priors import Prior


class Weights:
    """Proximal Adam or SGD, at unit likelihood scale (a small noise does not blow up the step).

    The likelihood's gradient g, averaged as m, moves the weights by lr m / M, where M is 1 for SGD and Adam's root of the second
    moment, kept above a hundredth of its mean over the path. The prior's proximal step is in the same metric,
    w <- w / (1 + lr delta / (N M)): it is stable at any precision and leaves g = - delta w / N, the MAP, fixed.
    """

    def __init__(
        self, parameters: dict[str, nn.Parameter], count: int, optimiser: str, momentum: float = 0.9, clip: float = math.inf
    ):
        self.parameters, self.count = parameters, count
        self.optimiser, self.momentum, self.clip = optimiser, momentum, clip
        self.first = {name: torch.zeros_like(p) for name, p in parameters.items()}
        self.second = {name: torch.zeros_like(p) for name, p in parameters.items()}
        self.steps = 0

    def step(self, model: nn.Module, likelihood: Likelihood, prior: Prior, x: Tensor, y: Tensor, lr: float) -> float:
        """One step on a batch; returns the loss summed over it."""
        outputs = model(x)
        likelihood.check(outputs, y)
        loss = likelihood.loss(outputs, y)
        gradients = torch.autograd.grad(loss / len(x), list(self.parameters.values()))
        if self.clip < math.inf:
            norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
            gradients = tuple(g * (self.clip / norm).clamp_max(1) for g in gradients)
        precision, weight = prior.precision(), float(likelihood.scale().detach()) * self.count
        self.steps += 1
        with torch.no_grad():
            for (name, w), g in zip(self.parameters.items(), gradients, strict=True):
                self._move(name, w, g, prior.scale_of(name, w) * (precision[name] / weight), lr)
        return float(loss.detach())

    def _move(self, name: str, w: Tensor, g: Tensor, delta: Tensor | float, lr: float) -> None:
        beta, m, v = self.momentum, self.first[name], self.second[name]
        m.lerp_(g, 1 - beta)
        if self.optimiser == "sgd":
            lr = lr / (1 - beta)  # the rate of SGD with momentum, whose buffer is a sum and not a mean
            w.sub_(m, alpha=lr).div_(1 + lr * delta)
            return
        v.lerp_(g.square(), 0.001)
        metric = (v / (1 - 0.999**self.steps)).sqrt_()
        metric = metric.clamp_min_(0.01 * float(metric.mean()) + 1e-8).reciprocal_().mul_(lr)
        w.sub_(m * metric / (1 - beta**self.steps)).div_(1 + delta * metric)
