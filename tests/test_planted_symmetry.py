"""Data made by a convolutional teacher, and by a dense one: evidence tells them apart, the training loss does not."""

import math

import pytest
import torch

import autosym
from autosym import nets

# ---- planted symmetry


def gratings(samples):
    """Waves of twelve directions and lengths with a random phase and a little noise: (samples, 1, 8, 8)."""
    waves = [(1, 0), (0, 1), (1, 1), (1, -1), (2, 0), (0, 2), (2, 1), (1, 2), (2, -1), (1, -2), (2, 2), (2, -2)]
    rows, columns = torch.tensor(waves)[torch.randint(12, (samples,))].float()[:, :, None, None].unbind(1)
    position, phase = torch.arange(8.0), 2 * math.pi * torch.rand(samples, 1, 1)
    x = torch.cos(math.pi / 4 * (rows * position[:, None] + columns * position) + phase)[:, None]
    x = x + 0.1 * torch.randn_like(x)
    return x / x.std()


def planted(name, seed, samples=900, classes=3):
    """Images that a random teacher of the named paths is surest of, the same number of each class, with its answers."""
    torch.manual_seed(seed)
    teacher, x = student(name, classes), gratings(30 * samples)
    with torch.no_grad():
        logits = teacher(x)
    logits = (logits - logits.mean(0)) / logits.std(0)
    margin = torch.stack([logits[:, c] - logits[:, torch.arange(classes) != c].amax(1) for c in range(classes)], 1)
    chosen = margin.argsort(0, descending=True)[: samples // classes]
    return x[chosen.T.flatten()], torch.arange(classes).repeat_interleave(samples // classes)


def student(name="f-fc+conv", classes=3):
    return nets.build(name, (1, 8, 8), classes, 8, channels=(1, 1), strides=(2, 2), hidden=2)


def learned(teacher, seed, **options):
    """The free share of every layer of a student of f-fc+conv, which has learned its task, by fit as it comes."""
    data = planted(teacher, seed)
    torch.manual_seed(100 + seed)
    model = student()
    fit = autosym.fit(model, data, seed=seed, **options)
    assert accuracy(model, data) > 0.95
    return fit.symmetry().free_share()


def accuracy(model, data):
    with torch.no_grad():
        return float((model(data[0]).argmax(1) == data[1]).float().mean())


# Measured, free share of the two layers in per cent at seeds 0, 1, 2: convolutional teacher 0.0 0.0, 0.0 0.0, 0.0 0.0 (below
# 0.4 at seeds 0 to 9 but for 5 and 7, which stay at 25 11 and 49 6); dense teacher 73 6, 100 52, 93 0.3; plain MAP on the
# convolutional teacher 8.6 3.0, 14 4.5, 14 9.0. Every student is right on more than 95 % of its training images.
SEEDS = [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]


@pytest.mark.parametrize("seed", SEEDS)
def test_evidence_finds_the_symmetry_of_a_convolutional_teacher(seed):
    assert max(learned("conv", seed).values()) < 0.05


@pytest.mark.parametrize("seed", SEEDS)
def test_evidence_finds_no_symmetry_in_a_dense_teacher(seed):
    assert max(learned("fc", seed).values()) > 0.3


@pytest.mark.parametrize("seed", SEEDS)
def test_the_training_loss_does_not_find_the_symmetry(seed):
    assert max(learned("conv", seed, step="none").values()) > 0.05


@pytest.mark.parametrize("precision", [1e-3, 1.0, 1e3, 1e6], ids="{:g}".format)
def test_no_collapse_at_any_starting_precision(precision):
    data, model = planted("conv", 0, samples=300), student()
    fit = autosym.fit(model, data, prior_precision=precision, epochs=20)
    assert accuracy(model, data) > 0.9, "chance is a third"
    assert all(math.isfinite(line["loss"]) for line in fit.history)


def test_plain_map_collapses_at_a_huge_precision():
    """The control of the test above: without evidence the prior is obeyed."""
    data, model = planted("conv", 0, samples=300), student()
    autosym.fit(model, data, prior_precision=1e6, epochs=20, step="none")
    assert accuracy(model, data) < 0.5
