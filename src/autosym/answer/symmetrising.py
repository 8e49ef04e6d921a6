"""A second opinion that needs no training: is a network that breaks a symmetry better or worse when it is averaged over the group?

    f_G(x) = 1/|G| sum_g f(g x)             same weights, same number of parameters; keeps the symmetry exactly

If the symmetry is there, averaging takes away what is noise, and the log-likelihood of f_G is not far below that of f. If it is not,
averaging takes away what the network knows. The answer is about the network at hand: where labels keep a symmetry but a network never saw
moved images, averaging loses too. So a loss alone is no proof against a symmetry, nor a gain one for it: it may contradict, no more. Of the
evidence nothing is said: Kronecker factors of an average are those of mean inputs, and off by hundreds of nats (docs/lab/findings.md).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autosym.answer.margins import LEAST
from autosym.bayes.likelihoods import Likelihood
from autosym.curvature.passes import Pass
from autosym.linear.groups import GROUPS, Group
from autosym.nn.symmetrised import Symmetrised
from autosym.runtime.batching import Data
from autosym.training.fitted import Fit

SHIFTS = 4  # of the group of all shifts: those by half a side


class Moves(nn.Module):
    """g x for every element of a group: images (B, C, H, W) as (B, |G|, C, H, W)."""

    names = ("group",)

    def __init__(self, group: Group):
        super().__init__()
        self.group, self.draws = group, range(len(group))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.group.act(g, x) for g in self.draws], 1)


@dataclass(frozen=True)
class Gain:
    """What averaging adds to a log-likelihood, in nats over all samples, with its standard error over samples."""

    nats: float
    error: float

    @property
    def loses(self) -> bool:
        return self.nats < -max(2 * self.error, LEAST)  # of a network that keeps the symmetry both are rounding


@dataclass(frozen=True)
class Opinion:
    """What averaging the network ``of`` over ``elements`` of a group does to its log-likelihood."""

    symmetry: str
    of: str
    elements: int
    training: Gain
    held_out: Gain | None = None

    @property
    def supports(self) -> bool:
        """Whether nothing is lost by averaging."""
        return not self.training.loses and not (self.held_out and self.held_out.loses)

    def __str__(self) -> str:
        held = "" if self.held_out is None else f" ({self.held_out.nats:+.0f} held out)"
        return f"averaged over {self.symmetry}, the log-likelihood of {self.of} changes by {self.training.nats:+.0f} nats{held}"


def opinion(symmetry: str, of: str, fitted: Fit, data: Data, held_out: Data | None = None) -> Opinion:
    """The second opinion by a fit of a network that does not keep the symmetry."""
    with torch.no_grad():
        x = next(iter(Pass(fitted.model, data, fitted.likelihood, 1)))[0]
    group = group_of(symmetry, (x.shape[-2], x.shape[-1]))
    averaged = Symmetrised(fitted.model, Moves(group))  # type: ignore[arg-type]
    gains = [None if d is None else gain(fitted.model, averaged, d, fitted.likelihood) for d in (data, held_out)]
    assert gains[0] is not None
    return Opinion(symmetry, of, len(group), gains[0], gains[1])


def group_of(symmetry: str, size: tuple[int, int]) -> Group:
    """The group by its name; of all shifts, those by half a side."""
    if symmetry != "translations":
        return GROUPS[symmetry]
    height, width = size
    right, up = torch.meshgrid(torch.tensor([0, width // 2]), torch.tensor([0, height // 2]), indexing="ij")
    shifts = torch.stack([right.flatten(), up.flatten()], 1).double()
    return Group("half shifts", torch.eye(2, dtype=torch.float64).expand(SHIFTS, 2, 2), shifts, size)


@torch.no_grad()
def gain(model: nn.Module, averaged: nn.Module, data: Data, likelihood: Likelihood) -> Gain:
    """What averaging adds to the log-likelihood of all samples."""
    gains = []
    shown = Pass(model, data, likelihood, 256, allow_partial=True)
    for x, y, _, _ in shown:
        for one, other, target in zip(model(x), averaged(x), y, strict=True):
            losses = [float(likelihood.loss(f[None], target[None])) for f in (one, other)]
            gains.append(losses[0] - losses[1])
    each = torch.tensor(gains, dtype=torch.float64) * float(likelihood.scale().detach())
    return Gain(float(each.sum()), float(each.std() * math.sqrt(len(each))) if len(each) > 1 else math.inf)
