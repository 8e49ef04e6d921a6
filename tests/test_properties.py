"""Laws that hold whatever the shapes, strides, groups, batch sizes and priors; the same examples every time."""

import copy
import math
from pathlib import Path as File

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

import autosym
from autosym.answer.equivariance import assert_equivariant
from autosym.evidence import kernel, laplace
from autosym.linear.conv import Conv
from autosym.linear.dense import Bias, Dense, Pool
from autosym.linear.factored import FactoredIn, FactoredOut
from autosym.linear.group_conv import GroupConv
from autosym.linear.groups import GROUPS, translations, with_translations
from autosym.linear.sparse import SparseConv, SparseIn, SparseOut
from autosym.nn import layers, nets
from autosym.nn.layers import Relaxed, polyphase
from autosym.training import checkpoint
from models import curvature, randomised

few = st.integers(1, 4)
sizes = st.integers(3, 7)
seeds = st.integers(0, 2**31)
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def examples(count):
    return settings(max_examples=count, deadline=None, derandomize=True, database=None)


def drawn(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---- the path law


@st.composite
def convolutions(draw):
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    channels, outputs = groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2))
    kernel, dilation = draw(st.tuples(*2 * [st.sampled_from([1, 3])])), draw(st.integers(1, 2))
    height, width = draw(sizes), draw(sizes)
    mode = draw(st.sampled_from(["circular", "zeros", "reflect", "replicate"]))
    reach = dilation * (max(kernel) - 1) // 2
    assume(min(height, width) > 2 * reach)
    stride = draw(st.tuples(*2 * [st.integers(1, 3)]))
    return Conv(channels, outputs, kernel, stride, None, dilation, groups, mode), (channels, height, width)


@st.composite
def group_convolutions(draw):
    group, lift = GROUPS[draw(st.sampled_from(sorted(GROUPS)))], draw(st.booleans())
    channels, outputs, kernel, size = (
        draw(st.integers(1, 2)),
        draw(st.integers(1, 2)),
        draw(st.sampled_from([1, 3])),
        draw(sizes),
    )
    return GroupConv(group, channels, outputs, kernel, lift), (channels * (1 if lift else len(group)), size, size)


@st.composite
def others(draw):
    c, o, h, w, k, n = (draw(few) for _ in range(6))
    anchors = min(k, h * w)
    kinds = {
        "dense": lambda: (Dense((c, h, w), (o, k)), (c, h, w)),
        "shared dense": lambda: (Dense((c,), (o,)), (h, w, c)),
        "pool": lambda: (Pool(c, h * w, o), (c * h * w,)),
        "factored in": lambda: (FactoredIn((c, h, w), o), (c, h, w)),
        "factored out": lambda: (FactoredOut(c, (o, k, n)), (o, c)),
        "bias": lambda: (Bias((o, 1, 1), (o, h, w)), (c, h, w)),
        "expanded bias": lambda: (Bias((1, h, 1), (o, h, w), expand=True), (c, h)),
        "sparse conv": lambda: (SparseConv(c, o, 3, k), (c, h + 2, w + 2)),
        "sparse in": lambda: (SparseIn((c, h, w), o, anchors), (c, h, w)),
        "sparse out": lambda: (SparseOut(c, (o, h, w), anchors), (o, c)),
    }
    return kinds[draw(st.sampled_from(sorted(kinds)))]()


def assert_path_law(path, shape, samples, seed):
    path = path.double()
    path.weight.data = drawn(path.weight.shape, seed)
    x = drawn((samples, *shape), seed + 1)
    columns, y = path.columns(x), path(x)
    assert columns.shape == (samples, columns.shape[1], path.weight.shape[0], path.weight.shape[2])
    assert_close(y, path.place(torch.einsum("bski,koi->bsko", columns, path.weight), x), **CLOSE)
    h, g = drawn((*columns.shape[:3], path.weight.shape[1]), seed + 2), drawn(y.shape, seed + 3)
    assert_close((path.place(h, x) * g).sum(), (h * path.rows(g)).sum(), **CLOSE)
    assert_close(path.gram(x), torch.einsum("bski,bskj->kij", columns, columns), **CLOSE)


@examples(40)
@given(convolutions(), few, seeds)
def test_path_law_of_convolutions(made, samples, seed):
    assert_path_law(*made, samples, seed)


@examples(25)
@given(group_convolutions(), st.integers(1, 2), seeds)
def test_path_law_of_group_convolutions(made, samples, seed):
    assert_path_law(*made, samples, seed)


@examples(80)
@given(others(), few, seeds)
def test_path_law_of_other_paths(made, samples, seed):
    assert_path_law(*made, samples, seed)


def test_path_law_that_does_not_hold_is_seen():
    class Wrong(Dense):
        def rows(self, g):
            return super().rows(g).flip(-1)

    with pytest.raises(AssertionError):
        assert_path_law(Wrong((4,), (3,)), (4,), 2, 0)


# ---- curvature and evidence


@st.composite
def networks(draw):
    """A small network with its data: dense, convolutional or relaxed, categorical or gaussian."""
    seed, samples, outputs = draw(seeds), draw(st.integers(2, 12)), draw(st.integers(2, 3))
    torch.manual_seed(seed)
    kind = draw(st.sampled_from(["mlp", "conv", "f-fc+conv", "fc", "s-fc+s-conv"]))
    if kind == "mlp":
        model, shape = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, outputs)), (4,)
    elif kind == "conv":
        padding = draw(st.sampled_from(["zeros", "circular"]))
        conv = nn.Conv2d(1, 2, 3, stride=draw(st.integers(1, 2)), padding=1, padding_mode=padding)
        model, shape = nn.Sequential(conv, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, outputs)), (1, 4, 5)
    else:
        model, shape = nets.build(kind, (1, 4, 4), outputs, 2, channels=(1, 2), strides=(1, 2), hidden=2), (1, 4, 4)
    likelihood = draw(st.sampled_from(["categorical", "gaussian"]))
    y = torch.randint(outputs, (samples,)) if likelihood == "categorical" else torch.randn(samples, outputs).double()
    return randomised(model), (torch.randn(samples, *shape).double(), y), likelihood


@examples(20)
@given(networks(), st.integers(1, 13), seeds, st.booleans())
def test_curvature_depends_neither_on_batch_size_nor_on_order(made, batch_size, seed, sampled):
    model, (x, y), likelihood = made
    whole = curvature(model, (x, y), likelihood)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    parts = curvature(model, (x[order], y[order]), likelihood, batch_size=batch_size)
    if sampled:  # whose noise is drawn by place
        whole = curvature(model, (x, y), likelihood, sampled=True, seed=seed)
        parts = curvature(model, (x, y), likelihood, sampled=True, seed=seed, batch_size=batch_size)
    assert whole.samples == parts.samples == len(x)
    assert_close(whole.statistic, parts.statistic, rtol=1e-9, atol=1e-9)
    for name, f in whole.factors.items():
        assert_close((f.A, f.G), (parts.factors[name].A, parts.factors[name].G), rtol=1e-8, atol=1e-9)


@examples(20)
@given(networks(), st.floats(-12, 12), st.sampled_from([math.inf, math.inf, 4.0]))
def test_evidence_is_finite_and_pays_for_every_parameter(made, log_precision, nu):
    """Occam's factor is never positive: the posterior is never wider than the prior."""
    model, data, likelihood = made
    at = laplace.at(model, data, likelihood)
    prior = autosym.Prior(at.names, math.exp(log_precision), nu)
    at = at.with_scales(prior) if math.isfinite(nu) else at
    record = at(prior)
    assert torch.isfinite(record.log_evidence)
    assert record.occam <= 1e-9
    if likelihood == "categorical":
        assert record.log_evidence <= 1e-9, "a probability"
    gamma = at.effective_parameters(prior)
    assert ((gamma >= -1e-9) & (gamma <= at.sizes + 1e-9)).all()


@examples(12)
@given(networks(), st.floats(-3, 3), st.integers(1, 3))
def test_kernel_evidence_of_parts_is_below_that_of_the_whole(made, log_precision, parts):
    model, data, likelihood = made
    assume(len(data[0]) % parts == 0)
    whole, divided = (kernel.at(model, data, likelihood, parts=n) for n in (1, parts))
    prior = autosym.Prior(whole.names, math.exp(log_precision))
    assert whole(prior).occam <= 1e-9
    assert divided(prior).log_evidence <= whole(prior).log_evidence + 1e-9


@examples(12)
@given(networks(), st.floats(-4, 4))
def test_a_closed_form_step_leaves_finite_precisions(made, log_precision):
    model, data, likelihood = made
    at = laplace.at(model, data, likelihood)
    prior = autosym.Prior(at.names, math.exp(log_precision))
    for _ in range(3):
        at.mackay(prior)
    assert torch.isfinite(prior.log_precision).all()
    assert torch.isfinite(at(prior).log_evidence)


# ---- relaxing


@st.composite
def plain_networks(draw):
    channels, outputs = draw(st.integers(1, 3)), draw(st.integers(2, 3))
    height, width = draw(st.integers(5, 8)), draw(st.integers(5, 8))
    stride, mode, bias = draw(st.integers(1, 2)), draw(st.sampled_from(["zeros", "circular", "reflect"])), draw(st.booleans())
    torch.manual_seed(draw(seeds))
    first = nn.Conv2d(
        channels, 4, draw(st.sampled_from([1, 3])), stride, "valid" if mode == "reflect" else 1, bias=bias, padding_mode=mode
    )
    second = nn.Conv2d(
        4, 4, draw(st.sampled_from([1, 2, 3])), groups=draw(st.sampled_from([1, 2, 4])), padding=draw(st.integers(0, 1))
    )
    rest = [nn.Flatten()] if draw(st.booleans()) else [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    net = nn.Sequential(
        first, nn.ReLU(inplace=draw(st.booleans())), second, nn.Tanh(), *rest, nn.LazyLinear(outputs, bias=bias)
    )
    x = torch.randn(3, channels, height, width)
    net(x)
    return net.double(), x.double()


@examples(15)
@given(plain_networks(), st.sampled_from(["f-fc", "fc", "s-fc", "where", "where:8", "f-fc+fc"]))
def test_a_relaxed_model_is_the_same_function(made, paths):
    model, x = made
    before = copy.deepcopy(model.state_dict())
    relaxed = autosym.relax(model, x, paths)
    assert_close(relaxed(2 * x), model(2 * x), rtol=1e-9, atol=1e-9)
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items()), "the model given is left as it was"
    hardened = autosym.harden(relaxed, (x, torch.zeros(3, dtype=torch.long)), tolerance=0.0)
    assert_close(hardened(2 * x), model(2 * x), rtol=1e-9, atol=1e-9)


# ---- equivariance


@examples(25)
@given(st.integers(2, 3), few, few, st.integers(1, 3), seeds)
def test_polyphase_downsampling_commutes_with_every_shift(stride, rows, columns, channels, seed):
    height, width = stride * rows, stride * columns
    layer = Relaxed({"conv": layers.conv((2, height, width), (channels, rows, columns))}, {}, stride)
    layer["conv"].linear.weight.data = drawn(layer["conv"].linear.weight.shape, seed)
    assert_equivariant(layer.double(), translations(height, width), drawn((2, 2, height, width), seed))


@examples(10)
@given(st.sampled_from([name for name, group in GROUPS.items() if group.exact]), st.sampled_from([2, 4]), seeds)
def test_polyphase_downsampling_commutes_with_groups_on_even_squares(name, size, seed):
    group = GROUPS[name]
    torch.manual_seed(seed)
    layer = Relaxed({"gconv": layers.gconv((1, size, size), (2 * len(group), size // 2, size // 2), group, True)}, {}, 2, group)
    assert_equivariant(layer.double(), with_translations(group, size, size), drawn((2, 1, size, size), seed))


@examples(20)
@given(st.integers(2, 3), st.integers(2, 4), seeds, st.integers(1, 5))
def test_polyphase_of_a_sample_does_not_depend_on_its_batchmates(stride, rows, seed, samples):
    y = drawn((samples, 2, stride * rows, stride * rows), seed)
    assert_close(polyphase(y, stride), torch.cat([polyphase(part, stride) for part in y.split(1)]), rtol=0, atol=0)


def test_downsampling_that_does_not_commute_is_seen():
    layer = nn.Conv2d(2, 2, 3, stride=2, padding=1, padding_mode="circular").double()
    with pytest.raises(AssertionError, match="not equivariant"):
        assert_equivariant(layer, translations(4, 4), drawn((2, 2, 4, 4), 0))


# ---- checkpoints

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
KINDS = [torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool]
tensors = st.dictionaries(
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1).filter(lambda name: name != "__metadata__"),
    st.tuples(st.lists(st.integers(0, 3), max_size=3), st.sampled_from(KINDS), seeds),
    max_size=4,
)


@examples(40)
@given(tensors, st.dictionaries(st.text(), values, max_size=4))
def test_checkpoints_come_back_bit_for_bit(tmp_path_factory, shapes, state):
    made = {name: (100 * drawn(shape, seed)).to(kind) for name, (shape, kind, seed) in shapes.items()}
    path: File = tmp_path_factory.mktemp("checkpoint") / "c"
    checkpoint.write(path, made, state)
    found, read = checkpoint.read(path)
    assert read == state
    assert found.keys() == made.keys()
    assert all(torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in made.items())
    assert [file.name for file in path.parent.iterdir()] == ["c"], "nothing else is left"
