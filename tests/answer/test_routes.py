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


def test_whole_evidence_is_lifted_by_what_steps_missed(monkeypatch):
    evidence = SimpleNamespace(log_evidence=torch.tensor(-500.0), log_likelihood=torch.tensor(-400.0), most=-3.0, samples=60)
    fit = SimpleNamespace(evidence=evidence, estimate=SimpleNamespace(missed=7.0, doubt=9.0, how="probes"), prior=None)
    monkeypatch.setattr(Fitter, "fitted", lambda self, key: fit)
    monkeypatch.setattr(Fitter, "refined", lambda self, fitted: fitted)
    monkeypatch.setattr(routes, "Whole", SimpleNamespace)
    monkeypatch.setattr(routes.possible, "failure", lambda *_: None)
    found = object.__new__(Fitter)._whole(Run("conv", 1.0, 0, "whole", "end"))
    assert (found.log_evidence, found.error) == (-493.0, 9.0)
    evidence.most = -495.0
    assert object.__new__(Fitter)._whole(Run("conv", 1.0, 0, "whole", "end")).log_evidence == -495.0, (
        "no more than labels allow"
    )
