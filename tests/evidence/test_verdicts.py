"""What is decided: verdicts of layers, cautions, and where their thresholds are."""

import math
from dataclasses import replace

import pytest
import torch

import autosym
from autosym.evidence import verdicts
from autosym.evidence.cautions import (
    Borders,
    Dead,
    Guessing,
    Impossible,
    Little,
    Moving,
    OneClass,
    OneStep,
    Rising,
    Saturated,
    Unused,
)
from autosym.evidence.verdicts import Known
from autosym.linear.groups import GROUPS, nested
from autosym.linear.path import NOTHING, Kept
from autosym.report.findings import class_count
from learned import chain, network, path
from models import small

SHIFTS = Kept(equivariant=True)


def judged(*paths, **options):
    """The verdicts of layers, in a word each."""
    return [layer.verdict for layer in verdicts.layers(paths, **options)]


def just_below(value):
    return math.nextafter(value, -math.inf)


# ---- layers


@pytest.mark.parametrize(("share", "said"), [(0.0, True), (0.049, True), (0.05, False), (None, False)])
@pytest.mark.parametrize("limits", [["borders", "strides"], ["strides"], []])
def test_layers_found_symmetric_up_to_borders_are_named(share, said, limits):
    known = Known(-10.0, 100, 4)
    found = verdicts.cautions(network(share, 0.5), known, {"l0": limits, "l1": ["borders"]})
    expected = (Borders(("l0",)),) if said and "borders" in limits else ()
    assert found == expected
    assert all("lift" in str(caution) for caution in found)


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (0.0, "strict"),
        (just_below(0.01), "strict"),
        (0.01, "nearly"),
        (just_below(0.05), "nearly"),
        (0.05, "mixed"),
        (1.0, "mixed"),
        (None, "unknown"),
    ],
)
def test_a_layer_is_judged_by_what_its_free_paths_hold(share, expected):
    (layer,) = verdicts.layers(network(share))
    assert (layer.verdict, layer.share, layer.number, layer.name) == (expected, share, 1, "l0")
    assert layer.keeps == SHIFTS


def test_layers_without_a_choice():
    assert judged() == []
    assert judged(path()) == ["fixed"]
    assert judged(path(share=None)) == ["fixed"]
    assert judged(path("fc", symmetric=False)) == ["free"]
    assert verdicts.layers([path("fc", symmetric=False)])[0].keeps == NOTHING
    assert judged(*network(0.4), learned=False) == ["held"]
    assert judged(*network(0.4)) == ["mixed"]
    assert judged(path(), learned=False) == ["fixed"]


def test_a_convolution_beside_a_group_convolution_is_a_choice():
    (layer,) = verdicts.layers([path("conv", share=0.6), path("gconv:c4", share=0.4)])
    assert (layer.verdict, layer.share, layer.breaks) == ("mixed", 0.6, ("c4",))
    assert layer.keeps.group == "c4"
    (layer,) = verdicts.layers([path("conv", share=0.005), path("gconv:c4", share=0.995)])
    assert (layer.verdict, layer.breaks) == ("strict", ("c4",))
    assert judged(path("gconv:c4")) == ["fixed"]
    assert judged(path("pool", share=0.6), path("gconv:c4", share=0.4)) == ["fixed"], "a mean over positions breaks no group"
    assert judged(path("own", share=0.6), path("gconv:c4", share=0.4)) == ["fixed"], "it does not say that it breaks one"


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ({"f-fc": 0.0, "conv": 0.005, "gconv:c4": 0.995}, Kept(equivariant=True, groups=("c4", "c2"))),
        ({"f-fc": 0.0, "conv": 0.01, "gconv:c4": 0.99}, SHIFTS),
        ({"conv": 0.0, "gconv:c4": 0.0, "gconv:d4": 1.0}, Kept(equivariant=True, groups=nested(GROUPS["d4"]))),
        ({"conv": 0.03, "gconv:c4": 0.5, "gconv:d4": 0.47}, Kept(equivariant=True, groups=("c4", "c2"))),
        ({"f-fc": 0.0, "gconv:c4": 0.5, "gconv:flip-vertical": 0.5}, SHIFTS),
        ({"pool": 0.4, "f-fc": 0.6}, Kept(invariant=True, every=True)),
        ({"pool": 0.4, "conv": 0.6}, NOTHING),
        ({"own": 1.0, "f-fc": 0.0}, Kept(every=True)),
        ({"conv": 1.0, "own": 0.0}, SHIFTS),
        ({"conv": 0.5, "own": 0.5}, NOTHING),
        ({"conv": None, "own": 1.0}, NOTHING),
    ],
    ids=str,
)
def test_a_layer_keeps_what_its_symmetric_paths_in_use_have_in_common(shares, expected):
    (layer,) = verdicts.layers([path(name, share=share, symmetric=name != "f-fc") for name, share in shares.items()])
    assert layer.keeps == expected


def judged_steps(*shares):
    """By group, what is said of a layer with a chain of paths with these shares."""
    (layer,) = verdicts.layers(chain(*shares))
    return layer, {step.group: (step.share, step.verdict) for step in layer.steps}


@pytest.mark.parametrize(
    ("shares", "verdict", "kept", "said"),
    [
        ((1.0, 0.0, 0.0, 0.0), "strict", "d4", ("strict", "strict", "strict")),
        ((0.97, 0.03, 0.0, 0.0), "strict", "c4", ("nearly", "strict", "strict")),
        ((0.5, 0.47, 0.03, 0.0), "strict", "c2", ("mixed", "nearly", "strict")),
        ((0.5, 0.0, 0.47, 0.03), "nearly", "c2", ("mixed", "mixed", "nearly")),
        ((0.0, 0.5, 0.25, 0.25), "mixed", "c2", ("mixed", "mixed", "mixed")),
        ((0.25, 0.25, 0.25, 0.0, 0.25), "mixed", "c2", ("mixed", "mixed", "mixed")),
        ((0.984, 0.008, 0.008, 0.0), "strict", "c4", ("nearly", "strict", "strict")),
    ],
    ids=str,
)
def test_every_step_of_a_chain_is_judged_by_itself(shares, verdict, kept, said):
    layer, found = judged_steps(*shares)
    free = sum(shares[4:])
    expected = (sum(shares[1:4]) + free, sum(shares[2:4]) + free, shares[3] + free)
    assert (layer.verdict, layer.keeps.group) == (verdict, kept)
    assert list(found) == ["d4", "c4", "c2"]
    for (share, judgement), wanted, word in zip(found.values(), expected, said, strict=True):
        assert (share, judgement) == (pytest.approx(wanted, abs=1e-12), word)


def test_steps_of_a_chain_with_an_unknown_share_are_not_judged():
    layer, found = judged_steps(None, 0.5, 0.5, 0.0)
    assert (layer.verdict, found) == ("unknown", {})


def test_it_is_what_a_path_keeps_that_decides_not_its_name():
    plain, turned = replace(path("conv", share=0.6), path="a"), replace(path("gconv:c4", share=0.4), path="b")
    (layer,) = verdicts.layers([plain, turned])
    assert (layer.verdict, layer.breaks) == ("mixed", ("c4",))
    other = replace(path("own", share=1.0), path="conv")
    assert verdicts.layers([other])[0].keeps == Kept(every=True)


def test_limits_of_groups_are_not_limits_of_translations():
    limits = {"1": ["borders", "interpolation"]}
    (turned,) = verdicts.layers([path("f-fc", share=0.0, symmetric=False), path("gconv:c8", share=1.0)], limits=limits)
    assert turned.up_to == ("borders", "interpolation")
    (shifted,) = verdicts.layers([path("conv", share=0.4), path("own", share=0.6)], limits=limits)
    assert shifted.up_to == turned.shifts_up_to == ("borders",)
    assert verdicts.layers([path()])[0].up_to == ()


@pytest.mark.parametrize(
    ("omega", "learned", "expected"),
    [
        (1e-3, True, "constant"),
        (-1e-3, True, "constant"),
        (just_below(0.01), True, "constant"),
        (0.01, True, "free"),
        (0.5, True, "free"),
        (-0.5, True, "free"),
        (1e-3, False, "free"),
    ],
)
def test_a_sparse_path_is_judged_by_learned_lengthscales(omega, learned, expected):
    sparse = path("s-fc", share=0.6, symmetric=False, omega={"u_1": omega, "u_2": 0.0}, learned_omega=learned)
    assert judged(replace(sparse, share=1.0)) == [expected]
    assert judged(path("conv", share=0.4), sparse) == [{"constant": "constant", "free": "mixed"}[expected]]
    assert judged(replace(sparse, omega={})) == ["free"]


@pytest.mark.parametrize(("effective", "expected"), [(0.5, "mixed"), (just_below(0.5), "unused"), (0.0, "unused")])
def test_a_layer_without_an_effective_parameter_is_not_judged(effective, expected):
    rows = network(0.9, effective=effective)
    assert judged(*rows) == [expected]
    assert judged(*rows, guess=True) == ["guess"]
    dead = (Dead(("l0",)),) if not effective else ()
    assert verdicts.cautions(rows, Known()) == ((*dead, Unused(("l0",))) if expected == "unused" else ())
    assert verdicts.cautions(rows, Known(learned=False)) == ()


# ---- nothing established

CHANCE = -10 * math.log(3)
TOLD = Known(samples=10, classes=3)


def test_nothing_is_judged_at_the_evidence_of_guessing():
    rows = network(0.0, 0.9)
    for log_evidence in (CHANCE, CHANCE - 0.1, math.nan):
        found = verdicts.verdict(rows, replace(TOLD, log_evidence=log_evidence))
        (caution,) = found.cautions
        assert isinstance(caution, Guessing)
        assert (caution.classes, caution.chance, caution.dead) == (3, -math.log(3), None)
        assert caution.per_sample == log_evidence / 10 or math.isnan(log_evidence)
        assert found.nothing == caution
        assert found.beside_headline() == ()
        assert [layer.verdict for layer in found.layers] == ["guess", "guess"]
    above = verdicts.verdict(rows, replace(TOLD, log_evidence=CHANCE + 1e-9))
    assert above.nothing is None
    assert [layer.verdict for layer in above.layers] == ["strict", "mixed"]
    held = verdicts.verdict(rows, replace(TOLD, log_evidence=CHANCE, learned=False))
    assert (held.nothing, held.cautions) == (None, ())
    assert [layer.verdict for layer in held.layers] == ["held", "held"]


@pytest.mark.parametrize(
    "unknown", [{"classes": None}, {"classes": 0}, {"classes": 1}, {"log_evidence": None}, {"samples": None}]
)
def test_what_is_not_known_is_not_called_guessing(unknown):
    assert verdicts.cautions(network(0.0, 0.9), replace(Known(CHANCE - 0.1, 10, 3), **unknown)) == ()


@pytest.mark.parametrize(("part", "little"), [(1e-6, True), (0.05, True), (0.1999, True), (0.2001, False), (0.25, False)])
def test_hardly_better_than_guessing_is_a_caution(part, little):
    chance = -100 * math.log(4)
    found = verdicts.cautions([], Known((1 - part) * chance, 100, 4))
    assert found == ((Little(pytest.approx(part)),) if little else ())
    assert verdicts.gained((1 - part) * chance, 100, 4) == pytest.approx(part)


def test_what_guessing_explains_is_nothing():
    assert verdicts.gained(-100 * math.log(4), 100, 4) == 0.0
    assert verdicts.gained(-100.0, 100, 1) == 1.0, "one class: there is nothing to guess"
    assert class_count({"likelihood": "categorical", "outputs": 4}) == 4
    assert class_count({"likelihood": "categorical"}) == 0
    assert class_count({"likelihood": "gaussian", "outputs": 4}) is None
    assert class_count({"likelihood": "of a user", "outputs": 1, "class_count": 2}) == 2


def test_labels_of_one_class_are_not_a_symmetry():
    """They are explained as well as can be: by the evidence alone nothing would be wrong."""
    data = torch.randn(12, 2, 4, 4), torch.full((12,), 2)
    for step in ("mackay", "none"):
        assert autosym.fit(small(), data, epochs=4, step=step).symmetry().cautions == (OneClass(12, 2),)
    known = replace(TOLD, log_evidence=-1.0, fingerprint=[20.0, 40.0, 0.0, 0.0, 0.0])
    found = verdicts.verdict(network(0.0), known)
    assert found.cautions == (OneClass(10, 2),)
    assert found.nothing == OneClass(10, 2)
    assert verdicts.verdict(network(0.0), replace(known, learned=False)).nothing is None, "of which the headline speaks"
    for other in ({"fingerprint": [20.0, 42.0, 0.0, 0.0, 0.0]}, {"fingerprint": None}, {"classes": None}, {"samples": None}):
        assert verdicts.cautions(network(0.0), replace(known, **other)) == ()


FAILED = {
    Impossible(-1.0, -1.8, 0.1): Known(-1.0, 10, 3, lr=0.1, log_likelihood=-0.9, most=-1.8, effective_parameters=5.0),
    Saturated(0.1, 1.0, 0.1): Known(-5.0, 10, 3, lr=0.1, log_likelihood=0.0, most=-1.8, effective_parameters=0.1),
}


@pytest.mark.parametrize("expected", FAILED, ids=lambda caution: type(caution).__name__)
def test_nothing_is_judged_by_evidence_that_has_failed(expected):
    known = FAILED[expected]
    found = verdicts.verdict(network(0.0, 0.9), known)
    assert found.cautions == (expected,)
    assert found.nothing == verdicts.failed(known) == expected
    assert found.beside_headline() == ()
    assert [layer.verdict for layer in found.layers] == ["failed", "failed"]
    assert [layer.verdict for layer in verdicts.verdict([path()], known).layers] == ["fixed"], "by construction"


@pytest.mark.parametrize("expected", FAILED, ids=lambda caution: type(caution).__name__)
def test_it_is_said_beside_a_headline_on_precisions_that_were_held_too(expected):
    held = verdicts.verdict(network(0.9), replace(FAILED[expected], learned=False))
    assert (held.nothing, held.cautions, held.beside_headline()) == (None, (expected,), (expected,))
    assert [layer.verdict for layer in held.layers] == ["held"]


def test_that_labels_are_of_one_class_is_said_before_all_else():
    known = replace(FAILED[Impossible(-1.0, -1.8, 0.1)], fingerprint=[20.0, 40.0, 0.0, 0.0, 0.0])
    assert verdicts.cautions(network(0.0), known) == (OneClass(10, 2),)


@pytest.mark.parametrize(
    "unknown", [{"log_evidence": None}, {"samples": None}, {"most": None}, {"most": math.inf}, {"log_evidence": -1.8}]
)
def test_what_is_not_known_has_not_failed(unknown):
    assert verdicts.failed(replace(FAILED[Impossible(-1.0, -1.8, 0.1)], **unknown)) is None
    for unknown in ({"log_likelihood": None}, {"effective_parameters": None}, {"classes": None}):
        assert verdicts.failed(replace(FAILED[Saturated(0.1, 1.0, 0.1)], **unknown)) is None


def test_a_dead_network_is_told_to_take_smaller_steps():
    """Effective parameters that are 0 have no shares; what helps is not a longer run."""
    rows = [replace(row, effective_parameters=0.0, share=math.nan) for row in network(0.0)]
    (caution,) = verdicts.cautions(rows, replace(TOLD, log_evidence=-1000.0, lr=3e6))
    assert isinstance(caution, Guessing)
    assert caution.dead == Dead(("l0",), 3e6)


def test_layers_are_dead_if_nothing_in_them_is_determined():
    rows = [*network(None, effective=0.0), path(layer="l1")]
    known = replace(TOLD, log_evidence=-1.0, lr=0.1)
    found = verdicts.verdict(rows, known)
    assert found.cautions == found.beside_headline() == (Dead(("l0",), 0.1),)
    assert verdicts.cautions([replace(row, effective_parameters=math.nan) for row in rows[:2]], known) == (Dead(("l0",), 0.1),)
    assert verdicts.cautions([replace(row, effective_parameters=1e-9) for row in rows[:2]], known) == ()
    assert verdicts.cautions([replace(row, parameters=0) for row in rows], known) == (), "frozen"


def test_layers_that_are_not_judged_are_named_beside_a_table_and_said_in_a_headline():
    found = verdicts.verdict(network(0.9, effective=0.4), replace(TOLD, log_evidence=-1.0))
    assert found.cautions == (Unused(("l0",)),)
    assert found.beside_headline() == ()
    assert [layer.verdict for layer in found.layers] == ["unused"]


def test_a_printed_table_says_of_what_it_is_too_little():
    torch.manual_seed(0)
    fit = autosym.fit(small(), (torch.randn(12, 2, 4, 4), torch.randn(12, 3)), "gaussian", epochs=4)
    caution = Unused(("blocks.0", "blocks.1"))
    assert caution not in fit.symmetry().cautions
    fit.prior.log_precision.data.fill_(12.0)  # which leaves the data little to determine
    assert all(0 < path.effective_parameters < 0.1 for path in fit.symmetry())
    assert fit.symmetry().cautions[-1] == caution
    assert str(fit.symmetry()).splitlines()[-1] == f"Caution: {caution}"


# ---- not yet settled


def steps(*values):
    """A history with an evidence step every other epoch."""
    return [{"epoch": 2 * n, "log_evidence": float(value)} for n, value in enumerate(values, 1)]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([-100.0 + 5 * i for i in range(12)], Rising),
        ([-100.0 + 60 * (1 - math.exp(-i)) for i in range(12)], None),
        ([-100.0, -60.0], Rising),
        ([-100.0 + 60 * (1 - math.exp(-i)) + (-1) ** i * 5 for i in range(24)], None),
        ([-60.0 + 0.05 * i for i in range(12)], None),
        ([-50.0 - i for i in range(12)], None),
        ([-50.0], OneStep),
        ([], None),
    ],
    ids=["rising", "settled", "two steps", "noisy", "by less than a nat", "falling", "one step", "none"],
)
def test_an_evidence_that_still_rose_is_cautioned_of(values, expected):
    history = [{"epoch": e, "loss": 1.0} | ({"log_evidence": v} if e % 2 else {}) for v in values for e in (1, 2)]
    known = replace(TOLD, log_evidence=-5.0, history=history)
    found = verdicts.verdict(network(0.0, 0.9), known)
    assert [type(caution) for caution in found.cautions] == ([expected] if expected else [])
    assert found.beside_headline() == found.cautions
    bare = verdicts.verdict([], known)
    assert bare.cautions == found.cautions
    assert bare.beside_headline() == (), "without layers there are no shares to rely on"
    assert verdicts.cautions([], replace(known, learned=False)) == ()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((-10.0, -9.0), None),
        ((-10.0, -8.99), 1.01),
        ((-100.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 5.25), None),
        ((-100.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 5.28), 5.28),
    ],
    ids=["a nat", "more than a nat", "a twentieth of the span", "more than a twentieth"],
)
def test_a_rise_is_more_than_a_nat_and_a_twentieth_of_all(values, expected):
    """5.25 of 105.25 is less than a twentieth, 5.28 of 105.28 is more."""
    found = verdicts.cautions([], Known(history=steps(*values)))
    assert found == (() if expected is None else (Rising(pytest.approx(expected)),))


@pytest.mark.parametrize(
    "values",
    [(-85, -826, -383, -133, -125, -240, -423, -499, -177, -129, -115), (-100, -40, -90, -80, -70, -60), (-50, -53)],
    ids=["to and fro", "below a peak", "falling"],
)
def test_evidence_that_had_been_better_is_not_called_rising(values):
    """A fit ends at its best snapshot, or above it."""
    assert verdicts.cautions([], Known(history=steps(*values))) == ()


@pytest.mark.parametrize(
    ("epoch", "expected"), [(0, ()), (1, ()), (2, (Rising(40.0),)), (9, (Rising(40.0),)), (None, (Rising(40.0),))]
)
def test_a_run_that_went_back_before_its_last_evidence_step_is_not_called_rising(epoch, expected):
    history = [line | {"epoch": number} for number, line in enumerate(steps(-100.0, -60.0), 1)]
    assert verdicts.cautions([], Known(history=history, epoch=epoch)) == expected


def ranges(*values):
    return [{"ranges": {"rotation (degrees)": value}} for value in values]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((5, 10, 15, 20, 25, 26, 28, 31), (26, 31)),
        ((5, 60, 120, 150, 170, 179, 180, 180), None),
        ((5, 31), None),
        ((5, 10, 31), None),
        ((5, 10, 15, 31), (15, 31)),
        ((5, 10, 95, 100), None),
        ((5, 10, 94.9, 100), (94.9, 100)),
        ((5, 10, 105.1, 100), (105.1, 100)),
    ],
    ids=["widens", "settled", "two steps", "three steps", "four steps", "a twentieth", "more than a twentieth", "narrows"],
)
def test_a_range_that_still_moves_is_cautioned_of(values, expected):
    moved = () if expected is None else (Moving((("rotation (degrees)", *expected),)),)
    assert verdicts.cautions([], Known(history=ranges(*values))) == moved
    assert verdicts.verdict([], Known(history=ranges(*values))).beside_headline() == moved
    assert verdicts.cautions([], Known(history=[{"loss": 1.0}])) == ()


def test_ranges_after_the_epoch_that_was_kept_do_not_count():
    """They were printed beside it: a range of 100, and that it had moved from 90 to 20."""
    history = [line | {"epoch": epoch} for epoch, line in enumerate(ranges(99, 100, 100, 100, 90, 20), 1)]
    kept = [line | {"log_evidence": -1.0} if line["epoch"] <= 4 else line for line in history]
    assert verdicts.cautions([], Known(history=kept, epoch=4)) == ()
    (moving,) = verdicts.cautions([], Known(history=kept, epoch=6))
    assert moving == Moving((("rotation (degrees)", 90, 20),))


def test_cautions_are_given_together():
    """Of a network that tells classes apart, each that holds; of one that does not, only that."""
    history = [line | more for line, more in zip(steps(-40, -30, -20, -10), ranges(5, 10, 15, 31), strict=True)]
    known = replace(TOLD, log_evidence=0.9 * CHANCE, history=history)
    rows = [*network(None, effective=0.0), *(replace(row, layer="l1") for row in network(0.9, effective=0.1))]
    kinds = [type(caution) for caution in verdicts.cautions(rows, known)]
    assert kinds == [Dead, Unused, Little, Rising, Moving]
    (only,) = verdicts.cautions(rows, replace(known, log_evidence=CHANCE))
    assert only == Guessing(CHANCE / 10, -math.log(3), 3, Dead(("l0",)))
