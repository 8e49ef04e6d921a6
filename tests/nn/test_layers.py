import pytest
import torch
from torch import nn

from autosym.linear.conv import Conv
from autosym.linear.dense import Bias, Pool
from autosym.linear.groups import GROUPS
from autosym.linear.path import NOTHING, Kept
from autosym.nn import layers
from autosym.nn.layers import Relaxed, polyphase
from factories import LAYERS

IN, OUT, HALF = (2, 6, 8), (3, 6, 8), (3, 3, 4)
SHIFTS = [(1, 0), (0, 1), (3, 2), (5, 7)]


def two_convs():
    return {"small": layers.conv(IN, OUT), "large": layers.conv(IN, OUT, kernel_size=5)}


class PerPath(nn.Module):
    """The wrong thing: every path chooses its own grid."""

    def __init__(self, paths, stride):
        super().__init__()
        self.paths, self.stride = nn.ModuleDict(paths), stride

    def forward(self, x):
        return sum(polyphase(path(x), self.stride) for path in self.paths.values()) / len(self.paths)


def shift_error(layer, x, shift):
    """How far the layer's output for a shifted input is from every shift of its output, relative to its size."""
    y, moved = layer(x).detach(), layer(x.roll(shift, (-2, -1))).detach()
    per_sample = [
        (moved - y.roll((i, j), (-2, -1))).flatten(1).norm(dim=1) for i in range(y.shape[-2]) for j in range(y.shape[-1])
    ]
    return float((torch.stack(per_sample).min(0).values / y.flatten(1).norm(dim=1)).max())


@pytest.mark.parametrize("name", LAYERS)
def test_layers_have_their_shape_and_treat_samples_alone(name):
    layer, x = LAYERS[name]().double(), torch.randn(3, 2, 4, 6, dtype=torch.float64)
    y = layer(x)
    assert y.shape == (3, 3, 4, 6)
    for i in range(3):
        torch.testing.assert_close(y[i : i + 1], layer(x[i : i + 1]), rtol=0, atol=1e-12)


def test_factored_is_equation_5():
    layer = layers.Factored(IN, HALF).double()
    for path in (layer.b_1, layer.b_2):
        nn.init.normal_(path.weight)
    x = torch.randn(2, *IN, dtype=torch.float64)
    theta_2, theta_1 = layer.theta_2.weight.transpose(0, 1), layer.theta_1.weight.mT
    h = torch.einsum("bcs,dcs->bdc", x.flatten(2), theta_2) + layer.b_2.weight.view(1, 3, 1)
    y = torch.einsum("bdc,dct->bdt", h, theta_1) + layer.b_1.weight.view(1, 1, 12)
    torch.testing.assert_close(layer(x), y.view(2, *HALF), rtol=1e-12, atol=1e-12)


def test_relaxed_is_the_mean_of_its_paths():
    layer = Relaxed({"conv": layers.conv(IN, OUT)}, {"fc": layers.fc(IN, OUT), "f-fc": layers.Factored(IN, OUT)}).double()
    x = torch.randn(2, *IN, dtype=torch.float64)
    mean = (layer["conv"](x) + layer["fc"](x) + layer["f-fc"](x)) / 3
    torch.testing.assert_close(layer(x), mean, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("stride", [1, 2])
def test_relaxed_counts_every_symmetric_path_in_the_mean(stride):
    free = layers.fc(IN, (OUT[0], OUT[1] // stride, OUT[2] // stride))
    layer, x = Relaxed(two_convs(), {"fc": free}, stride).double(), torch.randn(2, *IN, dtype=torch.float64)
    total = polyphase(layer["small"](x) + layer["large"](x), stride) + layer["fc"](x)
    torch.testing.assert_close(layer(x), total / 3, rtol=1e-12, atol=1e-12)


def test_relaxed_with_stride_adds_free_paths_to_the_chosen_grid():
    layer = Relaxed({"conv": layers.conv(IN, OUT)}, {"fc": layers.fc(IN, HALF)}, stride=2).double()
    x = torch.randn(2, *IN, dtype=torch.float64)
    torch.testing.assert_close(layer(x), (polyphase(layer["conv"](x), 2) + layer["fc"](x)) / 2, rtol=1e-12, atol=1e-12)


def test_relaxed_free_path_does_not_sway_the_choice():
    layer = Relaxed({"conv": layers.conv(IN, OUT)}, {"fc": layers.fc(IN, HALF)}, stride=2).double()
    x = torch.randn(4, *IN, dtype=torch.float64)
    before = layer(x) * 2 - layer["fc"](x)
    layer["fc"].linear.weight.data *= 1000
    torch.testing.assert_close(layer(x) * 2 - layer["fc"](x), before, rtol=1e-9, atol=1e-9)


UNNAMED = Kept(every=True)  # a symmetry, but of what is not said


@pytest.mark.parametrize(
    ("branch", "expected"),
    [
        (layers.conv(IN, OUT), Kept(equivariant=True)),
        (layers.s_conv(IN, OUT, 4), Kept(equivariant=True)),
        (layers.gconv((1, 6, 6), (8, 6, 6), GROUPS["c4"], lift=True), Kept(equivariant=True, groups=("c4", "c2"))),
        (
            layers.turn((1, 6, 6), (8, 6, 6), GROUPS["d4"], True, keeps=GROUPS["c4"]),
            Kept(equivariant=True, groups=("c4", "c2")),
        ),
        (layers.Affine(Pool(2, 48, 3), Bias((3,))), Kept(invariant=True, every=True)),
        (nn.Conv2d(2, 3, 3), Kept(equivariant=True)),
        (nn.Sequential(nn.Conv1d(2, 3, 3), nn.Linear(4, 4)), UNNAMED),
        (layers.Affine(Conv(2, 3), Bias(OUT)), UNNAMED),
        (layers.fc(IN, OUT), UNNAMED),
        (nn.Identity(), UNNAMED),
    ],
    ids=["conv", "s-conv", "gconv", "turn", "pool", "torch's", "torch's and dense", "bias of positions", "fc", "no path"],
)
def test_a_symmetric_path_keeps_what_all_its_parts_do_and_a_free_one_nothing(branch, expected):
    assert Relaxed({"any": branch}, {}).keeps("any") == expected
    assert Relaxed({}, {"any": branch}).keeps("any") == NOTHING


def test_relaxed_refuses_no_path_or_one_name_twice():
    with pytest.raises(ValueError, match="at least one path"):
        Relaxed({}, {})
    with pytest.raises(ValueError, match="a different name for each"):
        Relaxed({"a": layers.conv(IN, OUT)}, {"a": layers.fc(IN, OUT)})


@pytest.mark.parametrize("shape", [(2, 4, 6), (2, 3, 4, 6)], ids=str)
def test_polyphase_keeps_the_largest_grid_by_loops(shape):
    y = torch.randn(5, *shape, dtype=torch.float64)
    for kept, sample in zip(polyphase(y, 2), y, strict=True):
        grids = [sample[..., i::2, j::2] for i in range(2) for j in range(2)]
        assert torch.equal(kept, max(grids, key=lambda grid: float(grid.norm())))


def test_polyphase_chooses_per_sample():
    y = torch.zeros(4, 1, 4, 4)
    for n, (i, j) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
        y[n, 0, i::2, j::2] = n + 1
    assert torch.equal(polyphase(y, 2), torch.arange(1.0, 5).view(4, 1, 1, 1).expand(4, 1, 2, 2))


def test_polyphase_chooses_one_grid_for_all_channels():
    y = torch.zeros(1, 2, 2, 2)
    y[0, 0, 0, 0], y[0, 1, 1, 1] = 2.0, 3.0
    assert polyphase(y, 2).flatten().tolist() == [0.0, 3.0]


def test_polyphase_is_by_the_l2_norm():
    """A grid of one large negative value wins over one of many small positive ones (a sum or a maximum would not)."""
    y = torch.full((1, 1, 4, 4), 1.0)
    y[0, 0, 0, 0] = -10.0
    assert float(polyphase(y, 2)[0, 0, 0, 0]) == -10.0


def test_polyphase_of_maps_without_channels():
    y = torch.randn(2, 4, 6)
    assert torch.equal(polyphase(y, 2), polyphase(y[:, None], 2)[:, 0])


def test_polyphase_of_stride_1_and_3():
    y = torch.randn(2, 3, 6, 9)
    assert torch.equal(polyphase(y, 1), y)
    assert polyphase(y, 3).shape == (2, 3, 2, 3)


@pytest.mark.parametrize("size", [(5, 4), (4, 5)], ids=str)
def test_polyphase_refuses_sizes_that_do_not_halve(size):
    with pytest.raises(ValueError, match=f"{size[0]}x{size[1]} has no polyphase grids of stride 2"):
        polyphase(torch.randn(1, 1, *size), 2)


@pytest.mark.parametrize("shift", SHIFTS, ids=str)
def test_equivariant_layer_of_two_convs_with_one_choice(shift):
    layer = Relaxed(two_convs(), {}, stride=2).double()
    assert shift_error(layer, torch.randn(20, *IN, dtype=torch.float64), shift) < 1e-12


@pytest.mark.parametrize("shift", SHIFTS, ids=str)
def test_equivariant_negative_control_a_choice_per_path(shift):
    layer = PerPath(two_convs(), stride=2).double()
    assert shift_error(layer, torch.randn(20, *IN, dtype=torch.float64), shift) > 0.1


SQUARE = (2, 6, 6)


def conv_and_gconv(in_shape=SQUARE, lift=True, group="c4"):
    """Conv-like paths of different kinds, from images or from lifted features, to 8 channels."""
    out = (8, *in_shape[1:])
    paths = {
        "conv": layers.conv(in_shape, out),
        "gconv": layers.gconv(in_shape, out, GROUPS[group], lift),
        "s-conv": layers.s_conv(in_shape, out, 5),
    }
    return {name: path.double() for name, path in paths.items()}


@pytest.mark.parametrize(("in_shape", "lift"), [(SQUARE, True), ((4, 6, 6), False)], ids=["image", "lifted"])
@pytest.mark.parametrize("shift", SHIFTS, ids=str)
def test_equivariant_layer_of_conv_and_group_conv_with_one_choice(shift, in_shape, lift):
    paths, x = conv_and_gconv(in_shape, lift), torch.randn(20, *in_shape, dtype=torch.float64)
    assert shift_error(Relaxed(paths, {}, stride=2), x, shift) < 1e-12
    assert shift_error(PerPath(paths, stride=2), x, shift) > 0.1, "a choice for each path would do as well"
    del paths["s-conv"]
    assert shift_error(Relaxed(paths, {}, stride=2), x, shift) < 1e-12
    assert shift_error(PerPath(paths, stride=2), x, shift) > 0.1


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("group", ["c4", "d4"])
def test_equivariant_layer_of_two_group_convs_to_turns(group, stride):
    """Two group convolutions in one layer, downsampled together: turning the image turns the map and permutes its fields."""
    size, order = (2, 6, 6), len(GROUPS[group])
    small, large = (layers.gconv(size, (2 * order, 6, 6), GROUPS[group], True, kernel).double() for kernel in (1, 3))
    nn.init.normal_(small.bias.weight)
    layer, x = Relaxed({"small": small, "large": large}, {}, stride, GROUPS[group]), torch.randn(20, *size).double()
    y = layer(x).detach()
    assert y.shape[1:] == (2 * order, 6 // stride, 6 // stride)
    per_path = PerPath({"small": small, "large": large}, stride)
    for g in range(order):
        moved = GROUPS[group].act(g, x)
        torch.testing.assert_close(layer(moved).detach(), GROUPS[group].act_on_features(g, y), rtol=0, atol=1e-12)
    if stride > 1:  # turns move both choices alike; shifts do not
        assert shift_error(per_path, x, (1, 0)) > 0.1
    free = Relaxed({"small": small}, {"fc": layers.fc(size, y.shape[1:]).double()}, stride, GROUPS[group])
    assert (free(GROUPS[group].act(1, x)) - GROUPS[group].act_on_features(1, free(x))).abs().max() > 0.1


def test_group_layer_has_one_bias_for_every_field():
    layer = layers.gconv((2, 5, 5), (3 * 8, 5, 5), GROUPS["d4"], lift=True).double()
    assert layer.bias.weight.numel() == 3
    nn.init.normal_(layer.bias.weight)
    difference = layer(torch.zeros(1, 2, 5, 5, dtype=torch.float64))
    expected = layer.bias.weight.view(1, 3, 1, 1).repeat_interleave(8, 1).expand(1, 24, 5, 5)
    torch.testing.assert_close(difference, expected, rtol=0, atol=0)


def test_sparse_factored_is_equation_7():
    layer = layers.SparseFactored(IN, HALF, 20, 5).double()
    nn.init.normal_(layer.b_2.weight)
    x = torch.randn(2, *IN, dtype=torch.float64)
    theta_2 = (layer.u_2.weight @ layer.u_2.basis()).transpose(0, 1)
    theta_1 = layer.u_1.weight.mT @ layer.u_1.basis()
    h = torch.einsum("bcs,dcs->bdc", x.flatten(2), theta_2) + layer.b_2.weight.view(1, 3, 1)
    torch.testing.assert_close(layer(x), torch.einsum("bdc,dct->bdt", h, theta_1).view(2, *HALF), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("shift", SHIFTS, ids=str)
def test_equivariant_negative_control_a_free_path(shift):
    layer = Relaxed(two_convs(), {"fc": layers.fc(IN, HALF)}, stride=2).double()
    assert shift_error(layer, torch.randn(20, *IN, dtype=torch.float64), shift) > 0.1
