"""Data made by a convolutional teacher, and by a dense one: evidence tells them apart, the training loss does not."""

import math

import pytest
import torch

import autosym
import truth
from autosym.nn import nets

# ---- planted symmetry


def planted(name, seed, samples):
    """Images that a random teacher of the named paths is surest of, with its answers."""
    return truth.teacher_data(truth.Case("teacher", name == "conv", samples, seed))


def student():
    return nets.build("f-fc+conv", (1, 8, 8), 3, **truth.TEACHER)


def learned(teacher, seed, samples, **options):
    """The free share of every layer of a student of f-fc+conv, which has learned its task."""
    data = planted(teacher, seed, samples)
    torch.manual_seed(100 + seed)
    model = student()
    fit = autosym.fit(model, data, seed=seed, **options)
    assert accuracy(model, data) > 0.95
    return fit.symmetry().free_share()


def accuracy(model, data):
    with torch.no_grad():
        return float((model(data[0]).argmax(1) == data[1]).float().mean())


# Measured with all defaults, free share of the two layers in per cent. Convolutional teacher, seeds 0 to 9: at most 0.3, but for
# 13 in the first layer of seed 7. Dense teacher, seeds 0, 1, 2: 49 0.0, 100 0.0, 87 2.9 (3 to 9: the larger is 77 or more). Plain MAP on
# the convolutional teacher, seeds 0, 1, 2: 12 4.4, 15 2.0, 24 2.5.
# With 450 samples and 40 epochs, seed 0: 0.0 0.7, 52 0.0, and by plain MAP 9.2 3.3.
CASES = [
    pytest.param(0, 450, {"epochs": 40}, id="quick"),
    *(pytest.param(seed, 900, {}, id=f"{seed}", marks=pytest.mark.slow) for seed in range(3)),
]


@pytest.mark.parametrize(("seed", "samples", "options"), CASES)
def test_evidence_finds_the_symmetry_of_a_convolutional_teacher(seed, samples, options):
    assert max(learned("conv", seed, samples, **options).values()) < 0.05


@pytest.mark.parametrize(("seed", "samples", "options"), CASES)
def test_evidence_finds_no_symmetry_in_a_dense_teacher(seed, samples, options):
    assert max(learned("fc", seed, samples, **options).values()) > 0.3


@pytest.mark.parametrize(("seed", "samples", "options"), CASES)
def test_the_training_loss_does_not_find_the_symmetry(seed, samples, options):
    assert max(learned("conv", seed, samples, step="none", **options).values()) > 0.05


BETWEEN = [pytest.param(precision, marks=pytest.mark.slow) for precision in (1.0, 1e3)]


@pytest.mark.parametrize("precision", [1e-3, *BETWEEN, 1e6], ids="{:g}".format)
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
