"""Are images and labels alike when they are moved? A test of the data themselves, without any network: exact, in seconds.

    T = |sum_n y_n phi(x_n)|^2                y_n: label, centred;  phi: random Fourier features of the pixels;  so T is large where
                                              images with the same label look alike

If the data have a symmetry, they are as likely as a copy whose samples are each moved by an element of the group, drawn by lot. So T is as
likely to be the largest of four hundred as T of any copy: the probability of that is exact, for any number of samples. If labels depend
on what the group changes, moving takes it away, and T falls.

T asks for more than labels that keep the symmetry: images that are all upright change when they are turned. So it is a second witness
(``margins.judge``): a *no* needs networks that gain something by breaking the symmetry, too.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from autosym.answer.hypotheses import SHIFTS
from autosym.answer.symmetrising import group_of
from autosym.runtime.batching import Data, batches

COPIES = 399
FEATURES = 256  # frequencies, a cosine and a sine each
SAMPLES = 2048  # at most
NEAR = 0.35  # of the median distance between images: the length within which two images are alike


@torch.no_grad()
def probability(symmetry: str, x: Tensor, y: Tensor, seed: int = 0) -> float:
    """That data with the symmetry differ from their moved copies as much as these: of images (N, C, H, W) with classes (N,) or numbers.

    Translations are shifts by half a side; on odd sides these are no group, and the probability is 1.
    """
    if symmetry == SHIFTS and any(side % 2 for side in x.shape[-2:]):
        return 1.0
    draw = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(x), generator=draw)[:SAMPLES]
    x, labels = x[chosen.to(x.device)].float().cpu(), _centred(y[chosen.to(y.device)].cpu())
    group = group_of(symmetry, (x.shape[-2], x.shape[-1]))
    images = torch.stack([group.act(g, x) for g in range(len(group))], 1).flatten(2)  # (N, |G|, pixels), the first as they are
    features, each = _features(images, draw), torch.arange(len(x))
    elements = torch.randint(len(group), (COPIES + 1, len(x)), generator=draw)
    elements[0] = 0
    found = torch.stack([(labels.T @ features[each, row]).square().sum() for row in elements])
    return float((found >= found[0]).double().mean())


def some(data: Data, count: int, most: int = 2 * SAMPLES) -> tuple[Tensor, Tensor]:
    """About so many samples of ``count``, or all if they are fewer: every so often one, as data may be sorted by class."""
    step = max(1, count // most)
    kept = [(x[::step], y[::step]) for x, y in batches(data, 256)]
    return torch.cat([x for x, _ in kept]), torch.cat([y for _, y in kept])


def _features(images: Tensor, draw: torch.Generator) -> Tensor:
    """Cosines and sines (N, |G|, 2 ``FEATURES``): their products are those of a Gaussian kernel in the mean, and centred."""
    flat = images.flatten(0, 1)
    one, other = (flat[torch.randint(len(flat), (1000,), generator=draw)] for _ in range(2))
    length = NEAR * (one - other).norm(dim=1).median().clamp_min(torch.finfo(flat.dtype).tiny)
    phase = images @ (torch.randn(images.shape[-1], FEATURES, generator=draw) / length)
    found = torch.cat([phase.cos(), phase.sin()], 2)
    return found - found.mean((0, 1))


def _centred(y: Tensor) -> Tensor:
    """Labels as columns (N, D) of mean 0: one for each class, of equal weight; numbers in units of their deviation."""
    if y.is_floating_point():
        numbers = y.reshape(len(y), -1).float()
        return (numbers - numbers.mean(0)) / numbers.std(0).clamp_min(1e-12)
    classes = F.one_hot(y.long().reshape(-1)).float()
    return (classes - classes.mean(0)) / classes.sum(0).clamp_min(1).sqrt()
