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


def steps_of(little, epochs=100, every=None, recovered=()):
    """The epochs with an evidence step, and what each stands for, of a run whose steps gain little if ``little(epoch)``."""
    run = prepare(mlp(5, 4, 3), draw("categorical", 20), "categorical", Schedule(epochs=epochs, every=every))
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
    assert list(taken) == [14, 22, 30, 38, 46, 54, 62, 70, 78], "one, then two planned steps at a time"
    assert sum(taken.values()) == len(planned)


def test_a_step_that_gains_much_ends_the_long_pauses():
    taken, planned = steps_of(lambda epoch: epoch != 38)
    assert list(taken)[:6] == [14, 22, 30, 38, 42, 50]
    assert sum(taken.values()) == len(planned)


def test_a_recovery_ends_the_long_pauses():
    taken, _ = steps_of(lambda epoch: True, recovered=[40])
    assert list(taken)[:6] == [14, 22, 30, 38, 42, 50]


def test_the_last_planned_step_is_always_taken():
    taken, planned = steps_of(lambda epoch: True, epochs=95)
    assert len(planned) % 2 == 0
    assert list(taken)[-1] == planned[-1]
    assert sum(taken.values()) == len(planned)


def test_pauses_double_up_to_the_longest(monkeypatch):
    monkeypatch.setattr(running, "LONGEST", 4)
    taken, planned = steps_of(lambda epoch: True)
    assert list(taken) == [14, 22, 38, 54, 70, 78], "one, two, then four planned steps at a time"
    assert sum(taken.values()) == len(planned)


def test_an_explicit_rhythm_is_kept_whatever_is_gained():
    taken, planned = steps_of(lambda epoch: True, every=4)
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


def test_gamma_is_as_sensitive_to_its_precision_as_differences_say():
    at = laplace.at(mlp(5, 4, 3), draw("categorical", 20))
    prior = autosym.bayes.priors.Prior(at.names, 0.7)
    found = at.sensitivity(prior)
    before = at.effective_parameters(prior).log()
    with torch.no_grad():
        prior.log_precision += 1e-6
    after = at.effective_parameters(prior).log()
    torch.testing.assert_close(found, (before - after) / 1e-6, rtol=1e-5, atol=1e-6)
    assert (found > 0).all()
    assert (found < 1).all()


def test_precisions_follow_the_weights_without_a_pass():
    """At the same weights as the closed form does, to first order; twice the weights are a quarter of the precision."""
    model, data = mlp(5, 4, 3), draw("categorical", 20)
    at, how = laplace.at(model, data), EvidenceStep(trust=math.inf)
    parameters = {name: p.clone() for name, p in at.parameters.items()}
    one, other = (autosym.bayes.priors.Prior(at.names, 0.5) for _ in range(2))
    for prior in (one, other):
        at.mackay(prior)
    last = evidence_steps.summary(model, at.likelihood, one, at)
    with torch.no_grad():
        one.log_precision += 0.02
        other.log_precision += 0.02
    evidence_steps.follow(one, parameters, last, how)
    at.mackay(other)
    torch.testing.assert_close(one.log_precision, other.log_precision, rtol=0, atol=2e-4)
    again = copy.deepcopy(one)
    evidence_steps.follow(one, {name: 2 * p for name, p in parameters.items()}, last, EvidenceStep(trust=math.inf))
    evidence_steps.follow(again, parameters, last, EvidenceStep(trust=math.inf))
    torch.testing.assert_close(again.log_precision - one.log_precision, torch.full_like(one.log_precision, math.log(4)))


@pytest.mark.parametrize(
    ("changes", "follows"), [({}, True), ({"step": "gradient"}, False), ({"kernel": 8}, False), ({"nu": 4.0}, False)]
)
def test_planned_steps_that_are_not_taken_move_precisions_where_there_is_a_closed_form(changes, follows):
    nu = changes.get("nu", math.inf)
    fields = {key: value for key, value in changes.items() if key != "nu"}
    model, data = mlp(5, 4, 3), draw("categorical", 20)
    run = prepare(model, data, "categorical", Schedule(epochs=100, **fields), nu=nu)
    at = laplace.at(model, data)
    prior = autosym.bayes.priors.Prior(at.names)
    run.progress.lines += [{"epoch": epoch} for epoch in range(1, 14)]
    run.progress.lines.append(
        evidence_steps.summary(model, at.likelihood, prior, at) | {"epoch": 14, "little": True, "steps": 1}
    )
    run.progress.lines += [{"epoch": epoch} for epoch in range(15, 18)]
    before = run.prior.log_precision.clone()
    assert not run.follow(17), "no step is planned"
    assert run.due(18) == 0
    assert run.follow(18) is follows
    assert torch.equal(before, run.prior.log_precision) is not follows
    run.progress.lines[-1]["recovered"] = {}
    assert not run.follow(18), "these figures are of weights that were given up"


def test_a_fit_takes_fewer_steps_by_default_and_resumes_bit_for_bit(tmp_path):
    torch.manual_seed(5)
    start, data = small(), images()
    options = {"epochs": 40, "lr": 0.01, "checkpoint_seconds": 0}
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
