"""The scripts of ``benchmarks/`` that answer questions of docs/findings.md, at the smallest size that runs."""

import json

import pytest
import torch

import truth

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


def test_a_stopped_truth_goes_on_with_the_cases_that_are_left(tmp_path):
    case, origin = truth.CASES[0], {"commit": "a", "epochs": 1}
    entry = truth.asdict(case) | {"said": True}
    lines = tmp_path / "truth.jsonl"
    lines.write_text(json.dumps(entry | {"origin": origin}) + "\n" + '{"question": "tea')
    assert truth.done_before(lines, origin) == {case: entry}
    assert truth.done_before(lines, origin | {"commit": "b"}) == {}
