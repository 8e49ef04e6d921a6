"""The scripts of ``benchmarks/`` that answer questions of docs/findings.md, at the smallest size that runs."""

import json

import pytest
import torch

import approximations
import pool
import truth
from autosym import likelihoods
from autosym.priors import Prior
from autosym.sites import sites

# ---- truth


@pytest.mark.parametrize(("symmetric", "strength"), truth.PLANTS)
def test_a_teacher_is_symmetric_where_it_says_so(symmetric, strength):
    case = truth.Case("teacher", symmetric, 30, 5, strength)
    x, y = truth.teacher_data(case)
    assert x.shape == (30, 1, 8, 8)
    assert y.bincount().tolist() == [10, 10, 10]
    with torch.no_grad():
        before, after = (sum(part * net(image) for part, net in truth.teachers(case, 3)) for image in (x, x.roll(3, -1)))
    assert torch.allclose(before, after, atol=1e-5) == symmetric


@pytest.mark.parametrize("question", ["quadrant", "turned", "flipped"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_planted_digits_have_labels_of_the_question(question, symmetric):
    x, y = truth.digit_data(truth.Case(question, symmetric, 200, 3))
    classes = {"quadrant": 40, "turned": 10, "flipped": 20}[question] if not symmetric else 10
    assert len(x) == len(y) == 200
    assert y.max() < classes
    assert y.max() >= classes - 10


def test_counts_and_intervals_of_the_truth():
    line = {"question": "turned", "samples": 5, "strength": 1.0}
    cases = [line | {"symmetric": s, "said": a, "right": s == a} for s, a in ((True, True), (True, False), (False, True))]
    found = truth.summary(cases)
    assert [found[name] for name in ("cases", "right", "wrongly_found", "wrongly_missed")] == [3, 1, 1, 1]
    low, high = truth.interval(95, 100)
    assert (round(low, 3), round(high, 3)) == (0.888, 0.978)  # Wilson's, as tables give it


def test_a_stopped_run_goes_on_with_the_cases_that_are_left(tmp_path):
    case, origin = {"question": "teacher", "seed": 3}, {"commit": "a", "epochs": 1}
    lines = tmp_path / "lines.jsonl"
    lines.write_text(json.dumps({"said": True, "case": case, "origin": origin}) + "\n" + '{"question": "tea')
    assert pool.done_before(lines, origin) == {json.dumps(case): {"said": True}}
    assert pool.done_before(lines, origin | {"commit": "b"}) == {}
    assert pool.done_before(None, origin) == {}


# ---- approximations


def test_annealed_importance_sampling_knows_the_evidence_of_linear_regression():
    few = approximations.linear_check(60)[0]
    assert abs(few["ais"] - few["exact"]) < few["ais_uncertainty"] + 3 * few["forwards_error"]
    assert few["forwards"] < few["exact"] < few["backwards"], "below from the prior, above from the posterior"


def test_every_estimator_is_judged_by_what_it_would_choose():
    values = {"conv": -10.0, "f-fc": -20.0}
    wrong = dict.fromkeys(approximations.ESTIMATORS, 0.0) | {"diagonal": 1.0}
    cells = [{"model": m, "ais": v, "estimates": dict.fromkeys(approximations.ESTIMATORS, v - 1)} for m, v in values.items()]
    cells[1]["estimates"] = wrong
    found = approximations.judged(cells)
    assert found["ais_chooses"] == "conv"
    assert found["estimators"]["diagonal"]["error"] == {"conv": -1.0, "f-fc": 21.0}
    assert not any(line["same_symmetry"] for line in found["estimators"].values())


def test_full_and_kernel_laplace_are_one_number():
    task = approximations.Task("categorical", True, 0)
    model, pair = approximations.Tiny("f-fc+conv", 2), approximations.task_data(task)
    prior, likelihood = Prior([site.name for site in sites(model)], 2.0), likelihoods.of("categorical")
    found = approximations.estimates(model, prior, likelihood, pair, steps=2)
    assert found["full"] == pytest.approx(found["kernel"], abs=1e-6)
    assert found["diagonal"] < found["full"] > found["blocks"] > found["diagonal"], "Fischer's inequality"
