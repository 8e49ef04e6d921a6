"""Inputs with other axes than a network takes: the error says which, what is expected, and what mends it; other errors stay."""

import pytest
import torch
from torch import nn

import autosym
from autosym.curvature.input_shapes import explained, mended


def cnn(channels=1):
    return nn.Sequential(nn.Conv2d(channels, 2, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(2 * 36, 3))


X, COLOURED, Y = torch.randn(12, 1, 6, 6), torch.randn(12, 3, 6, 6), torch.arange(12) % 3


@pytest.mark.parametrize(
    ("model", "x", "there", "mends"),
    [
        (cnn(), X[:, 0], r"\(12, 6, 6\), but 0 .Conv2d.*expects \(B, 1, H, W\)", r"no channel axis; use x\[:, None\]"),
        (cnn(3), COLOURED.movedim(1, -1), r"\(\d+, 6, 6, 3\).*expects \(B, 3, H, W\)", r"use x\.movedim\(-1, 1\)"),
        (cnn(3), X, r"\(\d+, 1, 6, 6\)", "give inputs with 3 channels, or a model that takes 1"),
    ],
    ids=["no channels", "channels last", "other channels"],
)
@pytest.mark.parametrize("used", ["fit", "discover"])
def test_data(used, model, x, there, mends):
    if used == "discover" and x.dim() != 4:
        there = r"\(12, 6, 6\)"
    with pytest.raises(ValueError, match=f"{there}.*{mends}"):
        autosym.fit(model, (x, Y), epochs=1) if used == "fit" else autosym.discover(model, (x, Y), "flip-horizontal")


def test_a_relaxed_model():
    with pytest.raises(ValueError, match=r"0 .Relaxed.*expects \(B, 1, H, W\): they have no channel axis"):
        autosym.fit(autosym.relax(cnn(), X[:2]), (X[:, 0], Y), epochs=1)


@pytest.mark.parametrize(
    ("arguments", "mend"),
    [
        (((2, 3, 8, 8), 2, 3), ""),
        (((3, 8, 8), 2, 3), "one sample"),
        (((5, 8, 8), 2, 3), r"x[None] if that of the batch"),
        (((5, 64), 2, 1), "x.reshape(-1, 1, H, W)"),
        (((5, 8), 1, 1), "x[:, None]"),
        (((5, 8, 8, 8, 8, 8), 3, 1), "give them these axes"),
    ],
    ids=str,
)
def test_what_mends(arguments, mend):
    assert mend in mended(*arguments)
    assert bool(mended(*arguments)) is bool(mend)


class AddsTheAxis(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = cnn()

    def forward(self, x):
        return self.inner(x[:, None])


class Lasting(nn.Conv2d):
    """A convolution that moves the channels itself."""

    def forward(self, x):
        return super().forward(x.movedim(-1, 1))


def test_the_model_is_neither_changed_nor_blamed_where_it_takes_its_inputs():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    with pytest.raises(ValueError, match="no channel axis"), explained(model, X[:, 0]):
        raise ValueError("something else")
    assert model.training
    assert model[1].num_batches_tracked == 0
    assert not model[0]._forward_pre_hooks
    strange = nn.Sequential(Lasting(3, 2, 3), nn.Flatten(), nn.Linear(32, 3))
    with pytest.raises(ValueError, match=r"^something else$"), explained(strange, COLOURED.movedim(1, -1)):
        raise ValueError("something else")


def test_the_shape_of_all_data_counts_and_not_that_of_a_batch():
    with pytest.raises(ValueError, match=r"\(2, 6, 6\).*they have no channel axis"):
        autosym.fit(cnn(), (X[:, 0], Y), epochs=1, batch_size=1)


def test_errors_of_another_kind_stay_as_they_are():
    """Of a model that adds the axis itself, of inputs with the right axes, without a convolution, and if the model takes one sample."""
    for model, x in ((AddsTheAxis(), X[:, 0]), (cnn(), X), (nn.Linear(6, 2), X), (nn.Conv2d(1, 2, 3), X[0])):
        with pytest.raises(ValueError, match=r"^something else$"), explained(model, x):
            raise ValueError("something else")
