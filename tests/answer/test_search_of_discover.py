"""The search of ``discover`` with fits of known evidence: what is run, dropped, widened and decided."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from autosym.answer import discovering, margins, notes
from autosym.answer.answers import Verdict
from autosym.answer.margins import Margin
from autosym.answer.plans import PARTS, Outcome, Question, Run, planned, sure_cost
from autosym.answer.search import Search

SHIFTS = Question("translations", "conv", "f-fc+conv", "f-fc")
TURNS = Question("c4", "gconv", "gconv+turn", "conv")
SYMMETRIC = {"conv": -1000.0, "f-fc+conv": -1000.0, "f-fc": -2000.0}
BROKEN = {"conv": -3000.0, "f-fc+conv": -1500.0, "f-fc": -2000.0}


class Stub:
    """Runs whose evidence is known: that of the network, its seed and its width, less for short runs; a run on keeps what it began with."""

    def __init__(self, evidence, noise=10.0, width=lambda network, width: 0.0, short=200.0, stuck=False):
        self.evidence, self.noise, self.width, self.short, self.stuck, self.made = evidence, noise, width, short, stuck, []

    def value(self, run):
        if run.stage == "whole":
            return self.values[run.start]
        chance = self.noise * (0.0, 1.0, -1.0, 0.5, -0.5)[run.seed % 5]
        own = self.evidence[run.network] + chance + self.width(run.network, run.width)
        if run.stage == "on" and not self.stuck:
            own = max(own, min(self.values[run.start], self.evidence[run.network] + self.noise))
        if run.stage == "layers":
            own -= sum(500.0 * (layer == "needed") for layer in run.left)
        return own - (self.short if run.stage == "short" else 0.0)

    values: dict

    def __call__(self, runs):
        self.values = getattr(self, "values", {})
        found = {}
        for run in runs:
            self.values[run.key] = self.value(run)
            found[run] = Outcome(self.values[run.key], 1.0)
            self.made.append(run)
        return found


def cost(network, width):
    return {1.0: 0.4, 2.0: 1.0, 4.0: 3.0}[width]


def searched(stub, questions=(SHIFTS,), seeds=3, budget=8.0, widths=(1.0, 2.0), layers=lambda network: (), **more):
    plan = planned(questions, (), widths, seeds, budget, cost)
    search = Search(questions, plan, stub, cost, layers=layers, **more).run()
    assert search.spent <= budget
    assert search.spent == pytest.approx(sum(plan.part(run.stage) * cost(run.network, run.width) for run in stub.made))
    return search


def verdicts(search):
    return [finding.judgement for finding in search.findings()]


def test_a_symmetry_that_is_there():
    search = searched(Stub(SYMMETRIC))
    assert verdicts(search) == ["yes"]
    (finding,) = search.findings()
    assert finding.tie.nats == pytest.approx(1000, abs=40)
    assert finding.best["strict"].network == "conv"


def test_a_symmetry_that_is_broken():
    search = searched(Stub(BROKEN))
    assert verdicts(search) == ["no"]
    assert search.findings()[0].breaking.nats == pytest.approx(1500, abs=40)


@pytest.mark.parametrize("evidence", [SYMMETRIC | {"f-fc": -1005.0}, SYMMETRIC | {"f-fc+conv": -970.0}])
def test_undecided_says_why_and_what_was_tried(evidence):
    search = searched(Stub(evidence, noise=40.0, stuck=True))
    (finding,) = search.findings()
    assert finding.judgement == "undecided"
    assert "counts" in finding.why
    assert set(finding.tried) == {"a larger network", "longer runs"}


def test_a_yes_by_networks_alone_is_undecided_where_the_data_change():
    (finding,) = searched(Stub(SYMMETRIC), moved={"translations": margins.RARE}).findings()
    assert finding.judgement == "undecided"
    assert "the data change when they are shifted around the border" in finding.why


def test_undecided_takes_more_seeds_while_there_is_budget():
    close = SYMMETRIC | {"f-fc": -1030.0}
    seeds = {budget: {run.seed for run in searched(Stub(close, noise=30.0), budget=budget).outcomes} for budget in (8.0, 40.0)}
    assert max(seeds[40.0]) > max(seeds[8.0])


def test_another_seed_needs_no_runs_on_from_it_where_the_budget_is_too_small_for_them():
    """The part that plans leave would else never be spent."""
    close = SYMMETRIC | {"f-fc": -1030.0}
    for budget, further in ((7.2, False), (40.0, True)):
        made = searched(Stub(close, noise=30.0), budget=budget, widths=(1.0,)).outcomes
        later = {run.network for run in made if run.stage == "long" and run.seed == 3}
        assert later == {"conv", "f-fc+conv", "f-fc"}
        assert any(run.stage == "on" and run.seed == 3 for run in made) == further


@pytest.mark.parametrize(("part", "untied", "verdict"), [(0.3, 0.0, "undecided"), (0.3, 0.1, "yes"), (0.4, 0.0, "yes")])
def test_a_tie_that_beats_a_network_which_learned_nothing_is_weak(part, untied, verdict):
    """Its rivals may have been short of steps: a network that cannot tell mirror images was ahead of some that only guessed."""
    evidence = dict.fromkeys(SYMMETRIC, 9000 * (part - 1)) | {"f-fc": 9000 * (untied - 1)}
    search = searched(Stub(evidence, noise=5.0, stuck=True), explained=lambda value: 1 + value / 9000.0)
    assert verdicts(search) == [verdict]


def test_whole_evidence_after_another_seed_is_of_all_networks_or_of_none():
    """Of one side alone a margin would grow by chance."""

    class Late(Stub):
        def value(self, run):
            return super().value(run) + 40.0 * (run.stage == "long" and run.seed == 3)

    def wholes(budget):
        made = searched(Late(SYMMETRIC | {"f-fc": -1030.0}, noise=30.0), budget=budget, widths=(1.0,)).outcomes
        assert any(run.seed == 3 for run in made)
        return {run.network for run in made if run.stage == "whole" and run.seed == 3}

    found = [wholes(budget) for budget in (6.9, 7.1, 7.4)]
    assert all(networks in (set(), set(SYMMETRIC)) for networks in found)
    assert set() in found


def test_short_runs_choose_the_width():
    wide = searched(Stub(SYMMETRIC, width=lambda network, width: 300.0 * (width == 2.0)))
    assert {run.width for run in wide.outcomes if run.stage == "long"} == {2.0}
    narrow = searched(Stub(SYMMETRIC))
    assert {run.width for run in narrow.outcomes if run.stage == "long" and run.network == "f-fc"} == {1.0}


def test_wider_while_evidence_rises_by_more_than_its_error():
    rising = searched(Stub(SYMMETRIC, width=lambda network, width: 300.0 * math.log2(width)), budget=60.0)
    assert {run.width for run in rising.outcomes if run.stage == "short"} == {1.0, 2.0, 4.0}
    little = searched(Stub(SYMMETRIC, width=lambda network, width: math.log2(width)), budget=60.0)
    assert {run.width for run in little.outcomes if run.stage == "short"} == {1.0, 2.0}


@pytest.mark.parametrize("budget", [8.0, 12.0, 16.0, 24.0, 40.0])
def test_wider_networks_stay_within_the_budget(budget):
    """Only the strict network gains by being wider: the relaxed one is then opened at that width too."""
    stub = Stub(SYMMETRIC, width=lambda network, width: 300.0 * math.log2(width) * (network == "conv"))
    search = searched(stub, budget=budget)
    widths = {run.width for run in search.outcomes if run.network == "f-fc+conv" and run.stage == "on"}
    assert max(widths) == search.width("conv")


def test_a_symmetry_is_not_rejected_by_a_network_that_is_too_small():
    def width(network, width):
        return 1495.0 * (math.log2(width) - 1) if network == "conv" else 0.0

    (finding,) = searched(Stub(BROKEN, width=width)).findings()
    assert finding.judgement == "undecided"
    assert "wider" in finding.why


def test_hopeless_networks_get_one_long_run():
    search = searched(Stub(BROKEN | {"f-fc": -90000.0}))
    long = [run.network for run in search.outcomes if run.stage == "long"]
    assert long.count("f-fc") == 1
    assert long.count("f-fc+conv") == 3
    assert verdicts(search) == ["no"]


def test_each_hypothesis_is_also_fitted_from_the_end_of_the_other():
    search = searched(Stub(SYMMETRIC))
    on = [(run.network, run.start.split("~")[0]) for run in search.outcomes if run.stage == "on"]
    for pair in (("conv", "f-fc+conv"), ("f-fc+conv", "conv"), ("conv", "conv"), ("f-fc+conv", "f-fc+conv")):
        assert on.count(pair) == 2
    assert len(search.gains(SHIFTS)) == 4


def test_a_worse_optimum_of_the_relaxed_network_does_not_decide():
    """Runs of the relaxed network by themselves are luckier, but left of their free paths they are as good: no breaking."""

    class Lucky(Stub):
        def value(self, run):
            luck = 150.0 if run.network == "f-fc+conv" and run.stage in ("short", "long") else 0.0
            if run.stage == "on":
                return max(self.evidence[run.network], self.values[run.start] - 1.0)
            return super().value(run) + luck

    assert verdicts(searched(Lucky(SYMMETRIC))) == ["yes"]


@pytest.mark.parametrize("network", ["conv", "f-fc+conv", "f-fc"])
def test_a_network_whose_evidence_has_failed_decides_nothing(network):
    (finding,) = searched(Stub(SYMMETRIC | {network: -math.inf})).findings()
    assert finding.judgement == "undecided"
    assert f"no run of {network} has evidence that can be used" in finding.why


def test_questions_share_networks():
    evidence = SYMMETRIC | {"gconv": -700.0, "gconv+turn": -700.0}
    stub = Stub(evidence)
    search = searched(stub, (SHIFTS, TURNS), budget=20.0)
    assert verdicts(search) == ["yes", "yes"]
    assert len(stub.made) == len(set(stub.made))
    assert sum(run.network == "conv" and run.stage == "long" for run in stub.made) == 3


def test_layers_that_do_not_need_what_breaks_are_found():
    search = searched(Stub(BROKEN), budget=20.0, layers=lambda network: ("first", "needed", "last"))
    prices = search.prices["translations"]
    assert {name: price.needed for name, price in prices.items()} == {"first": False, "needed": True, "last": False}
    assert prices["needed"].nats == pytest.approx(500)
    assert any(run.left == ("first", "last") for run in search.outcomes)


def test_the_plan_is_within_the_budget_and_says_so_beforehand():
    plan = planned((SHIFTS,), (), (1.0, 2.0), 3, 6.0, cost)
    assert sum(sure_cost(plan, (SHIFTS,), cost)) <= 6.0
    assert plan.part("short") < PARTS["short"]
    assert planned((SHIFTS,), (), (1.0, 2.0), 3, 100.0, cost).scale == 1.0
    with pytest.raises(ValueError, match=r"a budget of 0\.5 fits is too small"):
        planned((SHIFTS,), (), (1.0, 2.0), 3, 0.5, cost)
    with pytest.raises(ValueError, match="seeds must be at least 2"):
        planned((SHIFTS,), (), (1.0, 2.0), 1, 6.0, cost)


def test_what_short_runs_leave_of_the_budget_makes_the_others_longer():
    narrow, wide = (searched(Stub(SYMMETRIC, width=lambda network, width, w=w: 99.0 * (width == w))) for w in (1.0, 2.0))
    for search in (narrow, wide):
        assert search.plan.part("short") == search.plan.scale * PARTS["short"]
        assert search.spent <= 8.0
    assert narrow.plan.part("long") > wide.plan.part("long") >= wide.plan.scale


def test_runs_have_names_of_their_own():
    runs = [Run("a", 1, 0, "on", "x"), Run("a", 1, 0, "on", "y"), Run("a", 1, 0, "long"), Run("a", 2, 0, "long")]
    runs += [Run("a", 1, 0, "layers", "x", ("p",)), Run("a", 1, 0, "layers", "x", ("q",))]
    assert len({run.key for run in runs}) == len(runs)
    assert "/" not in Run("a/b:c d", 1, 0, "long").key


def test_seeds_that_begin_by_other_routes_do_not_widen_the_spread():
    """Seed 0 begins with trained weights, far ahead of the others: that is no chance."""

    class Trained(Stub):
        def value(self, run):
            return super().value(run) + 300.0 * (run.seed == 0 and run.stage != "whole")

    wide, own = (
        Search((SHIFTS,), planned((SHIFTS,), (), (1.0, 2.0), 3, 8.0, cost), Trained(SYMMETRIC), cost, route=route).run()
        for route in (lambda run: "", lambda run: "trained" if run.seed == 0 else "")
    )
    assert own.spread()[0] < 30 < wide.spread()[0]


def test_seeds_that_have_failed_do_not_make_a_margin_surer():
    class Failing(Stub):
        def value(self, run):
            return -math.inf if run.network == "conv" and run.seed and run.stage != "short" else super().value(run)

    search = searched(Failing(SYMMETRIC, noise=30.0))
    spread, _ = search.spread()
    alive = {"conv": 1.0, "f-fc+conv": 0.748}  # deviations of the largest of one and of three
    assert search.between("conv", "f-fc+conv")[0] == pytest.approx(spread * math.hypot(*alive.values()))


def test_layers_of_another_network_do_not_choose_what_is_left_out():
    """Each layer alone is worth little to F-FC+CONV, both are worth 500 nats; the other network, which is worse, needs only one of them."""

    class Priced(Stub):
        def value(self, run):
            if run.stage != "layers":
                return super().value(run)
            lost = 500.0 * (len(run.left) > 1) if run.network == "f-fc+conv" else 500.0 * ("one" in run.left)
            return self.values[run.start] - lost

    evidence = BROKEN | {"gconv": -4000.0, "gconv+turn": -2500.0}
    search = searched(Priced(evidence), (SHIFTS, TURNS), budget=40.0, layers=lambda network: ("one", "two"))
    verdicts = [Verdict(found.symmetry, found.judgement, found.breaking, found.tie) for found in search.findings()]
    assert [verdict.judgement for verdict in verdicts] == ["no", "no"]
    chosen = next(run for run in search.outcomes if run.key == discovering._chosen(search, verdicts))
    assert (chosen.network, chosen.left) == ("f-fc+conv", ("one",))


def test_a_trial_that_has_failed_gained_nothing_that_can_be_said():
    class Failing(Stub):
        def value(self, run):
            return -math.inf if run.stage == "short" and run.width == 2.0 else super().value(run)

    (finding,) = searched(Failing(SYMMETRIC)).findings()
    assert set(finding.tried) == {"longer runs"}


@pytest.mark.parametrize("budget", [5.0, 6.0, 6.8])
def test_layers_that_cannot_be_left_out_together_stay_within_the_budget(budget):
    class Priced(Stub):
        def value(self, run):
            lost = 500.0 * (len(run.left) > 1)
            return super().value(run) if run.stage != "layers" else self.values[run.start] - lost

    search = searched(Priced(BROKEN), budget=budget, layers=lambda network: [f"layer{i}" for i in range(30)])
    needed = [price.needed for price in search.prices["translations"].values()]
    assert needed.count(False) == 1
    assert needed.count(None) >= 28, "what was not left out beside it is not said to be needed"


def test_of_two_layers_that_stand_in_for_each_other_one_is_needed():
    class Priced(Stub):
        def value(self, run):
            lost = 500.0 * ({"first", "last"} <= set(run.left))
            return super().value(run) if run.stage != "layers" else self.values[run.start] - lost

    names = ["first", *(f"layer{i}" for i in range(6)), "last"]
    search = searched(Priced(BROKEN), budget=20.0, layers=lambda network: names)
    needed = {name: price.needed for name, price in search.prices["translations"].items()}
    assert sum(needed.values()) == 1 == needed["first"] + needed["last"]
    assert None not in needed.values()


def test_quiet_networks_do_not_vouch_for_a_noisy_one():
    class Noisy(Stub):
        def value(self, run):
            noisy = 9.0 * self.noise * (0.0, 1.0, -1.0)[run.seed % 3] * (run.network == "conv" and run.stage != "whole")
            return super().value(run) + noisy

    search = searched(Noisy(SYMMETRIC | {"gconv": -1000.0, "gconv+turn": -1000.0}, stuck=True), (SHIFTS, TURNS), budget=15.0)
    pooled, alone = search.spread(), search.spread("conv", "f-fc+conv")
    assert alone[0] > 1.2 * pooled[0]
    for pair, (spread, freedom) in {("conv", "f-fc+conv"): alone, ("gconv", "gconv+turn"): pooled}.items():
        seeds = [len({run.seed for run in search._of(network, "long")}) for network in pair]
        expected = spread * math.hypot(*map(margins.of_best, seeds))
        assert search.between(*pair) == (pytest.approx(expected), freedom)


def test_data_that_change_when_they_are_moved_decide_what_margins_leave_open():
    little = {"conv": -1000.0, "f-fc+conv": -900.0, "f-fc": -1600.0}
    assert verdicts(searched(Stub(little, noise=60.0, stuck=True))) == ["undecided"]
    search = searched(Stub(little, noise=60.0, stuck=True), moved={"translations": margins.RARE})
    (finding,) = search.findings()
    assert finding.judgement == "no"
    assert finding.breaking.nats > margins.FEW
    assert not finding.breaking.counts
    assert verdicts(searched(Stub(little, noise=60.0, stuck=True), moved={"c4": margins.RARE})) == ["undecided"]


def test_networks_that_explain_little_do_not_vouch_for_a_symmetry():
    search = searched(Stub(SYMMETRIC), explained=lambda value: 0.1)
    (finding,) = search.findings()
    assert finding.judgement == "undecided"
    assert "explain so little" in finding.why
    assert verdicts(searched(Stub(BROKEN), explained=lambda value: 0.1)) == ["no"]


def test_a_network_that_has_learned_nothing_is_no_case_against_its_symmetry():
    def dead(value):
        return 0.0 if value < -2500 else 0.5

    search = searched(Stub(BROKEN), explained=dead, moved={"translations": 0.3})
    (finding,) = search.findings()
    assert finding.judgement == "undecided"
    assert "has learned nothing" in finding.why
    assert finding.stuck, "for a second opinion to say whether it is"
    (finding,) = searched(Stub(BROKEN), explained=dead, moved={"translations": 0.001}).findings()
    assert (finding.judgement, finding.stuck) == ("no", False)


@pytest.mark.parametrize(("little", "expected"), [(0.02, "yes"), (0.2, "undecided")])
def test_how_much_the_strict_network_must_explain_is_given(little, expected):
    """Classes ask for a fifth, numbers for more than nothing."""
    assert verdicts(searched(Stub(SYMMETRIC), explained=lambda value: 1 + value / 1110.0, little=little)) == [expected]


def test_runs_that_learned_nothing_do_not_say_how_sure_the_others_are():
    """Seed 0 goes on from trained weights and explains something; the others stay where they began, a few nats apart."""

    class Stuck(Stub):
        def value(self, run):
            own = super().value(run)
            return own if run.seed == 0 or run.stage == "whole" else -5000.0 - 3.0 * run.seed

    options = {"explained": lambda value: 1 + value / 5000.0, "route": lambda run: "trained" if run.seed == 0 else ""}
    search = searched(Stuck(SYMMETRIC, stuck=True), **options)
    (finding,) = search.findings()
    assert finding.judgement == "undecided"
    assert "nobody knows what chance is worth" in finding.why
    nothing, runs = search.idle()
    assert 0 < nothing < runs
    assert verdicts(searched(Stub(SYMMETRIC), explained=options["explained"])) == ["yes"]


def test_one_run_that_learned_nothing_does_not_make_the_others_unsure():
    """But where only one of three learned something, how good others would be is not known."""
    guessing = {"explained": lambda value: 1 + value / 9000.0}

    class Dying(Stub):
        dead: tuple[int, ...] = ()

        def value(self, run):
            fails = run.network == "f-fc" and run.seed in self.dead and run.stage != "whole"
            return -8999.0 if fails else super().value(run)

    def error(dead):
        stub = Dying(SYMMETRIC, noise=20.0, stuck=True)
        stub.dead = dead
        search = searched(stub, **guessing)
        (finding,) = search.findings()
        return finding.tie.error, finding.judgement

    assert error(())[1] == error((2,))[1] == "yes"
    assert error((2,))[0] < 3 * error(())[0]
    assert error(tuple(range(1, 99)))[0] > 1000


class Ahead(Stub):
    """By chance the best network that may break it is ahead; without what breaks in both layers it keeps all but ``lost`` of that."""

    lost, late = 3.0, 0.0  # ``late``: how much better the fourth seed is

    def value(self, run):
        found = super().value(replace(run, left=())) + self.late * (run.seed == 3 and run.stage == "long")
        return found - self.lost * (len(run.left) == 2)


def ahead(lost, nats=60.0, noise=60.0, budget=12.0, layers=("first", "second"), late=0.0, **more):
    stub = Ahead(SYMMETRIC | {"f-fc+conv": -1000.0 + nats}, noise=noise, stuck=True)
    stub.lost, stub.late = lost, late
    return searched(stub, layers=lambda network: layers, budget=budget, **more)


@pytest.mark.parametrize("lost", [3.0, 40.0, 300.0])
def test_breaking_gains_next_to_nothing_if_its_best_end_loses_that_without_what_breaks(lost):
    search, (before,) = ahead(lost), ahead(lost, layers=()).findings()
    (finding,) = search.findings()
    assert before.judgement == "undecided"
    assert before.breaking.nats > 50
    assert search.closed(SHIFTS) == pytest.approx(lost)
    assert finding.judgement == ("yes" if lost < 10 else "undecided")
    assert finding.breaking.nats == pytest.approx(3.0 if lost < 10 else before.breaking.nats)
    assert {run.left for run in search.outcomes if run.stage == "layers"} == {(), ("first", "second")}
    chosen = discovering._chosen(search, [SimpleNamespace(judgement="yes")])
    assert (chosen == search.shut(SHIFTS).key) == (lost < 10), "as good as the best, and keeps the symmetry"


def test_the_strict_network_is_returned_where_it_is_as_good():
    search = ahead(3.0, nats=5.0, noise=0.0)
    assert discovering._chosen(search, [SimpleNamespace(judgement="yes")]) == search.best("conv").start
    assert not search.shuts


@pytest.mark.parametrize(("lost", "expected"), [(3.0, "yes"), (300.0, "no")])
def test_a_no_is_asked_whether_what_breaks_is_worth_anything(lost, expected):
    search = ahead(lost, nats=300.0, noise=10.0)
    assert verdicts(search) == [expected]
    assert bool(search.prices) == (expected == "no")


def test_a_no_that_the_data_confirm_stays_whatever_layers_are_worth():
    search = ahead(3.0, nats=300.0, noise=10.0, moved={"translations": margins.RARE})
    assert verdicts(search) == ["no"]
    assert {run.left for run in search.outcomes if run.stage == "layers"} >= {("first",), ("second",)}


def test_what_is_lost_without_all_that_breaks_is_asked_within_the_budget():
    search = ahead(3.0, layers=())
    search.layers = lambda network: ("first", "second")
    for left, closes in ((0.01, False), (1.0, True)):
        search.plan.budget = search.spent + left
        search._close()
        assert bool(search.shuts) == closes


def test_another_best_end_is_asked_again():
    """A fourth seed is better: what the second lost says nothing of it."""
    search = ahead(40.0, budget=30.0, late=100.0)
    assert {run.seed for run in search.shuts} == {1, 3}
    assert search.shut(SHIFTS) in search.shuts


def test_evidence_that_cannot_be_is_said():
    search = searched(Stub(SYMMETRIC))
    assert search.cautions() == []
    one, two, three = sorted(run for run in search.outcomes if run.stage == "long")[:3]
    search.outcomes[one] = Outcome(-10.0, 1.0, more={"most": -15.1})
    search.outcomes[two] = Outcome(-10.0, 3.0, more={"most": -15.1})  # within its error
    search.outcomes[three] = Outcome(-math.inf, failed="it failed", more={"unusable": "the log evidence is not a number"})
    left_out, above = search.cautions()
    assert left_out.startswith(f"the evidence of 1 of {len(search.outcomes)} runs was left out")
    assert "the log evidence is not a number" in left_out
    assert "1 of" in above
    assert f"{one.network}, width {one.width:g}, seed {one.seed} has -10.0, but these labels allow at most -15.1" in above
    assert search.idle()[0] == 0, "a run that was left out may have learned"


def test_the_margin_that_is_shown_is_the_one_that_leaves_it_open():
    """A network without the tie gained more than the relaxed one, and by a larger error: the table showed one, the reason the other."""
    relaxed, untied = Margin(107.0, 40.0, 4), Margin(226.0, 104.0, 4)
    tie = Margin(-226.0, 104.0, 4)
    assert margins.telling([relaxed, untied], "undecided", None, 1.0) == untied
    assert str(untied) in notes.why([relaxed, untied], tie, None, 1.0, False, False)


def test_why_data_that_change_leave_it_open_for_weak_networks_too():
    ways, tie = [Margin(0.0, 3.0, 4)], Margin(300.0, 20.0, 4)
    for weak in (False, True):
        assert "the data change when they are moved" in notes.why(ways, tie, None, margins.RARE, weak, True)
        assert "ask about translations" not in notes.why(ways, tie, None, margins.RARE, weak, True)
        assert "ask about translations too" in notes.why(ways, tie, None, margins.RARE, weak, False)
    assert "explain so little" in notes.why(ways, tie, None, 1.0, True, True)
