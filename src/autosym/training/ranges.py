"""The ranges of a model's transformations, learned by gradient ascent on the evidence while ``fit`` learns the weights.

raw <- raw + Adam(d log p(D) / d raw)          one step at every evidence step, with draws of its own

The slope is a derivative, or a difference where the network has kinks (ReLU): ``evidence.gradient`` says why.
"""

import torch
from torch import Tensor, nn

from autosym.bayes.priors import Prior
from autosym.evidence import gradient
from autosym.evidence.laplace import Laplace
from autosym.nn import symmetrised
from autosym.runtime.batching import Data, batches, to_model


class Ranges:
    """The transformations that a model uses, and the state of Adam for those whose ranges are learned. There may be none."""

    def __init__(self, model: nn.Module, lr: float):
        self.model, self.parts = model, symmetrised.transformations(model)
        self.learned = {name: part for name, part in self.parts.items() if part.learn}
        self.lr = lr
        self.kinked: bool | None = None  # not known yet
        self.first, self.second = ({n: torch.zeros_like(p.raw) for n, p in self.learned.items()} for _ in range(2))
        self.steps = torch.zeros((), dtype=torch.float64)

    def begin(self) -> None:
        """Remember where learning starts."""
        for part in self.learned.values():
            part.started = tuple(part.widths().tolist())

    def redraw(self, *seed: int) -> None:
        """Draw all transformations anew. The seed is several numbers, so that a resumed run draws the same again."""
        for place, part in enumerate(self.parts.values()):
            mixed = place
            for number in seed:
                mixed = (mixed * 1_000_003 + number) % 2**62
            part.redraw(mixed)

    def settle(self) -> None:
        """Go back to the draws that inference uses."""
        for part in self.parts.values():
            part.settle()

    @torch.no_grad()
    def step(
        self,
        data: Data,
        prior: Prior,
        at: Laplace,
        sampled: bool = False,
        subset: int | None = None,
        seed: int = 0,
        memory: float | None = None,
    ) -> None:
        """One step up the evidence ``at``, with the options it was taken with and at the present draws."""
        if not self.learned:
            return
        raws = {name: part.raw for name, part in self.learned.items()}
        if self.kinked is None:
            self.kinked = gradient.kinked(self.model, to_model(*next(batches(data, 1)), self.model, "the data")[0][:1])
        slopes = gradient.differences if self.kinked else gradient.gradient
        found = slopes(self.model, data, prior, at, raws, sampled=sampled, subset=subset, seed=seed, memory=memory)
        self.steps += 1
        t = float(self.steps)
        for name, grad in found.items():
            if not torch.isfinite(grad).all():
                raise ValueError(
                    f"the slope of the evidence in the widths of {name or 'the model'} is not finite: {grad.tolist()}"
                )
            m, v = self.first[name].lerp_(grad, 0.1), self.second[name].lerp_(grad.square(), 0.01)
            raws[name].add_(self.lr * (m / (1 - 0.9**t)) / ((v / (1 - 0.99**t)).sqrt() + 1e-12))
            self.learned[name].limit()

    def summary(self) -> dict[str, dict[str, float]]:
        """For a line of a history: the ranges, by name and unit."""
        return {"ranges": {f"{n} ({r.unit})": r.value for n, r in symmetrised.ranges(self.model).items()}} if self.parts else {}

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint has to hold."""
        moments = {f"{kind}/{n}": t for kind, ts in (("first", self.first), ("second", self.second)) for n, t in ts.items()}
        return moments | {"steps": self.steps} if self.learned else {}
