"""Runs of discover that fail: what has learned nothing is an outcome, and any other error ends the search."""

import math

import pytest

from autosym.answer.plans import Run
from autosym.answer.routes import Fitter
from autosym.runtime.arithmetic import NotFinite
from autosym.training.guarding import NothingLearned


@pytest.mark.parametrize("error", [NotFinite, NothingLearned])
def test_a_run_that_has_learned_nothing_is_an_outcome(monkeypatch, error):
    outcome, end = made(monkeypatch, error("it collapsed"))
    assert (outcome.log_evidence, outcome.failed, end) == (-math.inf, "it collapsed", None)


def test_any_other_error_is_raised(monkeypatch):
    with pytest.raises(ValueError, match="nothing was learned from this mistake"):
        made(monkeypatch, ValueError("nothing was learned from this mistake"))


def made(monkeypatch, error):
    def fails(self, run):
        raise error

    monkeypatch.setattr(Fitter, "_fit", fails)
    return object.__new__(Fitter)._made(Run("conv", 1.0, 0, "long"))
