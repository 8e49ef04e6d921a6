"""Waves of position: what they span, what they keep out of the equivariant maps, and what is left of that at borders."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.func import functional_call

from autosym.linear.conv import Conv
from autosym.linear.dense import Centred, Dense, Pool
from autosym.linear.plain import matrix_of
from autosym.linear.where import Where, WhereBias, first_waves, fitting_waves, frequencies, waves_on
from autosym.nn import layers, nets
from autosym.nn.layers import Affine, Relaxed
from factories import PATHS

DOUBLE = torch.zeros((), dtype=torch.float64)
SIZES = [(1, 5), (5,), (6,), (2, 2), (4, 4), (5, 6), (3, 4, 2)]


def shifts(size, step=1):
    return list(itertools.product(*(range(0, n, step) for n in size)))


def moved(x, shift):
    return x.roll(shift, tuple(range(x.dim() - len(shift), x.dim())))


# ---- waves


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_all_waves_and_the_constant_are_an_orthonormal_basis(size):
    positions = math.prod(size)
    phi = waves_on(size, first_waves(size, positions - 1), DOUBLE).flatten(1)
    assert len(phi) == positions - 1
    torch.testing.assert_close(phi @ phi.mT / positions, torch.eye(positions - 1, dtype=torch.float64), rtol=0, atol=1e-14)
    assert phi.mean(1).abs().max() < 1e-15


def test_the_lowest_come_first_and_directions_alike():
    assert [f for f, _ in frequencies((8, 8), 8)][:6] == [(1, 0), (0, 1), (1, 1), (1, -1), (2, 0), (0, 2)]
    row, column = torch.meshgrid(*2 * [torch.arange(8, dtype=torch.float64) * 2 * math.pi / 8], indexing="ij")
    expected = math.sqrt(2) * torch.stack([row.cos(), row.sin(), column.cos(), column.sin()])
    torch.testing.assert_close(waves_on((8, 8), first_waves((8, 8), 4), DOUBLE), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("size", "wanted", "count"),
    [
        ((8,), None, 2),
        ((8, 8), None, 4),
        ((8, 8, 8), None, 6),
        ((2, 8), None, 3),  # along two positions there is only the cosine of the Nyquist frequency
        ((1, 8), None, 2),
        ((1, 1), None, 0),
        ((8, 8), 8, 8),
        ((8, 8), 7, 6),
        ((2, 2), 8, 3),
        ((8, 8), 1, 0),
    ],
    ids=str,
)
def test_how_many_waves_fit(size, wanted, count):
    assert fitting_waves(size, wanted) == count


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_shifts_map_whole_frequencies_onto_themselves(size):
    positions = math.prod(size)
    count = fitting_waves(size, min(8, positions - 1))
    phi = waves_on(size, first_waves(size, count), DOUBLE)
    for shift in shifts(size):
        there = moved(phi, shift).flatten(1)
        back = there @ phi.flatten(1).mT / positions @ phi.flatten(1)
        torch.testing.assert_close(back, there, rtol=0, atol=1e-13)


def test_waves_are_cached_but_not_those_of_a_trace_or_of_inference():
    assert waves_on((4, 4), first_waves((4, 4), 4), DOUBLE) is waves_on((4, 4), first_waves((4, 4), 4), DOUBLE)
    with torch.inference_mode():
        first = waves_on((4, 7), first_waves((4, 7), 4), DOUBLE)
    assert not first.is_inference()
    path = Where(2, 3, (5, 9), 4)
    exported = torch.export.export(path, (torch.randn(2, 2, 5, 9),))
    x = torch.randn(2, 2, 5, 9)
    torch.testing.assert_close(exported.module()(x), path(x))
    assert type(waves_on((5, 9), first_waves((5, 9), 4), torch.zeros(()))) is torch.Tensor


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Where(1, 1, (2, 2), 4), "a map of 2x2 has 3 waves, not 4: take at most 3"),
        (lambda: Where(1, 1, (1, 1), 1), "has 0 waves, not 1: leave out the path"),
        (lambda: Where(1, 1, (8, 8), 5), "5 waves on a map of 8x8 would have a cosine without its sine: take 4"),
        (lambda: WhereBias((2, 8), 1), "cosine without its sine: take 2"),
        (lambda: Where(1, 1, (5, 5), 4)(torch.zeros(1, 1, 1, 3)), r"a map of 1x3 has no cosine of frequency \(1, 0\)"),
        (lambda: nets.build("where:1+conv", (1, 4, 4), 2, 1, (1,), (1,)), "1 waves on a map of 4x4 .* take 2"),
        (
            lambda: nets.build("where", (1, 4, 4), 2, 1, (1, 1), (2, 2)),
            "maps of one position, where 'where' has no path: add conv",
        ),
    ],
)
def test_waves_that_are_not_there_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# ---- what it is


@pytest.mark.parametrize(("size", "kernel"), [((4, 3), 3), ((5,), 3), ((2, 3, 2), (1, 3, 1))], ids=str)
def test_a_convolution_and_all_waves_span_the_locally_connected_layers(size, kernel):
    """Filters of their own at every position: positions x (fan in) maps, each of which the paths reach, and no others."""
    positions, dims = math.prod(size), len(size)
    conv = Conv(1, 1, kernel, dims=dims).double()
    where = Where(1, 1, size, positions - 1, kernel, dims=dims).double()
    spanned = []
    for path in (conv, where):
        weight = torch.zeros_like(path.weight)
        for place in range(weight.numel()):
            weight.view(-1)[place] = 1
            path.weight.data = weight
            spanned.append(matrix_of(path, (1, *size)).weight.flatten())
            weight.view(-1)[place] = 0
    spanned = torch.stack(spanned)
    local = torch.zeros(positions * conv.weight.shape[2], positions, positions, dtype=torch.float64)
    each = conv.columns(torch.eye(positions, dtype=torch.float64).reshape(positions, 1, *size))[:, :, 0]  # (inputs, S, in)
    for s, i in itertools.product(range(positions), range(each.shape[2])):
        local[s * each.shape[2] + i, s] = each[:, s, i]
    local = local.flatten(1)
    rank = torch.linalg.matrix_rank
    assert rank(spanned) == rank(local) == rank(torch.cat([spanned, local])) == len(local)


@pytest.mark.parametrize("options", [{}, {"groups": 2}, {"padding_mode": "zeros", "stride": 2}], ids=str)
def test_it_is_its_formula(options):
    where = Where(4, 2, (3, 3) if "stride" in options else (6, 6), 4, 3, **options).double()
    x = torch.randn(2, 4, 6, 6, dtype=torch.float64)
    conv = Conv(4, 2, 3, **options).double()
    phi, expected = where.phi(x), 0
    for k, weight in enumerate(where.weight.detach().unflatten(0, (4, -1))):
        conv.weight.data = weight
        expected = expected + phi[k] * conv(x)
    torch.testing.assert_close(where(x), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(where.gram(x), torch.einsum("bski,bskj->kij", where.columns(x), where.columns(x)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("name", "constructor", "shape"), [case for case in PATHS if case.values[0].startswith("where")])
def test_the_gram_by_squares_is_that_of_the_columns(name, constructor, shape, dtype):
    """Also where the last cosine has lost its sine, on a map larger than made for."""
    path, x = constructor().to(dtype), 1 + torch.randn(5, *shape, dtype=dtype)
    columns = path.columns(x.double())
    expected = torch.einsum("bski,bskj->kij", columns, columns)
    found = path.gram(x).double()
    assert float((found - expected).abs().max() / expected.abs().max()) < (1e-12 if dtype == torch.float64 else 1e-5)


def test_blocks_that_share_their_rows_are_multiplied_once():
    """The product of one block, for all: rows that repeat take no memory."""
    where, g = Where(2, 3, (6, 6), 4).double(), torch.randn(2, 3, 6, 6, dtype=torch.float64)
    assert where.rows(g).stride(2) == 0
    assert where.rows(g).untyped_storage().nbytes() == g.untyped_storage().nbytes()


# ---- only what breaks


def projected(path, in_shape, size, step=1):
    """The mean of T_g^-1 M T_g over all shifts, on matrices; outputs move by 1 where inputs move by ``step``."""
    total = 0
    for shift in shifts(size):
        by = tuple(step * s for s in shift)
        shifted = nn.Module()
        shifted.weight = path.weight
        shifted.forward = lambda x, by=by, shift=shift: moved(path(moved(x, by)), tuple(-s for s in shift))
        total = total + matrix_of(shifted, in_shape).weight
    return total / len(shifts(size))


@pytest.mark.parametrize(
    ("make", "in_shape", "step"),
    [
        (lambda: Where(2, 2, (4, 5), 4), (2, 4, 5), 1),
        (lambda: Where(2, 2, (4, 4), 15, 3, groups=2), (2, 4, 4), 1),
        (lambda: Where(2, 2, (3, 4), 4, 3, 2), (2, 6, 8), 2),
        (lambda: Where(2, 2, (6,), 2, dims=1), (2, 6), 1),
        (lambda: Where(1, 2, (3, 3, 2), 5, dims=3), (1, 3, 3, 2), 1),
    ],
    ids=["2-d", "all, groups", "stride", "1-d", "3-d"],
)
def test_its_projection_onto_equivariant_maps_is_zero(make, in_shape, step):
    where = make().double()
    size = where.out_size(in_shape[1:])
    assert projected(where, in_shape, size, step).abs().max() < 1e-12


def test_with_zero_padding_a_part_of_its_projection_is_left():
    """|P(M)| / |M|: the 10 % of the docstring, which random weights have up to chance."""
    torch.manual_seed(0)
    where = Where(4, 4, (8, 8), 4, padding_mode="zeros").double()
    left = projected(where, (4, 8, 8), (8, 8)).norm() / matrix_of(where, (4, 8, 8)).weight.norm()
    assert float(left) == pytest.approx(0.10, abs=0.02)


def test_a_convolution_is_its_own_projection():
    """The negative control."""
    conv = Conv(2, 2).double()
    torch.testing.assert_close(projected(conv, (2, 4, 4), (4, 4)), matrix_of(conv, (2, 4, 4)).weight)


def orbit_gradients(model, x, total):
    """Gradients of all free paths, by name: the mean over all shifts by the total stride, and the mean of their norms."""
    free = {name: p for name, p in model.named_parameters() if ".where." in name or ".rest." in name}
    means = {name: torch.zeros_like(p) for name, p in free.items()}
    norms = dict.fromkeys(free, 0.0)
    steps = shifts(x.shape[2:], total)
    for shift in steps:
        loss = nn.functional.cross_entropy(model(moved(x, shift)), torch.arange(len(x)) % 3)
        for (name, _), g in zip(free.items(), torch.autograd.grad(loss, list(free.values())), strict=True):
            means[name] += g / len(steps)
            norms[name] += float(g.norm()) / len(steps)
    return {name: (float(means[name].norm()), norms[name]) for name in free}


def silenced(model):
    """The strictly equivariant network: breaking paths at zero."""
    for name, parameter in model.named_parameters():
        if ".where." in name or ".rest." in name:
            nn.init.zeros_(parameter)
        elif name.endswith("bias.weight"):
            nn.init.normal_(parameter, std=0.1)
    return model.double()


def strided(mode):
    """Convolutions of stride 2 with waves beside them, ReLU, a head of the mean over positions and the rest."""

    def block(inputs, outputs, size):
        conv = Conv(inputs, outputs, 3, 2, padding=(1, 1, 1, 1), padding_mode=mode)
        shape = (outputs, size, size)
        free = Affine(Where.beside(conv, shape, 4), WhereBias(shape, 4))
        return Relaxed({"conv": conv}, {"where": free})

    head = Relaxed({"pool": Pool(4, 9, 3)}, {"rest": Centred(4, 9, 3)})
    return nn.Sequential(block(2, 3, 6), nn.ReLU(), block(3, 4, 3), nn.ReLU(), nn.Flatten(), head)


def test_the_mean_gradient_over_shifts_vanishes_at_an_equivariant_network():
    torch.manual_seed(0)
    polyphase = nets.build("where+conv", (2, 8, 8), 3, 2, channels=(1, 2), strides=(1, 2), hidden=4)
    for model, x, total in ((strided("circular"), (2, 12, 12), 4), (polyphase, (2, 8, 8), 2)):
        found = orbit_gradients(silenced(model), torch.randn(3, *x, dtype=torch.float64), total)
        assert len(found) >= 4
        for name, (mean, size) in found.items():
            assert size > 1e-4, name
            assert mean < 1e-12 * max(1.0, size), name


def test_with_zero_padding_some_of_the_mean_gradient_is_left():
    torch.manual_seed(0)
    found = orbit_gradients(silenced(strided("zeros")), torch.randn(3, 2, 12, 12, dtype=torch.float64), 4)
    left = [mean / size for name, (mean, size) in found.items() if "linear" in name]
    assert 0.2 < min(left) < max(left) < 0.35


def test_a_dense_head_is_not_in_the_kernel():
    """The negative control: beside Pool, Dense has the gradient of Pool too."""
    torch.manual_seed(0)
    model = strided("circular")
    model[5] = Relaxed({"pool": Pool(4, 9, 3)}, {"rest": Dense((36,), (3,))})
    found = orbit_gradients(silenced(model), torch.randn(3, 2, 12, 12, dtype=torch.float64), 4)
    mean, size = found["5.rest.weight"]
    assert mean > 0.1 * size


# ---- the head


def test_pool_and_the_rest_are_the_dense_layer():
    weight, x = torch.randn(5, 3, 4, dtype=torch.float64), torch.randn(2, 3, 4, dtype=torch.float64)
    pool, rest = Pool(3, 4, 5).double(), Centred(3, 4, 5).double()
    both = functional_call(pool, {"weight": weight.sum(2)[None]}, x.flatten(1))
    both = both + functional_call(rest, {"weight": weight.flatten(1)[None]}, x.flatten(1))
    torch.testing.assert_close(both, torch.einsum("ocp,bcp->bo", weight, x))


def test_the_rest_does_not_see_what_pool_sees():
    rest, x = Centred(3, 4, 5).double(), torch.randn(2, 12, dtype=torch.float64)
    constant = torch.randn(2, 3, 1, dtype=torch.float64).expand(-1, -1, 4).flatten(1)
    torch.testing.assert_close(rest(x + constant), rest(x))
    torch.testing.assert_close(nn.functional.linear(x, rest.plain(None).weight), rest(x))


# ---- the layer


def test_pictures_are_the_filters_of_every_wave():
    assert Where(2, 3, (5, 5), 4).pictures().shape == (4 * 3 * 2, 3, 3)
    assert Where(2, 3, (7,), 2, 5, dims=1).pictures().shape == (2 * 3 * 2, 1, 5)
    assert Conv(2, 3, dims=3).pictures().shape == (3 * 2 * 3, 3, 3)


def test_layers_where_has_four_waves_and_takes_smaller_maps():
    layer = layers.where((2, 8, 8), (3, 4, 4))
    assert (layer.linear.waves, layer.bias.waves, layer.linear.stride) == (4, 4, (2, 2))
    assert layer(torch.randn(1, 2, 8, 8)).shape == (1, 3, 4, 4)
    assert layers.where((2, 9), (3, 9)).linear.waves == 2
    assert layers.where((2, 5, 5, 5), (3, 5, 5, 5)).linear.waves == 6


def test_a_block_of_one_position_has_no_waves():
    """And a smaller map has as many as it can."""
    net = nets.build("where:8+conv", (1, 8, 8), 2, 1, (1, 2, 2, 2), (1, 2, 2, 2))
    assert [[*block] for block in net.blocks] == [["conv", "where:8"]] * 3 + [["conv"]]
    assert [block["where:8"].linear.waves for block in net.blocks[:3]] == [8, 8, 3]
    assert [layers.waves_of(name) for name in ("where:8", "where", "where:x", "gconv:c4", "where:0")] == [8] + [None] * 4


def test_waves_of_a_path_stay_the_same_functions_on_other_sizes():
    """Made for 2x2 maps, whose waves are cosines only; on 4x4 maps the second must still vary along the width alone."""
    path = Where(1, 1, (2, 2), 2)
    path.weight.data.zero_()
    path.weight.data[1, 0, 4] = 1.0
    bias = WhereBias((1, 2, 2), 2)
    bias.weight.data[1] = 1.0
    for y in (path(torch.ones(1, 1, 4, 4)), bias(torch.ones(1, 1, 4, 4))):
        torch.testing.assert_close(y[0, 0], 2**0.5 * torch.tensor([1.0, 0.0, -1.0, 0.0]).expand(4, 4), rtol=0, atol=1e-6)
    for made, size, lost in (((8, 8), (8, 2), "sine of frequency"), ((8, 8), (1, 8), "no cosine of frequency")):
        with pytest.raises(ValueError, match=lost):
            Where(1, 1, made, 4)(torch.ones(1, 1, *size))


def test_the_gram_of_waves_made_for_other_sizes():
    path, x = Where(2, 3, (2, 4), 3).double(), torch.randn(3, 2, 4, 8, dtype=torch.float64)
    columns = path.columns(x).flatten(0, 1)
    torch.testing.assert_close(path.gram(x), torch.einsum("ski,skj->kij", columns, columns))
