"""Weight steps: the likelihood by gradients, the prior by its proximal map, in one metric."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from autosym.bayes.likelihoods import Likelihood
from autosym.bayes.priors import Prior
from autosym.linear.frames import Frame
from autosym.runtime import processes
from autosym.training.fused_moves import fused

AWAY = (
    0.1  # at random weights ResNet-18 and its relaxed form are away by 0.02, F-FC+CONV, which chooses polyphase grids, by 0.16
)


class Weights:
    """Proximal Adam or SGD, at unit likelihood scale (a small noise does not blow up the step).

    The likelihood's gradient g, averaged as m, moves the weights by lr m / M, where M is 1 for SGD and Adam's root of the second
    moment, kept above a hundredth of its mean over the path. No path moves by more than lr (root mean square): where gradients grow
    faster than their second moment, Adam's steps would, and the run diverge. The prior's proximal step is in the same metric,
    w <- w / (1 + lr delta / (N M)): it is stable at any precision and leaves g = - delta w / N, the MAP, fixed.

    With ``sizes``, Adam's rate is in units of the initial size (root mean square) of each path's weights: a map with many inputs has
    small weights, and would otherwise run ahead of one with few. (Weights that start at zero, as biases do, count as of size 0.1.)

    Paths in ``frames`` move in other coordinates; m, M, the prior and the units of their rates are in these, too.

    All paths move together, as one flat vector, and everything a step reads or writes is a tensor that stays where it is: a step
    can be captured in a CUDA graph. ``loss`` sums the loss until ``take_loss``. With ``bf16`` the model computes in bfloat16, where torch's
    autocast does; weights, outputs, loss and everything here stay as they are.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        count: int,
        optimiser: str,
        momentum: float = 0.9,
        clip: float = math.inf,
        sizes: Mapping[str, float] | None = None,
        frames: Mapping[str, Frame] | None = None,
        bf16: bool = False,
    ):
        self.parameters, self.count, self.frames, self.bf16 = parameters, count, frames or {}, bf16
        self.optimiser, self.momentum, self.clip = optimiser, momentum, clip
        counts = torch.tensor([p.numel() for p in parameters.values()])
        flat = _flat(parameters.values()).detach()
        self._first, self._second, self._delta = (torch.zeros_like(flat) for _ in range(3))
        self.first, self.second = self._by_name(self._first), self._by_name(self._second)
        self._counts = counts.to(flat)
        self._path = torch.repeat_interleave(torch.arange(len(counts), dtype=torch.int32), counts).to(flat.device)
        self._fused = fused(counts, flat, momentum) if optimiser == "adam" else None
        units = {name: size or 0.1 for name, size in sizes.items()} if sizes and optimiser == "adam" else {}
        for name, frame in self.frames.items():
            units[name] = frame.to(flat).unit(parameters[name].detach().to(flat), units.get(name, 0.1))
        self.rates = flat.new_tensor([units.get(name, 1.0) for name in parameters])
        self.loss, self.lr, self.steps = (torch.zeros((), dtype=torch.float64, device=flat.device) for _ in range(3))

    def set_prior(self, prior: Prior, likelihood: Likelihood) -> None:
        """Take the prior's precisions, relative to the likelihood's scale, for the steps that follow."""
        precision, weight = prior.precision(), float(likelihood.scale().detach()) * self.count
        with torch.no_grad():
            for (name, parameter), delta in zip(self.parameters.items(), self._by_name(self._delta).values(), strict=True):
                delta.fill_(precision[name] / weight).mul_(prior.scale_of(name, parameter))
            self._change(self._delta, Frame.precision)

    def step(self, model: nn.Module, likelihood: Likelihood, x: Tensor, y: Tensor) -> None:
        """One step on a batch, at the rate ``lr``."""
        loss, g = self._gradient(model, likelihood, x, y)
        with torch.no_grad():
            if self.clip < math.inf:
                g = g * (self.clip / g.norm()).clamp_max(1)
            self.loss += loss
            self.steps += 1
            w = _flat(self.parameters.values())
            moved = self._framed_move(w, g) if self.frames else self._move(w, g)
            torch._foreach_copy_(list(self.parameters.values()), list(self._by_name(moved).values()))

    def _gradient(self, model: nn.Module, likelihood: Likelihood, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The loss, summed over a batch, and the gradient of its mean. The batch is the parts of all processes together."""
        if processes.count() == 1:
            loss = likelihood.loss(self._outputs(model, x), y)
            return loss.detach(), _flat(torch.autograd.grad(loss / len(x), list(self.parameters.values())))
        sums = self._first.new_zeros(len(self._first) + 3)
        if len(x):
            loss = likelihood.loss(self._outputs(model, x), y).to(sums.dtype)
            gradient = torch.autograd.grad(loss, list(self.parameters.values()))
            sums = _flat([*gradient, loss.detach(), loss.new_tensor([len(x), 0])])
        processes.add(sums)
        return sums[-3], sums[:-3] / sums[-2]

    def _outputs(self, model: nn.Module, x: Tensor) -> Tensor:
        if not self.bf16:
            return model(x)
        with torch.autocast(x.device.type, torch.bfloat16, cache_enabled=False):  # recorded graphs cannot have the cache
            return model(x).to(x.dtype)

    def check_bf16(self, model: nn.Module, likelihood: Likelihood, x: Tensor, y: Tensor) -> None:
        """Refuse bfloat16 where the gradient of a batch is another one: |g_bf16 - g| > ``AWAY`` |g|."""
        if x.dtype != torch.float32:
            raise ValueError(f"bf16 is for models in float32, and this one takes {x.dtype}: fit without bf16")
        _, rounded = self._gradient(model, likelihood, x, y)
        self.bf16 = False
        _, exact = self._gradient(model, likelihood, x, y)
        self.bf16 = True
        away = float((rounded - exact).norm() / exact.norm().clamp_min(torch.finfo(exact.dtype).tiny))
        if not away <= AWAY:
            raise ValueError(
                f"in bfloat16 the gradient of the first batch is away from that in float32 by {away:.0%} of its norm (at most {AWAY:.0%}): "
                "it would change what is learned; fit without bf16"
            )

    def take_loss(self) -> float:
        """The loss of all samples since the last call. All processes call it, at the end of an epoch."""
        if processes.count() > 1:
            sums = self._first.new_zeros(len(self._first) + 3)
            sums[-1] = 1
            processes.add(sums)  # has the shape of a step's sums: a process that still takes a step meets this one
            behind = processes.count() - int(sums[-1])
            if behind:
                raise ValueError(
                    f"process {processes.rank()} has finished its epoch, but {behind} others have a batch left: give all processes "
                    "the same number of batches (the same data, or a loader with a DistributedSampler)"
                )
        loss = float(self.loss)
        self.loss.zero_()
        return loss

    def _move(self, w: Tensor, g: Tensor) -> Tensor:
        beta, m, v = self.momentum, self._first, self._second
        if self._fused is not None:
            return self._fused(w, g, m, v, self._delta, self.lr, self.rates, self.steps)
        m.lerp_(g, 1 - beta)
        lr = (self.lr * self.rates).index_select(0, self._path)
        if self.optimiser == "sgd":
            rate = lr / (1 - beta)  # the rate of SGD with momentum, whose buffer is a sum and not a mean
            return (w - rate * m) / (1 + rate * self._delta)
        v.lerp_(g.square(), 0.001)
        metric = (v / (1 - 0.999**self.steps)).sqrt_()
        means = torch.stack(torch._foreach_norm(list(self._by_name(metric).values()), 1)) / self._counts
        metric = torch.maximum(metric, (0.01 * means + 1e-8).index_select(0, self._path))
        rate, unbiased = lr / metric, 1 - beta**self.steps
        sizes = torch.stack(torch._foreach_norm(list(self._by_name(m / metric).values()), 2)) / (self._counts.sqrt() * unbiased)
        bound = torch.where(sizes > 1 + 1e-5, sizes, 1.0).index_select(
            0, self._path
        )  # the first steps are 1 long, but for rounding
        return (w - m * rate / unbiased / bound) / (1 + self._delta * rate)

    def _framed_move(self, w: Tensor, g: Tensor) -> Tensor:
        """Moves in the frames' coordinates. Only the step is mapped back: mapping the weights would round them every time."""
        v = self._change(w.clone(), Frame.coordinates)
        return w + self._change(self._move(v, self._change(g, Frame.slope)) - v, Frame.values)

    def _change(self, flat: Tensor, change: Callable[[Frame, Tensor], Tensor]) -> Tensor:
        """Apply ``change`` to the parts that have a frame, in place."""
        parts = self._by_name(flat) if self.frames else {}
        for name, frame in self.frames.items():
            parts[name].copy_(change(frame, parts[name]))
        return flat

    def _by_name(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of the parts of a flat vector, in the shapes of the parameters."""
        parts = flat.split([p.numel() for p in self.parameters.values()])
        return {name: part.view(p.shape) for (name, p), part in zip(self.parameters.items(), parts, strict=True)}


def _flat(tensors) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])
