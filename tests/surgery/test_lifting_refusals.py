"""What ``lift`` refuses, by name and with the reason."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autosym
from autosym.linear.groups import GROUPS, with_translations


def cnn(*middle, width=8, size=8):
    """A small CNN on (3, size, size) with some layers in its middle."""
    return nn.Sequential(nn.Conv2d(3, width, 3, padding=1), *middle, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 2))


def images(size=8, channels=3, width=None):
    torch.manual_seed(0)
    return torch.randn(2, channels, size, width or size)


class Own(nn.Module):
    """A network with one function between two convolutions."""

    def __init__(self, between, width=8):
        super().__init__()
        self.between = between
        self.first, self.second, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(width, 8, 3, padding=1), nn.Linear(8, 2)

    def forward(self, x):
        y = self.between(self, x, F.relu(self.first(x)))
        return self.head(F.relu(self.second(y)).mean((2, 3)))


class Scaled(nn.Module):
    """Layer scale: one number for each channel."""

    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(8, 1, 1))

    def forward(self, x):
        return self.gamma * x


class Doubled(nn.Conv2d):
    """A convolution of the inputs, times their size: nothing that a convolution computes."""

    def forward(self, x):
        return super().forward(x) * x.abs().mean()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        tokens = x.flatten(2).transpose(1, 2)
        return self.attention(tokens, tokens, tokens)[0].transpose(1, 2).unflatten(2, x.shape[2:])


@pytest.mark.parametrize(
    ("middle", "message"),
    [
        (
            nn.Conv2d(8, 8, 2, padding="same"),
            r"1 \(Conv2d\) cannot be lifted: its kernel, stride, dilation or padding differs by side",
        ),
        (
            nn.Conv2d(8, 8, 2),
            r"1 \(Conv2d\) cannot be lifted: its kernel \(2, 2\) is even: a filter must turn about its centre",
        ),
        (nn.Conv2d(8, 8, (1, 3), padding=(0, 1)), r"1 \(Conv2d\) .* differs by side .* so it cannot turn"),
        (nn.Conv2d(8, 8, 3, 3, 1), r"1 \(Conv2d\) .* 8x8 has no grid of stride 3 that the group keeps: use images"),
        (nn.MaxPool2d(3, 3, 1), r"1 \(MaxPool2d\) .* 8x8 has no grid of stride 3"),
        (nn.MaxPool2d((2, 1)), r"1 \(MaxPool2d\) .* differs by side"),
        (nn.ConvTranspose2d(8, 8, 2, 2), r"1 \(ConvTranspose2d\) cannot be lifted: a transposed convolution"),
        (nn.LayerNorm((8, 8, 8)), r"1 \(LayerNorm\) .* not by field; use nn.GroupNorm"),
        (nn.InstanceNorm2d(8, affine=True), r"1 \(InstanceNorm2d\) .* by channel; use nn.GroupNorm"),
        (nn.PReLU(8), r"1 \(PReLU\) .* a slope for each channel; use nn.PReLU\(\)"),
        (Attention(), r"1.attention \(MultiheadAttention\) cannot be lifted: attention has no form"),
        (Scaled(), r"1 \(Scaled\) has parameters of its own, which may differ by channel"),
        (Doubled(8, 8, 3, padding=1), r"1 \(Doubled\) has parameters of its own"),
        (nn.Linear(8, 8), r"1 \(Linear\) cannot be lifted: it acts on the last axis of \(8, 8, 8\)"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_layers_that_have_no_form_over_a_group(middle, message):
    with pytest.raises(ValueError, match=message):
        autosym.lift(cnn(middle), images(), "c4")


def shuffled(model, x, y):
    batch, channels, height, width = y.shape
    return y.view(batch, 2, channels // 2, height, width).transpose(1, 2).reshape(y.shape)


@pytest.mark.parametrize(
    ("between", "width", "message"),
    [
        (shuffled, 8, "what reaches second.gconv:c4.linear does not follow c4: .*the order of channels"),
        (lambda m, x, y: y[:, :, ::2, ::2], 8, "what reaches second.gconv:c4.linear does not follow c4"),
        (lambda m, x, y: y[:, 2:6], 4, "what reaches second.gconv:c4.linear does not follow c4"),
        (lambda m, x, y: y[:, :6], 6, r"second \(Conv2d\) cannot be lifted: its input has 6 channels, no whole fields"),
        (lambda m, x, y: torch.cat([x, y], 1), 11, r"second \(Conv2d\) cannot be lifted: its input is fields beside something"),
        (lambda m, x, y: m.first(x), 8, r"first \(Conv2d\) cannot be lifted: it is used more than once"),
        (
            lambda m, x, y: y * m.first.weight.mean(),
            8,
            "cannot run after first .*weight.* reads attributes or numbers of channels",
        ),
        (lambda m, x, y: y + torch.linspace(0, 1, 8), 8, "what reaches second.gconv:c4.linear does not follow c4"),
        (lambda m, x, y: y + torch.arange(8.0)[:, None, None], 8, "what reaches second.gconv:c4.linear does not follow c4"),
    ],
)
def test_functions_between_layers_that_do_not_turn(between, width, message):
    with pytest.raises(ValueError, match=message):
        autosym.lift(Own(between, width), images(), "c4")


def test_numbers_of_channels_in_the_code():
    model = Own(lambda m, x, y: y.view(len(y), 8, -1).view(len(y), 8, 8, 8))
    autosym.lift(model, images(), "c4")
    with pytest.raises(ValueError, match=r"cannot run after first .* take them from the tensors instead"):
        autosym.lift(model, images(), "c4", "parameters")


def test_functions_that_do_not_follow_shifts():
    def dropped(model, x, y):
        return F.dropout(F.max_pool2d(y, 2), 0.1, training=model.training)

    with pytest.raises(ValueError, match=r"the output does not follow translations: .*it calls max_pool2d: make that a module"):
        autosym.lift(Own(dropped).eval(), images(), "translations")
    with pytest.raises(ValueError, match=r"the output does not follow translations"):
        autosym.lift(Own(lambda m, x, y: y + torch.linspace(0, 1, 8)).eval(), images(), "translations")
    with pytest.raises(ValueError, match=r"the output does not follow translations"):
        autosym.lift(cnn(nn.LayerNorm((8, 8, 8))), images(), "translations")


@pytest.mark.parametrize(
    ("middle", "message"),
    [
        (nn.Conv2d(8, 8, 3, (1, 2), 1), r"1 \(Conv2d\) cannot be lifted: its stride \(1, 2\) differs by side"),
        (nn.Conv2d(8, 8, 3, 3, 1), r"1 \(Conv2d\) .* 8x8 has no polyphase grids of stride 3"),
        (nn.MaxPool2d(3), r"1 \(MaxPool2d\) .* 8x8 has no polyphase grids of stride 3"),
        (nn.Conv2d(8, 8, 19, padding=9), r"1 \(Conv2d\) .* reaches around a map of \(8, 8\) more than once"),
    ],
)
def test_layers_that_have_no_form_over_shifts(middle, message):
    with pytest.raises(ValueError, match=message):
        autosym.lift(cnn(middle), images(), "translations")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"group": "c8"}, "c8 interpolates, so no network over it is exactly equivariant: use c2, c4, d4"),
        ({"group": "c5"}, "unknown group 'c5': use c2, c4, d4, flip-horizontal, flip-vertical, translations, or a Group"),
        ({"group": with_translations(GROUPS["c4"], 8, 8)}, "is no group of turns and flips"),
        ({"group": "c4", "match": "width"}, "match is 'width': use 'channels' or 'parameters'"),
        ({"group": "c4", "weights": "trained"}, "weights is 'trained': use 'scratch' or 'projected'"),
        ({"group": "c4", "padding": "zeros"}, "padding is 'zeros': use 'circular'"),
        ({"group": "c4", "weights": "projected", "match": "parameters"}, "weights='projected' needs as many channels"),
        ({"group": "translations", "match": "parameters"}, "translations keep the trained weights and widths"),
        ({"group": "c4", "example": images(8, width=6)}, "c4 turns images, so they must be square, but this one is 8x6"),
        ({"group": "c4", "example": images()[0]}, r"inputs are \(3, 8, 8\).*this is one sample; give a batch, x\[:2\]"),
        ({"group": "c4", "example": images().movedim(1, -1)}, r"their channels are last; use x\.movedim\(-1, 1\)"),
        (
            {"group": "c4", "example": torch.zeros(2, 3, 8, 8, dtype=torch.long)},
            "example must be a small batch of images .B, C, H, W.",
        ),
        ({"group": "c4", "example": images(channels=2)}, r"the model does not take the example, \(2, 2, 8, 8\); torch says"),
    ],
    ids=str,
)
def test_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        autosym.lift(**({"model": cnn(), "example": images()} | arguments))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.Conv2d(3, 8, 3)), r"must return \(B, outputs\) for a batch of 2, got \(2, 8, 6, 6\)"),
        (nn.Sequential(nn.Flatten(), nn.Linear(192, 2)), r"1 \(Linear\) cannot be lifted: it is a dense map of the image"),
        (nn.Flatten(), "the model has no parameters"),
    ],
)
def test_models(model, message):
    for group in ("c4", "translations"):
        with pytest.raises(ValueError, match=message):
            autosym.lift(model, images(), group)


def test_a_model_is_lifted_once_and_before_it_is_relaxed():
    for made in (autosym.lift(cnn(), images(), "c4"), autosym.relax(cnn(), images())):
        with pytest.raises(ValueError, match="lifted or relaxed already: lift the plain model, then relax it"):
            autosym.lift(made, images(), "c4")


def test_weights_that_have_no_projection():
    with pytest.raises(ValueError, match=r"0 \(Conv2d\) cannot be lifted: its weights .* use a width that"):
        autosym.lift(cnn(width=6), images(), "c4", weights="projected")


def test_layers_that_take_no_part():
    """A pool that is never called stays; a layer with weights would never learn anything."""
    model = Own(lambda m, x, y: y)
    model.pool = nn.MaxPool2d(3)
    assert autosym.lift(model, images(), "c4").pool.kernel_size == 3
    model.extra = nn.Linear(8, 2)
    with pytest.raises(ValueError, match=r"extra \(Linear\) took no part in the forward pass: remove it"):
        autosym.lift(model, images(), "c4")
    with pytest.raises(
        ValueError, match="the outputs add up maps that other layers read too: end the model with one dense layer"
    ):
        autosym.lift(Residual(), images(), "c4")
    autosym.lift(Residual(), images(), "translations")


class Residual(nn.Module):
    """Features, not classes: the outputs are a sum over layers."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        x = F.relu(self.one(x))
        return (x + self.two(x)).mean((2, 3))


def test_a_number_of_ones_own_is_frozen():
    """The evidence does not cover it, and no turn sees it."""
    model = Own(lambda m, x, y: m.gain * y)
    model.gain = nn.Parameter(torch.tensor(1.5))
    lifted = autosym.lift(model, images(), "c4")
    assert not lifted.gain.requires_grad
    assert "frozen" in str(lifted.lifting)
