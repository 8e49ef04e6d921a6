"""The systems of benchmarks/noether_truth.py have the answers that are written down, and results are counted by them."""

import pytest
import torch

import noether_truth
from autosym.noether import Search, discover

SYSTEMS = noether_truth.TRIED | noether_truth.REPORTED


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_system_conserves_as_many_quantities_as_it_says(name):
    truth = SYSTEMS[name]
    assert len(noether_truth.true_span(truth.system(name), truth, 1.0)) == truth.count


def test_systems_that_are_reported_were_not_tried():
    assert not set(noether_truth.TRIED) & set(noether_truth.REPORTED)
    tried, reported = noether_truth.cases(noether_truth.TRIED, 0), noether_truth.cases(noether_truth.REPORTED, 100)
    assert not {case.seed for case in tried} & {case.seed for case in reported}
    planar = sum(truth.positions == 2 for truth in noether_truth.REPORTED.values())
    assert len({case.name for case in reported}) == len(reported) == 7 * len(noether_truth.REPORTED) + planar


def test_a_quantity_is_true_if_it_lies_in_the_span():
    case = noether_truth.Case("oscillator", noether_truth.TRIED["oscillator"], noether_truth.Condition(10), 0)
    found = discover(
        noether_truth.data(case), noether_truth.DT, search=Search(points=8, starts=1, steps=2, samples=4, features=8)
    )
    row = noether_truth.row(case, found, 1.0)
    assert row["found"] + row["undecided"] == [True]
    span = noether_truth.true_span(case.truth.system("oscillator"), case.truth, found.scale)
    assert noether_truth.is_true(found, found.quantities + found.undecided, torch.roll(span, 1, 1)) == [False]


def result(system, right, found, undecided=()):
    return {"config": {"system": system}, "right": right, "found": list(found), "undecided": list(undecided)}


def test_results_are_counted_by_what_is_conserved():
    now = [result("bent", 0, []), result("nearly-central", 0, [], [False]), result("pair", 2, [True], [True])]
    before = [result("bent", 0, [False]), result("nearly-central", 0, []), result("pair", 2, [True, False])]
    _, *rows = noether_truth.tabulated(now, before)
    assert rows == [
        ["none", "1", "0 (1)", "", "", "0"],
        ["nearly one", "1", "0 (0)", "", "", "1"],
        ["one", "0", "0 (0)", "", "", "0"],
        ["two or more", "1", "0 (1)", "1 (1) of 2", "1", "0"],
    ]


def test_poor_data_are_counted_apart():
    hard = noether_truth.CONDITIONS[4].hard
    poor = [
        result("bent", 0, [False]) | {"hard": hard},
        result("pair", 2, [True], [True]) | {"hard": hard},
        result("pair", 2, []) | {"hard": hard, "refused": "as if by chance"},
    ]
    assert noether_truth.tabulated_hard(poor)[1] == [hard, "3", "1", "1", "1 of 4", "1", "0"]
    assert noether_truth.tabulated(poor, [])[1][1] == "0"


def test_poor_data_are_made_as_they_say():
    truth = noether_truth.REPORTED["two-springs"]
    made = [noether_truth.data(noether_truth.Case("two-springs", truth, how, 0)) for how in noether_truth.CONDITIONS[4:]]
    assert [tuple(x.shape) for x in made] == [(60, 5, 4), (30, 40, 4), (30, 40, 4), (30, 40, 4)]
    _, _, near, small = made
    assert near[:, 0].std(0).max() < 0.05
    sizes = small.square().mean((0, 1)).sqrt()
    assert (sizes[[1, 3]] < 0.05 * sizes[[0, 2]]).all()
