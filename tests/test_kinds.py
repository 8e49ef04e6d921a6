"""A Fit where a model is wanted, a model where a Fit is, or neither: every entry point says what it takes and what to give."""

import pytest
import torch
from torch import nn

import autosym
from autosym.evidence import kernel, laplace
from models import images, small

DATA = images()
OF_MODELS = {
    "fit": lambda given: autosym.fit(given, DATA, epochs=1),
    "log_evidence": lambda given: autosym.log_evidence(given, DATA),
    "laplace": lambda given: laplace.at(given, DATA),
    "kernel": lambda given: kernel.at(given, DATA),
    "Learner": lambda given: autosym.Learner(given, DATA),
    "relax": lambda given: autosym.relax(given, DATA[0]),
    "symmetrise": lambda given: autosym.symmetrise(given, "rotation", 2),
    "equivariance_error": lambda given: autosym.equivariance_error(given, "translations", DATA),
    "assert_equivariant": lambda given: autosym.assert_equivariant(given, "translations", DATA[0]),
}


@pytest.fixture(scope="module")
def fitted():
    torch.manual_seed(0)
    return autosym.fit(small(), DATA, epochs=1)


@pytest.mark.parametrize("entry", OF_MODELS)
def test_a_fit_in_place_of_its_model(entry, fitted):
    with pytest.raises(TypeError, match=r"the model is a Fit, not a torch module: give its model, by \.model"):
        OF_MODELS[entry](fitted)


@pytest.mark.parametrize("entry", [*OF_MODELS, "harden"])
def test_what_is_neither_a_fit_nor_a_model(entry):
    call = {**OF_MODELS, "harden": lambda given: autosym.harden(given, DATA)}[entry]
    for given in (None, "model", small().state_dict()):
        with pytest.raises(TypeError, match=r"the model is a \w+, not a torch module: give a torch module"):
            call(given)
    with pytest.raises(TypeError, match=r"the model is the class Flatten: make one of it, Flatten\(\.\.\.\)"):
        call(nn.Flatten)


@pytest.mark.parametrize("given", [small(), None, {}], ids=["model", "none", "dict"])
def test_simplify_of_what_is_no_fit(given):
    message = rf"simplify takes the Fit that autosym.fit returned, got a {type(given).__name__}: .*autosym.fit\(model, data\)"
    with pytest.raises(TypeError, match=message):
        autosym.simplify(given, DATA)


def test_a_comparison_of_one(fitted):
    """A Sequential can be iterated over: its layers are no candidates."""
    for given in (fitted, nn.Sequential(nn.Flatten(), nn.Linear(32, 3)), fitted.model, None, "fit"):
        with pytest.raises(TypeError, match=rf"compare takes several fits .*got one {type(given).__name__}: give a list, or"):
            autosym.compare(given, DATA)


def test_the_calibration_of_what_is_no_tensor(fitted):
    for given in (fitted, fitted.model, fitted.predictive(DATA[0])):
        message = rf"probabilities are a {type(given).__name__}: .* fit.predictive\(x\).probabilities"
        with pytest.raises(TypeError, match=message):
            autosym.calibration_error(given, DATA[1])
    assert 0 <= autosym.calibration_error(fitted.predictive(DATA[0]).probabilities, DATA[1]) <= 1
