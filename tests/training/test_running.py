"""When a run takes an evidence step: on the schedule that was given, or less often while little moves."""

import copy
import math

import pytest
import torch

import autosym
from autosym.evidence import laplace
from autosym.training import evidence_steps, running
from autosym.training.fitting import prepare
from autosym.training.schedule import EvidenceStep, Schedule
from models import draw, images, mlp, small


def steps_of(little, epochs=100, longest=4, recovered=()):
    """The epochs with an evidence step, and what each stands for, of a run whose steps gain little if ``little(epoch)``."""
    run = prepare(mlp(5, 4, 3), draw("categorical", 20), "categorical", Schedule(epochs=epochs, longest=longest))
    taken = {}
    for epoch in range(1, epochs + 1):
        line = {"epoch": epoch}
        if (due := run.due(epoch)) and epoch not in recovered:
            taken[epoch] = due
            line |= {"log_evidence": 0.0, "little": little(epoch), "steps": due}
        run.progress.lines.append(line | ({"recovered": {}} if epoch in recovered else {}))
    return taken, list(run.schedule.evidence_epochs())


def test_steps_that_gain_much_are_taken_as_planned():
    taken, planned = steps_of(lambda epoch: False)
    assert list(taken) == planned
    assert set(taken.values()) == {1}


def test_pauses_double_while_steps_gain_little_and_every_planned_one_is_made_up_for():
    taken, planned = steps_of(lambda epoch: True)
    assert planned[:3] == [14, 18, 22]
    assert list(taken) == [14, 22, 38, 54, 70, 78], "one, two, then four planned steps at a time; the last is always taken"
    assert sum(taken.values()) == len(planned)


def test_a_step_that_gains_much_ends_the_long_pauses():
    taken, planned = steps_of(lambda epoch: epoch != 38)
    assert list(taken)[:6] == [14, 22, 38, 42, 50, 66]
    assert sum(taken.values()) == len(planned)


def test_a_recovery_ends_the_long_pauses():
    taken, _ = steps_of(lambda epoch: True, recovered=[40])
    assert list(taken)[:5] == [14, 22, 38, 42, 50]


def test_by_default_all_planned_steps_are_taken_whatever_they_gain():
    assert Schedule().longest == 1
    taken, planned = steps_of(lambda epoch: True, longest=1)
    assert list(taken) == planned


def test_a_step_in_place_of_several_goes_as_far_as_they_would():
    """On the same factors; and it says how many nats it has changed the evidence by."""
    model, data = mlp(5, 4, 3), draw("categorical", 20)
    at, how = laplace.at(model, data), EvidenceStep(trust=0.3)
    one, three = (autosym.bayes.priors.Prior(at.names, 1e-3) for _ in range(2))
    for _ in range(3):
        evidence_steps.improve(one, at.likelihood, at, how)
    before = float(at(three).log_evidence.detach())
    gained = evidence_steps.improved(three, at.likelihood, at, how, times=3)
    assert torch.equal(one.log_precision, three.log_precision)
    assert gained == pytest.approx(float(at(three).log_evidence.detach()) - before)
    assert gained > 1


def test_a_fit_that_may_pause_takes_fewer_steps_and_resumes_bit_for_bit(tmp_path):
    torch.manual_seed(5)
    start, data = small(), images()
    options = {"epochs": 40, "lr": 0.01, "checkpoint_seconds": 0, "longest": 4}
    whole = autosym.fit(copy.deepcopy(start), data, **options)
    taken = [line["epoch"] for line in whole.history if "log_evidence" in line]
    assert len(taken) < len(whole.schedule.evidence_epochs())
    assert sum(line.get("steps", 0) for line in whole.history) == len(whole.schedule.evidence_epochs())

    class Stop(Exception):
        pass

    def stopping(line):
        if line["epoch"] == taken[-1] - 1:
            raise Stop

    with pytest.raises(Stop):
        autosym.fit(copy.deepcopy(start), data, checkpoint=tmp_path / "c", log=stopping, **options)
    again = autosym.fit(copy.deepcopy(start), data, checkpoint=tmp_path / "c", resume=True, **options)
    assert [line["epoch"] for line in again.history if "log_evidence" in line] == taken
    for a, b in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_only_many_outputs_have_a_part_of_their_curvature_sampled_at_the_end(monkeypatch):
    asked, real = [], running.evidence_steps.estimate
    monkeypatch.setattr(running.evidence_steps, "estimate", lambda *given: asked.append(given[-1]) or real(*given))
    for classes in (running.MANY, running.MANY + 1):
        x, y = draw("categorical", 20)
        autosym.fit(mlp(5, 4, classes), (x, y), epochs=1)
    assert asked == [0.0, 0.0, 0.0, running.REST]
    assert math.isclose(running.REST, 0.02)
