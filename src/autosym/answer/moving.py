"""Are images and labels alike when they are moved? A test of the data themselves, without any network, in seconds.

    T = |sum_n y_n phi(x_n)|^2                y_n: label, centred;  phi: random Fourier features of the pixels;  so T is large where
                                              images with the same label look alike

If independent samples have a symmetry, they are as likely as a copy in which each is moved by an element of the group, drawn by lot. So
T is as likely to be the largest of four hundred as T of any copy: that probability is exact, for any number of samples. If labels depend
on what the group changes, moving takes it away, and T falls. (Equal images are moved alike. Near copies, as frames of a film, are not
independent: they look as if they changed.)

T asks for more than labels that keep the symmetry: images that are all upright change when they are turned. So it is a second witness
(``margins.judge``): a *no* needs networks that gain something by breaking the symmetry, too. But no *yes* is given against it.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from autosym.answer.hypotheses import SHIFTS
from autosym.answer.symmetrising import group_of
from autosym.linear.groups import Group
from autosym.runtime.batching import Data, batches

COPIES = 399
FEATURES = 256  # frequencies, a cosine and a sine each
SAMPLES = 2048  # at most
PAIRS = 250  # of images, by which their distance is known
NEAR = 0.35  # of the median distance between images: the length within which two images are alike


@torch.no_grad()
def probability(symmetry: str, x: Tensor, y: Tensor, classes: bool, seed: int = 0) -> float:
    """That data with the symmetry differ from their moved copies as much as these: of images (N, C, H, W) with ``classes`` or numbers.

    It is at least 1 / (``COPIES`` + 1). Translations are shifts by half a side, around the border; on odd sides these are no group. The
    probability is 1 there, and if all images are the same.
    """
    if symmetry == SHIFTS and any(side % 2 for side in x.shape[-2:]):
        return 1.0
    draw = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(x), generator=draw)[:SAMPLES]
    x, labels = x[chosen.to(x.device)].float().cpu(), _centred(y[chosen.to(y.device)].cpu(), classes)
    group = group_of(symmetry, (x.shape[-2], x.shape[-1]))
    length = NEAR * _distance(x, group, draw)
    if not 0 < length < math.inf:
        return 1.0
    frequencies = torch.randn(x[0].numel(), FEATURES, generator=draw) / length
    phases = torch.stack([group.act(g, x).flatten(1) @ frequencies for g in range(len(group))], 1)
    features = torch.cat([phases.cos(), phases.sin()], 2)
    features -= features.mean((0, 1))
    kinds, kind = x.flatten(1).unique(dim=0, return_inverse=True)
    elements = torch.randint(len(group), (COPIES + 1, len(kinds)), generator=draw)[:, kind]
    elements[0] = 0  # the data as they are
    each = torch.arange(len(x))
    found = torch.stack([(labels.T @ features[each, row]).square().sum() for row in elements])
    return (1 + int((found[1:] >= found[0]).sum())) / (COPIES + 1) if bool(found.isfinite().all()) else 1.0


def some(data: Data, count: int) -> tuple[Tensor, Tensor]:
    """At most ``SAMPLES`` of ``count`` samples: every so often one, as data may be sorted by class."""
    step, seen, kept = max(1, math.ceil(count / SAMPLES)), 0, []
    for x, y in batches(data, 256):
        first = -seen % step
        kept.append((x[first::step], y[first::step]))
        seen += len(x)
    return torch.cat([x for x, _ in kept]), torch.cat([y for _, y in kept])


def _distance(x: Tensor, group: Group, draw: torch.Generator) -> float:
    """The median distance between images, moved against each other by every element; 0 if all are the same.

    Those of each pair are the same for moved images, so that features do not tell the data from their copies.
    """
    one, other = (x[torch.randint(len(x), (PAIRS,), generator=draw)] for _ in range(2))
    found = torch.cat([(one - group.act(g, other)).flatten(1).norm(dim=1) for g in range(len(group))])
    apart = found[found > 0]
    return float(apart.median()) if len(apart) else 0.0


def _centred(y: Tensor, classes: bool) -> Tensor:
    """Labels as columns (N, D) of mean 0: one for each class, of equal weight; numbers in units of their deviation."""
    if classes and y.numel() == len(y):
        found = F.one_hot(y.reshape(-1).unique(return_inverse=True)[1]).double()
        return ((found - found.mean(0)) / found.sum(0).sqrt()).float()
    numbers = y.reshape(len(y), -1).double()
    centred, size = numbers - numbers.mean(0), numbers.std(0, correction=0)
    return torch.where(size > 1e-9 * numbers.abs().amax(0), centred / size.clamp_min(1e-300), 0.0).float()
