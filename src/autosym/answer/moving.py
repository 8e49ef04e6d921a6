"""Do the data change when they are moved? A test that trains nothing, and is exact whatever the network has learned.

    T(D) = sum over paths of |d loss(D) / d what breaks the symmetry|^2 / its mean over copies            at the strict network

A strict network computes the same for g x as for x. So if the data have the symmetry, D and a copy of it whose samples are moved by elements
of the group, drawn by lot, are equally likely; so are T(D) and T of the copy, and T(D) is the largest of a thousand by a chance of one in a
thousand. If labels depend on what the group changes, the slopes of all samples point the same way in D, and cancel in its copies.

Samples are moved in blocks, which moves them by elements of a group too. So slopes are taken once for each block and element, and copies
cost nothing. What is kept of a slope is a random projection.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autosym.answer.symmetrising import group_of
from autosym.bayes.likelihoods import Likelihood
from autosym.curvature.owners import is_under
from autosym.runtime.batching import Data, batches, to_model

COPIES = 999
BLOCKS = 64
SAMPLES = 8192  # at most
KEPT = 2048  # numbers of a path's slope
RARE = 0.005  # what happens less often than this by chance is taken for more than chance


@dataclass(frozen=True)
class Moved:
    """How likely data that have the symmetry look as unlike their moved copies as these; and whether the strict network is ``weak``.

    A weak network explains little of the labels: that it gains nothing by breaking a symmetry says little then.
    """

    probability: float
    weak: bool = False

    @property
    def changes(self) -> bool:
        """Whether the data change when they are moved."""
        return self.probability <= RARE


def probability(
    symmetry: str, opened: nn.Module, breaking: Sequence[str], data: Data, count: int, likelihood: Likelihood, seed: int = 0
) -> float:
    """The part of copies, the data themselves among them, whose slopes are as large as those of the data.

    ``opened`` is the strict network with paths ``breaking`` beside its own, which compute zero; ``count`` is the number of samples.
    """
    paths = {
        path: [p for name, p in opened.named_parameters() if is_under(name, path) and p.requires_grad] for path in breaking
    }
    draw = torch.Generator().manual_seed(seed)
    slopes = _slopes(symmetry, opened, {path: own for path, own in paths.items() if own}, data, count, likelihood, draw)
    blocks, elements = next(iter(slopes.values())).shape[:2]
    chosen = torch.randint(elements, (COPIES + 1, blocks), generator=draw)
    chosen[0] = 0  # the data as they are: every group's first element is the identity
    which = torch.nn.functional.one_hot(chosen, elements).flatten(1).double()
    sizes = torch.stack([(which @ own.flatten(0, 1)).square().sum(1) for own in slopes.values()], 1)
    alive = sizes.mean(0) > 0
    total = (sizes[:, alive] / sizes[:, alive].mean(0)).sum(1)
    return float((total >= total[0]).double().mean())


def _slopes(
    symmetry: str,
    opened: nn.Module,
    paths: Mapping[str, Sequence[nn.Parameter]],
    data: Data,
    count: int,
    likelihood: Likelihood,
    draw: torch.Generator,
) -> dict[str, Tensor]:
    """(blocks, elements, kept) for each path: projections of its slope on each block of samples, moved by each element."""
    parts = {path: _projection(sum(p.numel() for p in own), draw) for path, own in paths.items()}
    everything = [p for own in paths.values() for p in own]
    size, part = max(1, math.ceil(min(count, SAMPLES) / BLOCKS)), min(1.0, SAMPLES / count)
    found: dict[str, list[Tensor]] = {path: [] for path in paths}
    for x, y in batches(data, size * math.ceil(1 / part)):
        x, y = to_model(*(t[: math.ceil(part * len(t))] for t in (x, y)), opened, "discover")
        group = group_of(symmetry, (x.shape[-2], x.shape[-1]))
        for inputs, targets in zip(x.split(size), y.split(size), strict=True):
            rows: dict[str, list[Tensor]] = {path: [] for path in paths}
            for element in range(len(group)):
                loss = likelihood.loss(opened(group.act(element, inputs)), targets)
                slope = iter(torch.autograd.grad(loss, everything))
                for path, own in paths.items():
                    whole = torch.cat([next(slope).flatten() for _ in own]).double().cpu()
                    bucket, sign = parts[path]
                    rows[path].append(
                        torch.zeros(min(len(whole), KEPT), dtype=torch.float64).index_add_(0, bucket, sign * whole)
                    )
            for path, own_rows in rows.items():
                found[path].append(torch.stack(own_rows))
    return {path: torch.stack(own) for path, own in found.items()}


def _projection(size: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Where each entry of a slope is added, and with which sign: the squared norm stays the same in the mean."""
    if size <= KEPT:
        return torch.arange(size), torch.ones(size, dtype=torch.float64)
    return torch.randint(KEPT, (size,), generator=draw), 2.0 * torch.randint(2, (size,), generator=draw).double() - 1
