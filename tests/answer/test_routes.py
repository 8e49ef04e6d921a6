"""Runs of discover that fail: what has learned nothing is an outcome, and any other error ends the search."""

import math
from types import SimpleNamespace

import pytest
import torch

from autosym.answer import routes
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


@pytest.mark.parametrize(("log_evidence", "more", "expected"), [(-30.0, 20.0, -10.0), (-3.0, 20.0, -0.7), (-0.5, 20.0, -0.5)])
def test_what_corrects_evidence_does_not_make_it_impossible(log_evidence, more, expected):
    """Two classes allow log 1/2. Evidence that is above by itself is left for the search to say so."""
    evidence = SimpleNamespace(log_evidence=torch.tensor(log_evidence), most=-0.7)
    assert routes._more(SimpleNamespace(evidence=evidence), more) == pytest.approx(expected)
