"""Lists that the tests are parametrised over: a new member is tested for free."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import Tensor, distributions

from autosym.bayes.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, Poisson
from autosym.linear.contrasts import BiasContrast, GroupContrast, PoolContrast
from autosym.linear.conv import Conv
from autosym.linear.dense import Bias, Centred, Dense, Pool
from autosym.linear.factored import FactoredIn, FactoredOut
from autosym.linear.group_conv import GroupConv
from autosym.linear.groups import GROUPS
from autosym.linear.sparse import SparseConv, SparseIn, SparseOut
from autosym.linear.where import Where, WhereBias
from autosym.nn import layers
from own import Cross, Gained, Mix, RowMean


def group_paths():
    """Group convolutions over every group, from images and from lifted features; those that never turn also on rectangles."""
    for name, group in GROUPS.items():
        for lift in (True, False):
            channels = 2 if lift else 2 * len(group)
            kind = f"gconv {name} {'lifting' if lift else 'mixing'}"

            def make(group=group, lift=lift, kernel=3):
                return GroupConv(group, 2, 2, kernel, lift)

            yield kind, make, (channels, 4, 4)
            if not (group.matrices[:, 0, 1] != 0).any():
                yield f"{kind} rectangle", make, (channels, 3, 5)
    yield "gconv d4 lifting 5", lambda: GroupConv(GROUPS["d4"], 1, 2, 5, lift=True), (1, 5, 5)
    yield "gconv c4 mixing 1", lambda: GroupConv(GROUPS["c4"], 1, 2, 1), (4, 3, 3)
    c4, d4 = GROUPS["c4"], GROUPS["d4"]
    yield "gconv c4 lifting zeros", lambda: GroupConv(c4, 2, 2, lift=True, padding_mode="zeros"), (2, 4, 4)
    yield "gconv c4 mixing reflect", lambda: GroupConv(c4, 1, 2, padding_mode="reflect"), (4, 4, 4)
    yield "gconv c4 mixing no padding", lambda: GroupConv(c4, 1, 2, padding=0), (4, 5, 5)
    yield "gconv d4 mixing depthwise", lambda: GroupConv(d4, 2, 2, groups=2, padding_mode="zeros"), (16, 3, 3)
    yield "gconv c4 mixing groups", lambda: GroupConv(c4, 4, 2, groups=2), (16, 4, 4)
    yield "gconv c4 lifting groups", lambda: GroupConv(c4, 2, 4, lift=True, groups=2), (2, 4, 4)
    yield "gconv c4 mixing dilation", lambda: GroupConv(c4, 1, 2, dilation=2), (4, 5, 5)
    yield "gconv c4 mixing wide padding", lambda: GroupConv(c4, 1, 1, 3, padding=2, padding_mode="zeros"), (4, 3, 3)


# the steps of chains of groups: the group of the fields, the group that is broken, the next smaller one, which is kept
STEPS = [
    (name, breaks, keeps)
    for name, chain in {
        "c2": ("c2", None),
        "c4": ("c4", "c2", None),
        "c4 at once": ("c4", None),
        "d4": ("d4", "c4", "c2", None),
        "d4 by a flip": ("d4", "flip-vertical", None),
        "d4 at once": ("d4", None),
        "flip-horizontal": ("flip-horizontal", None),
        "flip-vertical": ("flip-vertical", None),
    }.items()
    for breaks, keeps in pairwise(chain)
]


def contrast_paths():
    """Every step of every chain of groups, from images and from lifted features, and its bias."""
    for chain, breaks, keeps in STEPS:
        group, step = GROUPS[chain.split()[0]], (GROUPS[breaks], keeps and GROUPS[keeps])
        kind = f"{chain}: {breaks} to {keeps or 'translations'}"
        for lift in (True, False):

            def make(group=group, step=step, lift=lift):
                return GroupContrast(group, 2, 2, 3, lift, *step)

            name = f"contrast {kind} {'lifting' if lift else 'mixing'}"
            yield name, make, (2 if lift else 2 * len(group), 4, 4)
        yield f"bias contrast {kind}", lambda group=group, step=step: BiasContrast(group, 2, *step), (2, 3, 3)
        yield f"pool contrast {kind}", lambda group=group, step=step: PoolContrast(group, 2, 3, 4, *step), (6 * len(group),)
    yield "contrast flip-vertical rectangle", lambda: GroupContrast(GROUPS["flip-vertical"], 1, 2), (2, 3, 5)
    yield "contrast c4 mixing 1", lambda: GroupContrast(GROUPS["c4"], 1, 2, 1), (4, 3, 3)
    c4, c2 = GROUPS["c4"], GROUPS["c2"]
    yield "contrast c4 zeros, dilation", lambda: GroupContrast(c4, 1, 2, dilation=2, padding_mode="zeros"), (4, 5, 5)
    yield "contrast c4 groups", lambda: GroupContrast(c4, 4, 2, 3, False, c4, c2, groups=2), (16, 4, 4)
    yield "contrast c4 lifting, no padding", lambda: GroupContrast(c4, 2, 4, 3, True, groups=2, padding=0), (2, 5, 5)
    yield "contrast c4 lifting 5", lambda: GroupContrast(GROUPS["c4"], 1, 2, 5, lift=True), (1, 5, 5)


def sparse_paths():
    """Sparse paths with nothing learned, with a learned omega, and with anchors that move too."""
    for kind, learn in (("fixed", ()), ("omega", (True,)), ("omega and anchors", (True, True))):
        yield f"sparse conv {kind}", lambda learn=learn: SparseConv(2, 3, 3, 4, *learn), (2, 5, 4)
        yield f"sparse conv 5 {kind}", lambda learn=learn: SparseConv(2, 2, 5, 9, *learn), (2, 5, 6)
        yield f"sparse in {kind}", lambda learn=learn: SparseIn((2, 4, 3), 5, 6, *learn), (2, 4, 3)
        yield f"sparse in on sequences {kind}", lambda learn=learn: SparseIn((2, 7), 5, 4, *learn), (2, 7)
        yield f"sparse out to sequences {kind}", lambda learn=learn: SparseOut(3, (5, 7), 4, *learn), (5, 3)
        yield f"sparse out {kind}", lambda learn=learn: SparseOut(3, (5, 2, 4), 3, *learn), (5, 3)


def where_paths():
    """Waves of position: on sequences, images and volumes, of every form; the last ones on maps of another size than made for."""
    yield "where", lambda: Where(2, 3, (5, 4), 4), (2, 5, 4)
    yield "where 8", lambda: Where(2, 3, (4, 4), 8), (2, 4, 4)
    yield "where all", lambda: Where(2, 1, (4, 3), 11, 1), (2, 4, 3)
    yield "where stride", lambda: Where(2, 3, (3, 2), 3, 3, 2), (2, 6, 4)
    yield "where groups", lambda: Where(4, 6, (5, 5), 4, 3, groups=2), (4, 5, 5)
    yield "where zeros own form", lambda: Where(4, 2, (2, 4), 3, (2, 3), (2, 1), (1, 1, 0, 1), 1, 2, "zeros"), (4, 4, 4)
    yield "where reflect", lambda: Where(2, 2, (4, 5), 4, padding_mode="reflect", dilation=2), (2, 4, 5)
    yield "where on sequences", lambda: Where(2, 3, (6,), 2, dims=1), (2, 6)
    yield "where on volumes", lambda: Where(2, 2, (3, 4, 3), 6, dims=3), (2, 3, 4, 3)
    yield "where of a Nyquist wave on a larger map", lambda: Where(2, 3, (2, 4), 3), (2, 5, 6)
    yield "where on a larger map", lambda: Where(2, 3, (3, 3), 4), (2, 5, 6)
    yield "bias of waves", lambda: WhereBias((3, 4, 5), 4), (3, 4, 5)
    yield "bias of waves on a larger map", lambda: WhereBias((3, 4), 3), (3, 6)


# name, constructor, shape of one input
PATHS = [
    pytest.param(*case, id=case[0])
    for case in [
        ("dense", lambda: Dense((5,), (3,)), (5,)),
        ("dense on maps", lambda: Dense((2, 4, 3), (3, 2, 2)), (2, 4, 3)),
        ("dense shared axis", lambda: Dense((4,), (3,)), (5, 4)),
        ("dense shared axes of maps", lambda: Dense((2, 2), (3,)), (3, 5, 2, 2)),
        ("conv circular", lambda: Conv(2, 3), (2, 5, 4)),
        ("conv circular square", lambda: Conv(2, 3), (2, 4, 4)),
        ("conv circular 1", lambda: Conv(2, 3, 1), (2, 3, 4)),
        ("conv circular 5", lambda: Conv(2, 2, 5), (2, 6, 5)),
        ("conv circular 3x5", lambda: Conv(2, 2, (3, 5)), (2, 5, 6)),
        ("conv circular stride", lambda: Conv(2, 3, 3, stride=2), (2, 6, 4)),
        ("conv circular groups", lambda: Conv(4, 6, 3, groups=2), (4, 4, 3)),
        ("conv circular dilation", lambda: Conv(2, 2, 3, dilation=2), (2, 5, 6)),
        ("conv zeros", lambda: Conv(2, 3, 3, padding_mode="zeros"), (2, 5, 4)),
        ("conv zeros 5x1", lambda: Conv(2, 3, (5, 1), padding_mode="zeros"), (2, 5, 4)),
        ("conv zeros strides", lambda: Conv(2, 3, 3, stride=(2, 1), padding_mode="zeros"), (2, 5, 4)),
        ("conv zeros dilations", lambda: Conv(2, 2, 3, dilation=(1, 2), padding_mode="zeros"), (2, 5, 6)),
        ("conv zeros groups", lambda: Conv(4, 4, 3, stride=2, groups=4, padding_mode="zeros"), (4, 5, 5)),
        ("conv unequal padding", lambda: Conv(2, 3, 2, padding=(0, 1, 1, 0), padding_mode="zeros"), (2, 4, 3)),
        ("conv no padding", lambda: Conv(2, 3, 3, padding=(0, 0, 0, 0)), (2, 4, 5)),
        ("conv reflect", lambda: Conv(2, 2, 3, padding_mode="reflect"), (2, 4, 5)),
        ("conv replicate", lambda: Conv(2, 2, 3, padding_mode="replicate"), (2, 4, 5)),
        ("conv sequences", lambda: Conv(2, 3, 3, dims=1), (2, 6)),
        ("conv sequences own form", lambda: Conv(4, 6, 3, 2, (2, 1), 2, 2, "zeros", 1), (4, 9)),
        ("conv sequences reflect", lambda: Conv(2, 3, 3, padding_mode="reflect", dims=1), (2, 6)),
        ("conv volumes", lambda: Conv(2, 3, (3, 1, 3), dims=3), (2, 3, 2, 4)),
        (
            "conv volumes own form",
            lambda: Conv(4, 2, (3, 2, 3), (2, 1, 2), (1, 2, 0, 1, 2, 0), (1, 2, 1), 2, "zeros", 3),
            (4, 4, 3, 5),
        ),
        ("conv volumes reflect", lambda: Conv(2, 2, 3, padding_mode="reflect", dims=3), (2, 3, 2, 4)),
        *where_paths(),
        ("pool", lambda: Pool(3, 4, 5), (12,)),
        ("pool over a group", lambda: Pool(2, 12, 3, GROUPS["c4"]), (24,)),
        ("centred", lambda: Centred(3, 4, 5), (12,)),
        ("factored in", lambda: FactoredIn((2, 4, 3), 5), (2, 4, 3)),
        ("factored out", lambda: FactoredOut(3, (5, 2, 4)), (5, 3)),
        ("factored in on sequences", lambda: FactoredIn((2, 7), 5), (2, 7)),
        ("factored out to sequences", lambda: FactoredOut(3, (5, 7)), (5, 3)),
        ("bias of units", lambda: Bias((3,)), (4,)),
        ("bias of outputs", lambda: Bias((3, 2, 2)), (2, 4, 4)),
        ("bias of channels", lambda: Bias((3, 1, 1), (3, 2, 4)), (2, 2, 4)),
        ("bias of channels of any size", lambda: Bias((3, 1, 1), (3, 2, 4), any_size=True), (3, 5, 3)),
        ("bias of positions", lambda: Bias((1, 2, 4), (3, 2, 4)), (3, 2)),
        ("bias of hidden channels", lambda: Bias((3, 1), (3, 2)), (2, 4, 4)),
        ("bias of units expand", lambda: Bias((3,), expand=True), (4,)),
        ("bias of outputs expand", lambda: Bias((3, 2, 2), expand=True), (2, 4, 4)),
        ("bias of channels expand", lambda: Bias((3, 1, 1), (3, 2, 4), expand=True), (2, 2, 4)),
        ("bias of positions expand", lambda: Bias((1, 2, 4), (3, 2, 4), expand=True), (3, 2)),
        ("bias of middle axis expand", lambda: Bias((2, 1, 4, 1), (2, 3, 4, 5), expand=True), (3, 2)),
        ("bias of hidden channels expand", lambda: Bias((3, 1), (3, 2), expand=True), (2, 4, 4)),
        ("own row mean", lambda: RowMean(2, 3), (2, 5, 4)),
        ("own cross", lambda: Cross(2, 3), (2, 5, 4)),
        ("own gain", lambda: Gained(4, 3), (4,)),
        ("own mix", lambda: Mix(2, 3), (8, 4, 4)),
        *group_paths(),
        *contrast_paths(),
        *sparse_paths(),
    ]
]

# Layers that map (2, 4, 6) to (3, 4, 6) with every kind of path in them.
LAYERS = {
    "fc": lambda: layers.fc((2, 4, 6), (3, 4, 6)),
    "conv": lambda: layers.conv((2, 4, 6), (3, 4, 6)),
    "f-fc": lambda: layers.Factored((2, 4, 6), (3, 4, 6)),
    "where": lambda: layers.where((2, 4, 6), (3, 4, 6)),
    "s-conv": lambda: layers.s_conv((2, 4, 6), (3, 4, 6), 4),
    "s-fc": lambda: layers.SparseFactored((2, 4, 6), (3, 4, 6), 12, 8),
    "s-conv omega": lambda: layers.s_conv((2, 4, 6), (3, 4, 6), 4, learn_omega=True),
    "s-fc omega": lambda: layers.SparseFactored((2, 4, 6), (3, 4, 6), 12, 8, learn_omega=True),
}


@dataclass(frozen=True)
class LikelihoodCase:
    """A likelihood, the outputs of a model for it, the same as torch's distribution given f, and targets that it refuses."""

    make: Callable[[], Likelihood]
    outputs: int
    distribution: Callable[[Tensor], distributions.Distribution]
    refused: tuple[tuple[Tensor, str], ...]

    def draw(self, f: Tensor) -> Tensor:
        return self.distribution(f).sample()

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """Summed over all samples and outputs."""
        return self.distribution(f).log_prob(y).sum()


def _case(make, outputs, kind, *refused, **options):
    return LikelihoodCase(make, outputs, lambda f: kind(f, **options, validate_args=False), refused)


LIKELIHOODS = [
    pytest.param(case, id=name)
    for name, case in {
        "categorical": _case(
            Categorical,
            3,
            lambda f, **options: distributions.Categorical(logits=f, **options),
            (torch.tensor([0, 3]), r"labels run from 0 to 3, but .*: number them from 0"),
            (torch.tensor([0.0, 1.0]), r"not class indices: .*; use targets.long\(\)"),
        ),
        "gaussian": _case(
            lambda: Gaussian(0.6),
            2,
            distributions.Normal,
            (torch.zeros(3), r"targets \(3,\) .*do not match outputs \(3, 2\)"),
            (torch.zeros(3, 2, dtype=torch.long), r"use targets.float\(\)"),
            scale=0.6,
        ),
        "bernoulli": _case(
            Bernoulli,
            1,
            lambda f, **options: distributions.Bernoulli(logits=f, **options),
            (torch.tensor([0, 1, 2]), r"the targets hold 2, but .* takes 0 and 1: .*'categorical' for more"),
            (torch.tensor([-1.0, 1.0]), r"the targets hold -1, .*use \(targets > 0\).long\(\)"),
            (torch.tensor([[0.25], [1.0]]), r"the targets hold 0.25"),
            (torch.zeros(3, 2), r"shape \(N, 2\) do not match a model with 1 output: .* takes \(N,\) or \(N, 1\); give one"),
            (torch.zeros(3, 1, 1), r"shape \(N, 1, 1\) .*; use targets.flatten\(1\)"),
        ),
        "poisson": _case(
            Poisson,
            2,
            lambda f, **options: distributions.Poisson(f.exp(), **options),
            (torch.tensor([[0, -1]]), r"the targets hold -1, but .* takes counts, .*use likelihood='gaussian'"),
            (torch.tensor([[0.0, 1.5]]), r"the targets hold 1.5"),
            (torch.tensor([[0.0, torch.inf]]), r"the targets hold inf"),
            (torch.zeros(3), r"shape \(N,\) do not match a model with 2 outputs: .* takes \(N, 2\); give one for each"),
            (torch.zeros(3, 1), r"shape \(N, 1\) do not match"),
        ),
    }.items()
]


def smooth_images(samples, channels, size):
    """Two bumps of a tenth of the image each, of opposite sign, near the centre."""
    row, column = torch.meshgrid(*2 * [torch.arange(size, dtype=torch.float64) - (size - 1) / 2], indexing="ij")
    centres = torch.randn(2, samples, channels, 2, 1, 1, dtype=torch.float64) * size / 10
    square = (row - centres[:, :, :, 0]).square() + (column - centres[:, :, :, 1]).square()
    plus, minus = torch.exp(-square / (2 * (size / 10) ** 2))
    return plus - minus
