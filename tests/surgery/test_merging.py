"""Plain forms: every path as layers of torch's, alone and merged with others."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from architectures import assert_plain, shaken
from autosym.linear import plain
from autosym.linear.conv import Conv
from autosym.linear.dense import Bias, Dense
from autosym.nn import layers
from autosym.nn.layers import Affine, Branch, Relaxed
from autosym.surgery import merging
from autosym.surgery.merging import Polyphase, Sum
from factories import PATHS
from own import Cross, LowRank, Mix, RowMean, row_mean

SAME = {"rtol": 1e-10, "atol": 1e-10}


def inputs(*shape, samples=3):
    return torch.randn(samples, *shape, dtype=torch.float64)


@pytest.mark.parametrize(("name", "constructor", "shape"), [path for path in PATHS if not path.id.startswith("bias")])
def test_every_path_has_a_plain_form(name, constructor, shape):
    path, x = shaken(constructor().double()), inputs(*shape)
    hard = merging.plain(name, path, in_shape=shape)
    assert_plain(hard, ())
    assert_close(hard(x), path(x), **SAME)


@pytest.mark.parametrize(("name", "constructor", "shape"), [path for path in PATHS if not path.id.startswith("bias")])
def test_the_cheaper_form_of_a_path_is_the_matrix_that_it_has_by_default(name, constructor, shape):
    path = shaken(constructor().double())
    x, matrix = inputs(*shape), plain.matrix_of(path, shape)
    assert_close((x.flatten(1) @ matrix.weight.mT).reshape(-1, *matrix.out_shape), path(x), **SAME)


def test_a_matrix_keeps_the_constant_of_a_branch_and_leaves_its_last_bias():
    branch = shaken(LowRank((2, 3, 4), (3, 3, 4), 2).double())
    x, matrix = inputs(2, 3, 4), branch.plain((2, 3, 4))
    y = x.flatten(1) @ matrix.weight.mT + matrix.constant + branch.offset().expand(matrix.out_shape).flatten()
    assert_close(y.reshape(-1, *matrix.out_shape), branch(x), **SAME)
    assert Affine(branch.down, branch.inside).plain((2, 3, 4)).constant is None


class Curved(Branch):
    """Not linear."""

    def __init__(self):
        super().__init__()
        self.path = Dense((4,), (3,))

    def forward(self, x):
        return self.path(x).relu()


def test_what_is_not_linear_has_no_matrix():
    with pytest.raises(ValueError, match="Curved is not linear in its input"):
        merging.plain("layer", shaken(Curved().double()), in_shape=(4,))


def test_a_constant_that_is_no_bias_is_refused():
    branch = Curved()
    branch.constant = "path"
    with pytest.raises(TypeError, match="constant of Curved must name a Bias"):
        branch.offset()


def test_a_matrix_that_would_be_too_large_is_refused_before_it_is_made(monkeypatch):
    monkeypatch.setattr(plain, "LARGEST", 2 * 5 * 4 * 3 * 5 * 4 - 1)
    with pytest.raises(ValueError, match=r"RowMean of inputs \(2, 5, 4\) would be a dense layer of 2400 weights"):
        merging.plain("layer", RowMean(2, 3), in_shape=(2, 5, 4))
    monkeypatch.setattr(plain, "LARGEST", 2 * 5 * 4 * 3 * 5 * 4)
    merging.plain("layer", RowMean(2, 3), in_shape=(2, 5, 4))


def test_a_shape_that_is_not_known_is_asked_for():
    with pytest.raises(ValueError, match=r"no plain form for alone of layer \(RowMean\).* pass data"):
        merging.plain("layer", RowMean(2, 3))
    layer = Relaxed({"rows": RowMean(2, 3)}, {"fc": Dense((2, 5, 4), (3, 5, 4))})  # one path of a layer knows it for all
    assert_close(merging.plain("layer", shaken(layer.double()))(x := inputs(2, 5, 4)), layer(x), **SAME)


def test_a_path_that_says_it_is_a_convolution_merges_with_others():
    layer = shaken(Relaxed({"conv": layers.conv((2, 5, 4), (3, 5, 4)), "cross": Cross(2, 3)}, {}).double())
    hard = merging.plain("layer", layer)
    assert type(hard) is nn.Conv2d
    assert_close(hard(x := inputs(2, 5, 4)), layer(x), **SAME)


@pytest.mark.parametrize("dropped", [set(), {("rows", "weights")}, {("low", "weights")}, {("low", "weights"), ("low", "bias")}])
@pytest.mark.parametrize("stride", [1, 2])
def test_own_paths_that_are_downsampled(stride, dropped):
    small = (3, 4 // stride, 6 // stride)
    layer = Relaxed(
        {"conv": layers.conv((2, 4, 6), small), "rows": row_mean((2, 4, 6), small)},
        {"low": LowRank((2, 4, 6), small, 2), "f-fc": layers.Factored((2, 4, 6), small)},
        stride=stride,
    )
    shaken(layer.double())
    hard = merging.plain("layer", layer, dropped)
    for path, part in dropped:  # weights with all that is multiplied by them
        last = {"rows": {"weights": "linear"}, "low": {"weights": "up", "bias": "bias"}}[path][part]
        nn.init.zeros_(layer[path].get_submodule(last).weight)
    assert_close(hard(x := inputs(2, 4, 6)), layer(x), **SAME)
    assert any(isinstance(module, Polyphase) for module in hard.modules()) == (stride == 2)


def test_a_free_convolution_in_a_layer_that_downsamples():
    layer = shaken(
        Relaxed({"conv": Conv(1, 2)}, {"own": Affine(Conv(1, 2, 3, stride=2), Bias((2, 1, 1), (2, 2, 2)))}, 2).double()
    )
    hard = merging.plain("layer", layer)
    assert type(hard) is Sum
    assert_close(hard(x := inputs(1, 4, 4)), layer(x), **SAME)


def test_the_bias_of_symmetric_paths_that_are_gone():
    full = (2, 4, 4)
    for shape in ((2, 1, 1), (2, 1, 4)):
        layer = Relaxed({"conv": Affine(Conv(1, 2), Bias(shape, full))}, {"fc": Dense((1, 4, 4), (2, 2, 2))}, stride=2)
        shaken(layer.double())
        if shape[2] > 1:
            with pytest.raises(ValueError, match="symmetric paths of layer would be dropped, but not their bias"):
                merging.plain("layer", layer, {("conv", "weights")})
            continue
        hard = merging.plain("layer", layer, {("conv", "weights")})
        nn.init.zeros_(layer["conv"].linear.weight)
        assert_close(hard(x := inputs(1, 4, 4)), layer(x), **SAME)


@pytest.mark.parametrize("stride", [1, 2])
def test_a_bias_of_a_symmetric_path_that_depends_on_position(stride):
    branch = Affine(Conv(1, 2), Bias((2, 1, 4), (2, 4, 4)))
    layer = shaken(
        Relaxed({"conv": branch}, {"f-fc": layers.Factored((1, 4, 4), (2, 4 // stride, 4 // stride))}, stride).double()
    )
    assert_close(merging.plain("layer", layer)(x := inputs(1, 4, 4)), layer(x), **SAME)


def test_weights_shared_by_positions_beside_weights_that_are_not():
    """A dense map of each token, and one of all of them."""
    each = Affine(Dense((4,), (3,)), Bias((1, 3), (5, 3)))
    layer = shaken(Relaxed({"each": each}, {"all": layers.fc((5, 4), (5, 3))}).double())
    hard = merging.plain("layer", layer)
    assert_close(hard(x := inputs(5, 4)), layer(x), **SAME)
    assert [type(part) for part in hard] == [nn.Sequential, nn.Linear]


def test_the_bias_of_lifted_features_of_an_own_path():
    layer = shaken(Affine(Mix(2, 3), Bias((3, 1, 1, 1), (3, 4, 5, 5))).double())
    assert layer.offset().shape == (12, 1, 1)
    assert_close(merging.plain("layer", layer, in_shape=(8, 5, 5))(x := inputs(8, 5, 5)), layer(x), **SAME)
