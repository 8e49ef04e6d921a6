"""Margins, Student's t, and the verdict by two of them."""

import math

import pytest

from autosym.answer import margins
from autosym.answer.margins import FEW, Margin, Value


@pytest.mark.parametrize(("freedom", "expected"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (10, 2.2281)])
def test_quantiles_are_those_of_tables(freedom, expected):
    assert margins.quantile(0.975, freedom) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("t", [-2.0, -0.3, 0.0, 0.7, 3.0])
def test_student_with_one_and_two_degrees_of_freedom_in_closed_form(t):
    assert margins.student(t, 1) == pytest.approx(0.5 + math.atan(t) / math.pi, abs=1e-9)
    assert margins.student(t, 2) == pytest.approx(0.5 + t / (2 * math.sqrt(2 + t * t)), abs=1e-9)


def test_the_spread_is_pooled_over_arms_and_leaves_out_what_learned_nothing():
    runs = [Value(0.0, 0.0, "a"), Value(6.0, 0.0, "a"), Value(100.0, 0.0, "b"), Value(108.0, 0.0, "b")]
    assert margins.spread(runs) == (pytest.approx(math.sqrt((2 * 9 + 2 * 16) / 2)), 2)
    dead = [Value(-921.0, 0.0, "c"), Value(-921.1, 0.0, "c"), Value(-math.inf, 0.0, "a")]
    assert margins.spread([*runs, *dead]) == margins.spread(runs)
    assert margins.spread([Value(1.0, 0.0, "a"), Value(2.0, 0.0, "b")]) == (math.inf, 0)


@pytest.mark.parametrize(("lost", "nats"), [(-3.0, -3.0), (4.0, 4.0), (FEW, 60.0), (300.0, 60.0), (math.inf, 60.0)])
def test_closing_says_that_breaking_gains_next_to_nothing_or_nothing_at_all(lost, nats):
    assert margins.closed(Margin(60.0, 20.0, 4), lost) == Margin(nats, 20.0, 4)
    assert margins.closed(Margin(-8.0, 20.0, 4), 5.0) == Margin(-8.0, 20.0, 4)


def test_a_margin_has_both_errors_of_the_estimator_and_chance():
    found = margins.margin(Value(-90.0, 3.0), Value(-100.0, 4.0), 12.0, 2)
    assert (found.nats, found.error, found.freedom) == (10.0, 13.0, 2)
    assert not found.counts
    assert found.probability == pytest.approx(margins.student(10 / 13, 2))


def test_what_failed_loses_and_two_failures_are_even():
    good = Value(-5.0)
    assert margins.margin(good, None, 1.0, 3).counts
    assert margins.margin(None, good, 1.0, 3).nats == -math.inf
    assert margins.margin(None, None, 1.0, 3).nats == 0.0


@pytest.mark.parametrize(
    ("breaking", "tie", "pairs", "expected"),
    [
        (Margin(500, 30, 3), Margin(900, 30, 3), None, "no"),
        (Margin(500, 30, 3), Margin(-900, 30, 3), None, "no"),
        (Margin(2, 30, 3), Margin(900, 30, 3), None, "yes"),
        (Margin(-50, 30, 3), Margin(900, 30, 3), None, "yes"),
        (Margin(2, 30, 3), Margin(60, 30, 3), None, "undecided"),  # the tie does not count
        (Margin(20, 30, 3), Margin(900, 30, 3), None, "undecided"),  # within the error, but not within 10 nats
        (Margin(20, 30, 3), Margin(900, 30, 3), Margin(1, 2, 3), "yes"),  # and pairs do not differ
        (Margin(20, 30, 3), Margin(900, 30, 3), Margin(40, 5, 3), "undecided"),  # and pairs differ
        (Margin(70, 30, 3), Margin(900, 30, 3), Margin(1, 2, 3), "undecided"),  # beyond the error, but not by enough
        (Margin(8, 0.5, 30), Margin(900, 30, 3), None, "yes"),  # it counts, but less than a path is worth
        (Margin(math.inf, 0, 1), Margin(-math.inf, 0, 1), None, "no"),  # the strict network has failed
    ],
)
def test_the_verdict_is_by_two_margins(breaking, tie, pairs, expected):
    assert margins.judge([Margin(-300, 10, 3), breaking], tie, pairs) == expected
    assert FEW == 10


@pytest.mark.parametrize(
    ("nats", "moved", "expected"),
    [
        (30, 1.0, "undecided"),  # no witness
        (30, margins.COMMON, "undecided"),  # data that change a little
        (30, margins.COMMON + 0.01, "yes"),
        (45, margins.COMMON + 0.01, "undecided"),  # more than an error
        (30, margins.RARE, "no"),
        (300, 0.5, "no"),  # what counts is not overruled
    ],
)
def test_data_that_do_not_change_when_they_are_moved_let_a_gain_within_its_error_be_chance(nats, moved, expected):
    breaking, pairs, tie = Margin(nats, 40, 9), Margin(30, 20, 3), Margin(500, 40, 9)
    assert not pairs.counts
    assert margins.judge([breaking], tie, pairs, moved) == expected


def test_pairs_that_differ_by_what_counts_are_not_overruled_by_data_that_do_not_change():
    breaking, tie = Margin(300, 300, 9), Margin(2000, 300, 9)
    assert margins.judge([breaking], tie, None, 0.5) == "yes"
    assert margins.judge([breaking], tie, Margin(150, 20, 3), 0.5) == "undecided"


def test_chances_include_errors():
    exact = margins.chances({"a": 0.0, "b": -2.0}, {"a": 0.0, "b": 0.0})
    assert exact["a"] == pytest.approx(1 / (1 + math.exp(-2)))
    unsure = margins.chances({"a": 0.0, "b": -150.0}, {"a": 200.0, "b": 200.0})
    assert unsure["a"] == pytest.approx(0.5 * (1 + math.erf(150 / math.hypot(200, 200) / math.sqrt(2))), abs=0.01)
    assert sum(unsure.values()) == pytest.approx(1)


def test_a_network_that_still_grows_by_as_much_as_breaking_gains_may_be_too_small():
    breaking = Margin(100, 5, 10)
    assert margins.could_still_close(breaking, 95)
    assert not margins.could_still_close(breaking, 50)
    assert not margins.could_still_close(breaking, None)


@pytest.mark.parametrize(
    ("chance", "estimator", "freedom"), [(10.0, 0.0, 4), (10.0, 5.0, 6), (10.0, 50.0, margins.KNOWN), (0.0, 5.0, margins.KNOWN)]
)
def test_an_error_is_known_as_well_as_its_largest_part(chance, estimator, freedom):
    """Satterthwaite's degrees of freedom."""
    found = margins.margin(Value(10.0, estimator), Value(0.0), chance, 4)
    assert found.freedom == freedom
    assert found.error == pytest.approx(math.hypot(chance, estimator))
    both = margins.margin(Value(10.0, 5.0), Value(0.0, 5.0), 0.0, 4)
    assert both.freedom == 2 * margins.KNOWN
    nobody_knows = margins.margin(Value(10.0, estimator), Value(0.0), math.inf, 0)
    assert (nobody_knows.error, nobody_knows.freedom) == (math.inf, 1)
