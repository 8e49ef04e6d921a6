"""relax: normalisation layers are frozen, folded or learned."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import autosym
from architectures import FROZEN, RELAXED, built, labels


def parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", ["resnet", "conv1d"])
def test_folded_normalisation(name):
    model, x = built(name, torch.float64)
    relaxed = autosym.relax(model, x, fold=True)
    assert_close(relaxed(x), model(x), rtol=0, atol=1e-12)
    assert relaxed.relaxation.names("folded") == FROZEN[name]
    assert relaxed.relaxation.names("relaxed") == RELAXED[name]
    assert all(p.requires_grad for p in relaxed.parameters())
    assert not [m for m in relaxed.modules() if isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d))]


@pytest.mark.parametrize("name", ["resnet", "conv1d", "u-net encoder", "mixer"])
def test_learned_normalisation(name):
    """Scales and shifts take part in the fit, and in the hardened model."""
    model, x = built(name, torch.float64)
    relaxed = autosym.relax(model, x, learn_normalisation=True)
    norms = [layer for layer in FROZEN[name] if layer != "up"]
    assert set(norms) <= set(relaxed.relaxation.names("kept"))
    assert relaxed.relaxation.names("frozen") == (("up",) if name == "u-net encoder" else ())
    assert_close(autosym.harden(relaxed, (x, labels()), tolerance=0)(x), model(x), rtol=0, atol=1e-12)
    fit = autosym.fit(relaxed, (x, labels()), epochs=2)
    hardened = autosym.harden(fit, (x, labels()), tolerance=0)
    assert_close(hardened(x), relaxed(x), rtol=0, atol=1e-12)
    for layer in norms:
        assert {f"{layer}.weight", f"{layer}.bias"} <= set(fit.prior.names)
        assert not torch.equal(hardened.get_submodule(layer).weight, model.get_submodule(layer).weight)
        assert_close(hardened.get_submodule(layer).state_dict(), relaxed.get_submodule(layer).state_dict(), rtol=0, atol=0)


def test_normalisation_that_cannot_be_learned_is_frozen_and_says_why(monkeypatch):
    norms = nn.LayerNorm((4, 4)), nn.GroupNorm(2, 4), nn.BatchNorm2d(4, affine=False), nn.BatchNorm2d(4).requires_grad_(False)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), *norms, norms[1], nn.InstanceNorm2d(4, affine=True), nn.Flatten(), nn.Linear(64, 2)
    )
    monkeypatch.setattr("autosym.linear.normalisation.WIDEST", 15)
    relaxed = autosym.relax(model.eval(), torch.randn(2, 1, 6, 6), learn_normalisation=True)
    notes = {note.layer: note.note for note in relaxed.relaxation.layers if note.outcome == "frozen"}
    words = {
        "1": "too large",
        "2": "more than once",
        "3": "does not cover",
        "4": "frozen in the given model",
        "6": "does not cover",
    }
    assert notes.keys() == words.keys()
    assert all(words[layer] in note for layer, note in notes.items())


def test_normalisation_is_folded_where_that_is_wanted_and_learned_elsewhere():
    norms = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), norms[0], nn.ReLU(), norms[1], nn.Flatten(), nn.Linear(64, 2)).eval()
    record = autosym.relax(model, torch.randn(2, 1, 6, 6), fold=True, learn_normalisation=True).relaxation
    assert (record.names("folded"), record.names("kept")) == (("1",), ("3",))


@pytest.mark.parametrize("bias", [True, False])
def test_a_frozen_layer_stays_frozen_when_normalisation_is_folded_into_it(bias):
    """Its bias too, which is that of the normalisation where it had none."""
    model = nn.Sequential(
        *(nn.Conv2d(1, 4, 3, bias=bias), nn.BatchNorm2d(4), nn.ReLU()),
        *(nn.Conv2d(4, 4, 3, bias=bias), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2)),
    )
    model(torch.randn(16, 1, 6, 6) + 2)
    model.eval()[0].requires_grad_(False)
    relaxed = autosym.relax(model, torch.randn(2, 1, 6, 6), fold=True)
    assert relaxed.relaxation.names("folded") == ("1", "4")
    assert relaxed.relaxation.names("frozen") == ("0",)
    assert {name: p.requires_grad for name, p in relaxed[0].named_parameters()} == {"weight": False, "bias": False}
    assert all(p.requires_grad for name, p in relaxed.named_parameters() if not name.startswith("0."))


def test_normalisation_is_folded_into_the_last_layer_of_a_container():
    inner = nn.Sequential(nn.ReLU(), nn.Conv2d(1, 4, 3, bias=False))
    model = nn.Sequential(inner, nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 2)).eval()
    assert autosym.relax(model, torch.randn(2, 1, 6, 6), fold=True).relaxation.names("folded") == ("1",)


def test_normalisation_that_does_not_follow_a_layer_directly_is_not_folded():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 2)).eval()
    relaxed = autosym.relax(model, torch.randn(2, 1, 6, 6), fold=True)
    assert relaxed.relaxation.names("folded") == ()
    assert relaxed.relaxation.names("frozen") == ("2",)


def test_normalisation_of_maps_that_a_dense_layer_made_is_not_folded():
    """Its channels are not the outputs of the dense layer, but several of them each."""
    maps = nn.Linear(6, 16), nn.Unflatten(1, (4, 2, 2)), nn.BatchNorm2d(4), nn.ReLU()
    model = nn.Sequential(*maps, nn.Conv2d(4, 5, 3, padding=1), nn.Flatten(), nn.Linear(20, 3)).eval()
    x = torch.randn(4, 6)
    relaxed = autosym.relax(model, x, fold=True)
    assert relaxed.relaxation.names("folded") == ()
    assert "not folded: no dense layer or convolution comes directly before it" in str(relaxed.relaxation)
    assert_close(relaxed(x), model(x))


def test_normalisation_after_two_layers_is_not_folded():
    shared = nn.BatchNorm2d(4)
    nn.init.uniform_(shared.weight, 0.5, 2)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), shared, nn.ReLU(), nn.Conv2d(4, 4, 3), shared, nn.Flatten(), nn.Linear(16, 2)
    ).eval()
    x = torch.randn(2, 1, 6, 6)
    relaxed = autosym.relax(model, x, fold=True)
    assert "not folded: it, or the layer before it, is used more than once" in str(relaxed.relaxation)
    assert_close(relaxed(x), model(x))


class Peeking(nn.Module):
    """The output of a convolution is used before its normalisation too."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(8, 2)

    def forward(self, x):
        y = self.conv(x)
        return self.out(torch.cat([y.mean((2, 3)), self.norm(y).relu().mean((2, 3))], 1))


def test_folding_that_would_change_the_function_is_refused():
    model = Peeking()
    model(torch.randn(16, 1, 6, 6) + 2)
    x = torch.randn(4, 1, 6, 6)
    with pytest.raises(ValueError, match="computes another function: with fold=True"):
        autosym.relax(model.eval(), x, fold=True)
    assert_close(autosym.relax(model, x)(x), model(x))


def test_normalisation_that_does_more_is_not_folded():
    class WithActivation(nn.BatchNorm2d):
        def forward(self, x):
            return super().forward(x).relu()

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), WithActivation(4), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 3)
    ).eval()
    record = autosym.relax(model, torch.randn(4, 1, 6, 6), fold=True).relaxation
    assert (record.names("frozen"), record.names("folded")) == (("1",), ("3",))
