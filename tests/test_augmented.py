"""The benchmark of augmented images: every way has as many steps, names are file names, and the table has means over seeds."""

import pytest
import torch

import augmented
from augmented import SMALL, WAYS, cases, lines


def test_every_way_has_as_many_steps_by_both_methods():
    found = cases(SMALL, 2)
    assert len({case.name for case in found}) == len(found) == 2 * 2 * len(WAYS)
    assert all(set(case.name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-") for case in found)
    assert {case.epochs * WAYS[case.task][0] for case in found} == {SMALL.epochs}


def test_a_line_has_the_mean_and_the_spread_of_its_seeds():
    def result(task, accuracy):
        scores = {"accuracy": accuracy, "nll": 2.0, "calibration_error": 0.1, "evidence": -1.5}
        return {"row": {"task": task, "method": "evidence", **scores}}

    found = lines([result("drawn", 30.0), result("none", 20.0), result("drawn", 34.0)])
    assert found == [
        ("none", "evidence", "20.0", "2.000", "0.100", "-1.500", "1"),
        ("drawn", "evidence", "32.0 ± 2.8", "2.000", "0.100", "-1.500", "2"),
    ]


@pytest.mark.parametrize("way", WAYS)
def test_training_and_evidence_see_as_many_images(way, monkeypatch):

    train = torch.rand(1200, 3, 32, 32), torch.arange(1200) % 10
    monkeypatch.setitem(augmented.DATASETS, "cifar-10", lambda folder, seed: (train, (train[0][:5], train[1][:5]), 10))
    case = next(case for case in cases(SMALL, 1) if case.task == way)
    given, counted, test = augmented.images(case, None)
    count, anew = WAYS[way]
    assert len(given[0]) == len(counted[0]) == len(counted[1]) == count * SMALL.images
    assert test[0].shape == (5, 3, SMALL.side, SMALL.side)
    assert torch.equal(given[0], counted[0]) is (count == 1 or not anew)
