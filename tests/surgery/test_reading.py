"""Subclasses of torch's layers: read as what they compute, or left as they are."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import autosym
from architectures import labels
from autosym.evidence import laplace


class Standardised(nn.Conv2d):
    """Weights of mean zero and variance one, times a gain that is a parameter of its own."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.gain = nn.Parameter(torch.rand(self.out_channels, 1, 1, 1) + 0.5)

    def forward(self, x):
        w = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return self._conv_forward(x, self.gain * w / w.std((1, 2, 3), keepdim=True), self.bias)


class Same(nn.Conv2d):
    """Pads as much as its input needs to have ceil(size / stride) outputs: on even maps more at the end."""

    def forward(self, x):
        need = [(-(-n // 2) - 1) * 2 + 3 - n for n in x.shape[2:]]
        sides = [n for total in reversed(need) for n in (total // 2, total - total // 2)]
        return F.conv2d(F.pad(x, sides), self.weight, self.bias, stride=2)


class Cast(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype), self.bias)


class Untouched(nn.Conv1d):
    pass


class Gated(nn.Conv2d):
    """Weights that depend on the input."""

    def forward(self, x):
        return self._conv_forward(x, self.weight * x.mean(), self.bias)


class Rectified(nn.Conv2d):
    def forward(self, x):
        return super().forward(x).relu()


class Flipped(nn.Conv2d):
    def forward(self, x):
        return super().forward(x.flip(-1))


class Scaled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


class Dynamic(nn.Conv2d):
    """Asks for the weights of its input elsewhere: no call of a convolution is seen."""

    def forward(self, x):
        return torch.einsum("bchw,oc->bohw", x, self.weight[:, :, 0, 0])


def network(layer):
    torch.manual_seed(0)
    return nn.Sequential(layer, nn.Tanh(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.LazyLinear(6), nn.Tanh(), Cast(6, 3)).double()


READ = {
    "standardised": (lambda: Standardised(2, 4, 3, padding=1), 8, "relaxed"),
    "standardised, circular": (lambda: Standardised(2, 4, 3, padding=1, padding_mode="circular"), 8, "relaxed"),
    "standardised, grouped, dilated, stride": (lambda: Standardised(2, 4, 3, 2, (2, 1), 2, 2, bias=False), 9, "relaxed"),
    "same in name, even kernel": (lambda: Standardised(2, 4, 4, padding="same"), 8, "relaxed"),
    "same, uneven sides": (lambda: Same(2, 4, 3), 8, "relaxed"),
    "same, even sides": (lambda: Same(2, 4, 3), 9, "relaxed"),
    "too large, uneven sides": (lambda: Same(2, 4, 3), 8, "kept"),
    "too large, even sides": (lambda: Same(2, 4, 3), 9, "kept"),
}


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
@pytest.mark.parametrize("name", READ)
def test_a_subclass_is_relaxed_as_the_convolution_it_computes(name, monkeypatch):
    make, size, outcome = READ[name]
    if outcome == "kept":
        monkeypatch.setattr("autosym.surgery.relaxing.LARGEST_FACTORS", 1)
    x, other = torch.randn(2, 8, 2, size, size).double()
    model = network(make())
    model(x)
    relaxed = autosym.relax(model, x)
    first, *_, last = relaxed.relaxation.layers
    assert (first.layer, first.outcome) == ("0", outcome)
    assert f"the present weights of {type(model[0]).__name__}" in first.note
    assert ("padded as for maps" in first.note) == (not isinstance(model[0], Standardised) or "circular" in name)
    assert (last.kind, last.outcome) == ("Cast", "kept")
    assert_close(relaxed(other), model(other), rtol=1e-10, atol=1e-12)
    names = laplace.at(relaxed, (x, labels())).names
    assert any(n.startswith("0.") for n in names)
    assert "6.weight" in names
    for parameter in relaxed.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    hard = autosym.harden(relaxed, (x, labels()), tolerance=0.0)
    assert_close(hard(other), relaxed(other), rtol=1e-8, atol=1e-10)


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
@pytest.mark.parametrize("kind", [Gated, Rectified, Flipped, Dynamic])
def test_a_subclass_that_is_no_convolution_is_frozen_and_says_so(kind):
    x, other = torch.randn(2, 8, 2, 8, 8).double()
    model = network(kind(2, 4, 1 if kind is Dynamic else 3))
    model(x)
    relaxed = autosym.relax(model, x)
    assert relaxed.relaxation.names("frozen") == ("0",)
    assert f"{kind.__name__} is not the Conv2d that it is a subclass of" in relaxed.relaxation.layers[0].note
    assert type(relaxed[0]) is kind
    assert_close(relaxed(other), model(other), rtol=1e-10, atol=1e-12)


def test_dense_and_one_dimensional_subclasses():
    x = torch.randn(4, 2, 6)
    model = nn.Sequential(Untouched(2, 3, 3), nn.Flatten(), Scaled(12, 5), Cast(5, 3))
    record = autosym.relax(model, x).relaxation
    assert [note.outcome for note in record.layers] == ["relaxed", "frozen", "kept"]
    assert "Scaled is not the Linear" in record.layers[1].note


def test_a_subclass_that_was_frozen_or_is_to_stay_is_left_as_it_is():
    x = torch.randn(4, 2, 6, 6)
    model = nn.Sequential(Standardised(2, 3, 3), nn.Flatten(), nn.Linear(48, 3))
    kept = autosym.relax(model, x, keep="0")
    assert type(kept[0]) is Standardised
    assert kept.relaxation.layers[0].note == "named in keep; the evidence does not cover a subclass, Standardised, as it is"
    assert autosym.relax(model, x, paths={"2": "pool"}).relaxation.names("frozen") == ("0",)
    assert autosym.relax(model, x, paths={"0": "f-fc"}).relaxation.names("relaxed") == ("0",)
    model[0].gain.requires_grad_(False)
    assert "partly frozen" in autosym.relax(model, x).relaxation.layers[0].note


def test_a_layer_that_pads_by_the_size_of_its_input_is_of_one_size():
    class Same(nn.Conv2d):
        def forward(self, x):
            total = [max((-(-n // 2) - 1) * 2 + 3 - n, 0) for n in x.shape[-2:]]
            sides = [s for t in reversed(total) for s in (t // 2, t - t // 2)]
            return F.conv2d(F.pad(x, sides), self.weight, self.bias, self.stride)

    model = nn.Sequential(Same(1, 2, 3, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 2))
    relaxed = autosym.relax(model, torch.randn(4, 1, 8, 8), paths="where")
    with pytest.raises(ValueError, match="relaxed for inputs of 8x8, got 9x9"):
        relaxed(torch.randn(4, 1, 9, 9))
