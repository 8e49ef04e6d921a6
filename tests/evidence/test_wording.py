"""What was learned, in words: verdicts of layers, the headline, cautions, and what a difference of evidence means."""

import math
import re

import pytest
import torch
from torch import nn

import autosym
from autosym.evidence import wording
from autosym.linear.conv import Conv
from autosym.linear.dense import Dense
from autosym.nn import layers, nets
from autosym.report import findings, page
from models import small

pytest.importorskip("jinja2")


def path(name="conv", layer="1", share=1.0, symmetric=True, omega=None, precision=None):
    return {
        "layer": layer,
        "path": name,
        "symmetric": symmetric,
        "precision": {"linear": 1.0} if precision is None else precision,
        "parameters": 10,
        "effective_parameters": 5.0,
        "share": share,
        "omega": omega or {},
    }


def network(*free_shares):
    """The symmetry of a network of layers with a convolution and a free path."""
    rows = []
    for layer, share in enumerate(free_shares):
        rest = None if share is None else 1 - share
        rows += [path("conv", f"l{layer}", rest), path("f-fc", f"l{layer}", share, symmetric=False)]
    return rows


# ---- the sentence


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ((0.0,) * 6 + (0.61,), "Layers 1 to 6 became translation-equivariant; layer 7 uses position (61 % free)."),
        ((0.0099, 0.01, 0.0499, 0.05), "Layer 1 became translation-equivariant; layers 2 and 3 are nearly "
         "translation-equivariant (1 to 4.99 % free); layer 4 uses position (5 % free)."),
        ((0.0, 0.5, 0.0, 0.0, 0.0), "Layers 1 and 3 to 5 became translation-equivariant; layer 2 uses position (50 % free)."),
        ((0.0, 0.0), "Layers 1 and 2 became translation-equivariant."),
        ((0.02,), "Layer 1 is nearly translation-equivariant (2 % free)."),
        ((0.9, 1.0), "Layers 1 and 2 use position (90 to 100 % free)."),
        ((0.0, None), "Layer 1 became translation-equivariant; layer 2 has a frozen or unused path, of which the evidence says nothing."),
    ],
)  # fmt: skip
def test_the_headline_says_which_layers_became_symmetric(shares, expected):
    assert wording.headline(network(*shares)) == expected


def test_the_headline_without_a_choice():
    assert "no relaxed layer" in wording.headline([])
    assert wording.headline([path()]) == "No layer had a choice: all of them are translation-equivariant by construction."
    assert wording.headline([path("fc", symmetric=False)]) == "No layer had a choice: none of them has a symmetric path."
    assert "not learned" in wording.headline(network(0.0), learned=False)
    assert "became" not in wording.headline(network(0.0), learned=False)
    assert wording.headline([path()], learned=False) == wording.headline([path()])
    assert (
        wording.layers(network(0.4), learned=False)[0]["words"]
        == "has 40 % of its effective parameters free, at fixed precisions"
    )


def test_a_convolution_beside_a_group_convolution_is_a_choice():
    rows = [
        path(name, f"l{i}", s) for i, p in enumerate((0.0, 0.03, 0.4, 0.6)) for name, s in (("conv", p), ("gconv:c4", 1 - p))
    ]
    assert wording.headline(rows) == (
        "Layer 1 became equivariant to translations and c4; layer 2 is nearly equivariant to translations and c4 (3 % in plain "
        "convolutions); layers 3 and 4 are equivariant to translations, not to c4 (40 to 60 % in plain convolutions)."
    )
    assert wording.layers(rows[-2:], learned=False)[0]["words"] == (
        "has 60 % of its effective parameters in plain convolutions, at fixed precisions"
    )
    alone = [path("gconv:c4", share=1.0)]
    assert (
        wording.headline(alone) == "No layer had a choice: all of them are equivariant to translations and c4 by construction."
    )


def test_words_for_groups_within_groups_and_paths_that_are_no_convolutions():
    def rows(**shares):
        return [path(name.replace("_", ":"), share=share) for name, share in shares.items()]

    assert wording.headline(rows(conv=0.03, gconv_c4=0.5, gconv_d4=0.47)) == (
        "Layer 1 is nearly equivariant to translations and c4 (3 % in plain convolutions)."
    )
    assert wording.headline(rows(conv=0.0, gconv_c4=0.0, gconv_d4=1.0)) == "Layer 1 became equivariant to translations and d4."
    assert "not to c4 or d4 (60 % in plain" in wording.headline(rows(conv=0.6, gconv_c4=0.2, gconv_d4=0.2))
    assert "plain convolutions" not in wording.headline(rows(pool=0.6, gconv_c4=0.4))
    assert wording.headline(rows(conv=0.6, gconv_c4=0.4), approximate={"1": ["borders and strides", "interpolation"]}) == (
        "Layer 1 is equivariant to translations up to borders and strides, not to c4 (60 % in plain convolutions)."
    )


def test_layers_that_differ_are_not_said_in_one_breath():
    free = [path("f-fc", "l0", 0.03, symmetric=False), path("gconv:c4", "l0", 0.97)]
    plain = [path("conv", "l1", 0.04), path("gconv:c4", "l1", 0.96)]
    assert wording.headline([*free, *plain]) == (
        "Layer 1 is nearly equivariant to translations and c4 (3 % free); layer 2 is nearly equivariant to translations and c4 (4 % in "
        "plain convolutions)."
    )
    said = wording.headline([*network(0.6), path("conv", "l1", 0.6), path("gconv:c4", "l1", 0.4)])
    assert said == (
        "Layer 1 uses position (60 % free); layer 2 is equivariant to translations, not to c4 (60 % in plain convolutions)."
    )

    rows = [path(name, layer, share) for layer in ("l0", "l1") for name, share in (("conv", 0.6), ("gconv:c4", 0.4))]
    said = wording.headline(rows, approximate={"l0": ["borders and strides"]})
    assert said.startswith(
        "Layer 1 is equivariant to translations up to borders and strides, not to c4 (60 % in plain convolutions); layer 2"
    )


def test_what_all_layers_hold_that_breaks_a_symmetry():
    assert wording.WHOLE == 0.05
    assert wording.whole({}) == ""
    assert wording.whole({"free": 0.02, "c4": 0.584}) == (
        "Of all effective parameters 2 % are free, 58.4 % break c4; where the symmetry was planted, in networks of nets.build, as a rule "
        "less than 5 %."
    )


def test_the_headline_names_the_group_only_where_nothing_but_its_convolution_is_left():
    rows = [path("f-fc", share=0.0, symmetric=False), path("conv", share=0.005), path("gconv:c4", share=0.995)]
    assert wording.headline(rows) == "Layer 1 became equivariant to translations and c4."
    rows = [path("f-fc", share=0.0, symmetric=False), path("conv", share=0.3), path("gconv:c4", share=0.7)]
    assert wording.headline(rows) == "Layer 1 became translation-equivariant."
    rows = [path("own", share=1.0), path("other", share=0.0, symmetric=False)]
    assert wording.headline(rows) == "Layer 1 became symmetric."
    rows = [path("pool", share=0.4), path("fc", share=0.6, symmetric=False)]
    assert wording.headline(rows) == "Layer 1 uses position (60 % free)."


def test_a_convolution_with_borders_or_strides_is_equivariant_only_up_to_them():
    shape = (1, 8, 8)
    made = {
        "exact": Conv(1, 2),
        "dilated": Conv(1, 2, dilation=2),
        "zeros": Conv(1, 2, padding_mode="zeros"),
        "strided": Conv(1, 2, stride=2),
        "valid": Conv(1, 2, padding=(0, 0, 0, 0)),
        "pointwise": Conv(1, 2, 1, padding_mode="zeros"),
        "padded pointwise": Conv(1, 2, 1, padding=(2, 2, 2, 2)),
    }
    model = nn.ModuleDict(
        {name: layers.Relaxed({"conv": conv}, {"fc": Dense(shape, (2, 4, 4))}) for name, conv in made.items()}
    )
    limits = ["borders and strides"]
    assert findings.approximate(model) == dict.fromkeys(("zeros", "strided", "valid", "padded pointwise"), limits)
    assert wording.headline(network(0.0, 0.0, 0.5), approximate={"l1": limits, "l2": limits}) == (
        "Layer 1 became translation-equivariant; layer 2 became translation-equivariant up to borders and strides; layer 3 uses "
        "position (50 % free)."
    )


def test_a_group_that_interpolates_is_not_called_exact():
    net = nets.build("f-fc+gconv:c8", (1, 8, 8), 3, 1, channels=(1, 1), strides=(1, 2), hidden=2)
    assert findings.approximate(net) == {"blocks.0": ["interpolation"], "blocks.1": ["interpolation"]}
    assert findings.approximate(nets.build("f-fc+gconv:c4", (1, 8, 8), 3, 1, channels=(1,), strides=(1,), hidden=2)) == {}
    rows = [path("f-fc", share=0.0, symmetric=False), path("gconv:c8", share=1.0)]
    limits = {"1": ["interpolation"]}
    assert (
        wording.headline(rows, approximate=limits) == "Layer 1 became equivariant to translations and c8 up to interpolation."
    )
    rows = [path("f-fc", share=0.0, symmetric=False), path("conv", share=0.4), path("gconv:c8", share=0.6)]
    assert wording.headline(rows, approximate=limits) == "Layer 1 became translation-equivariant."


def said_of(evidence, symmetry=None, **more):
    """A report's contents as far as words go: ten samples of three classes."""
    terms = dict.fromkeys(("log_likelihood", "log_prior", "complexity", "occam", "bound_of"))
    known = {"likelihood": "categorical", "samples": 10, "outputs": 3, "evidence": {"log_evidence": evidence, **terms}}
    return {"symmetry": network(0.0, 0.9) if symmetry is None else symmetry, **known, **more}


def test_nothing_is_said_to_be_learned_at_the_evidence_of_guessing():
    chance = -10 * math.log(3)
    learned, guessed = wording.summary(said_of(chance + 0.1)), wording.summary(said_of(chance - 0.1))
    assert learned["headline"].startswith("Layer 1 became translation-equivariant; layer 2 uses position")
    assert guessed["headline"] == (
        "Nothing is established yet: the log evidence, -1.109 nats per sample, is not above that of guessing one of 3 classes, -1.099, "
        "though accuracy may be; train longer, or on more data."
    )
    assert [layer["verdict"] for layer in guessed["layers"]] == ["guess", "guess"]
    assert not any("position" in layer["words"] or "became" in layer["words"] for layer in guessed["layers"])
    assert wording.summary(said_of(chance, schedule={"step": "none"}))["headline"].startswith("Symmetry was not learned")
    for unknown in ({"likelihood": "gaussian"}, {"outputs": None}, {"evidence": None}, {"samples": None}):
        assert wording.summary(said_of(chance - 0.1) | unknown)["headline"] == learned["headline"]


def test_labels_of_one_class_are_not_a_symmetry():
    """They are explained as well as can be: by the evidence alone nothing would be wrong."""
    data = torch.randn(12, 2, 4, 4), torch.full((12,), 2)
    for step in ("mackay", "none"):
        (caution,) = autosym.fit(small(), data, epochs=4, step=step).symmetry().cautions
        assert caution == "Nothing can be learned: all 12 labels are of class 2, so there is nothing to tell apart."
    assert wording.summary(said_of(-1.0, fingerprint=[20.0, 40.0]))["headline"].startswith("Nothing can be learned: all 10")
    assert "Nothing" not in wording.summary(said_of(-1.0, fingerprint=[20.0, 42.0]))["headline"]


def test_a_dead_network_is_told_to_take_smaller_steps():
    """Effective parameters that are 0 have no shares; what helps is not a longer run."""
    torch.manual_seed(0)
    data = torch.randn(30, 2, 4, 4), torch.arange(30) % 3
    table = autosym.fit(small(), data, epochs=4, lr=3e6).symmetry()
    assert all(math.isnan(path.share) for path in table)
    (said,) = table.cautions
    assert said.startswith("Nothing is established yet")
    assert "train longer" not in said
    assert (
        "the network died, or the data ask for nothing. Try a smaller learning rate (lr=1e+06 for 3e+06), and standardised inputs."
        in said
    )
    rows = [row | {"effective_parameters": 0.0, "share": None} for row in network(0.9)] + [path(layer="l1")]
    words = (
        "Layer l0 has no effective parameters, so no shares: the network died, or the data ask for nothing. Try a smaller learning rate, "
        "and standardised inputs."
    )
    for said in (wording.doubts(said_of(-1.0, rows)), wording.summary(said_of(-1.0, rows))["cautions"]):
        assert said == [words]
    assert wording.dead(said_of(-1.0, [row | {"parameters": 0} for row in rows])) == [], "frozen"


def test_random_labels_are_not_a_symmetry():
    """Noise with labels of no meaning: the page, its headline and its layers claim nothing."""
    torch.manual_seed(0)
    data = torch.randn(60, 2, 4, 4), torch.randint(3, (60,))
    fit = autosym.fit(small(), data, epochs=40, lr=0.02)
    assert float(fit.evidence.log_evidence) / 60 < -1.0986
    text = page.html(findings.contents(fit))
    assert "Nothing is established yet: " in text
    assert not re.search("became|use position|uses position|counts as symmetric", text)


def test_a_layer_without_an_effective_parameter_is_not_judged():
    rows = [row | {"effective_parameters": 0.4} for row in network(0.9)]
    assert wording.headline(rows) == "Layer 1 has less than one effective parameter, too little to judge by."
    assert wording.layers(rows)[0]["verdict"] == "unused"
    said = "Layer l0 has less than one effective parameter, too little to judge by."
    assert wording.doubts(said_of(-1.0, rows)) == [said], "beside a table, which names layers"
    assert wording.doubts(said_of(-1.0, rows, schedule={"step": "none"})) == wording.doubts(said_of(-1.0)) == []


def test_a_printed_table_says_of_what_it_is_too_little():
    torch.manual_seed(0)
    fit = autosym.fit(small(), (torch.randn(12, 2, 4, 4), torch.randn(12, 3)), "gaussian", epochs=4)
    said = "Layers blocks.0, blocks.1 have less than one effective parameter, too little to judge by."
    assert said not in str(fit.symmetry())
    fit.prior.log_precision.data.fill_(12.0)  # which leaves the data little to determine
    assert all(0 < path.effective_parameters < 0.1 for path in fit.symmetry())
    assert str(fit.symmetry()).splitlines()[-1] == f"Caution: {said}"


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ([-100.0 + 5 * i for i in range(12)], "still rising"),
        ([-100.0 + 60 * (1 - math.exp(-i)) for i in range(12)], None),
        ([-100.0, -60.0], "still rising"),
        ([-100.0 + 60 * (1 - math.exp(-i)) + (-1) ** i * 5 for i in range(24)], None),
        ([-60.0 + 0.05 * i for i in range(12)], None),
        ([-50.0 - i for i in range(12)], None),
        ([-50.0], "one step only"),
        ([], None),
    ],
    ids=["rising", "settled", "two steps", "noisy", "by less than a nat", "falling", "one step", "none"],
)
def test_an_evidence_that_still_rose_is_cautioned_of(values, word):
    history = [{"epoch": e, "loss": 1.0} | ({"log_evidence": v} if e % 2 else {}) for v in values for e in (1, 2)]
    said = said_of(-5.0, history=history)
    cautions = wording.summary(said)["cautions"]
    assert (len(cautions) == 1 and word in cautions[0]) if word else cautions == []
    assert all(caution in page.html(said) for caution in cautions)


@pytest.mark.parametrize(
    ("values", "end", "said"),
    [
        ((-85, -826, -383, -133, -125, -240, -423, -499, -177, -129, -115), -110.0, "epoch 2 had 25 nats more than the end"),
        ((-85, -826, -383, -133, -125, -240, -423, -499, -177, -129, -115), -84.0, None),
        ((-100, -40, -90, -80, -70, -60), -60.0, "epoch 4 had 20 nats more"),
        ((-100, -40, -90, -80, -70, -60), -35.0, None),
        ((-900, -850, -855, -860), -860.0, None),
    ],
    ids=["to and fro", "better at the end", "a peak", "rising, but not above the peak", "noise"],
)
def test_an_evidence_that_had_been_better_is_cautioned_of_and_is_not_called_rising(values, end, said):
    history = [{"epoch": 2 * n, "log_evidence": float(value)} for n, value in enumerate(values, 1)]
    known = {"symmetry": [], "likelihood": "gaussian", "evidence": {"log_evidence": end}, "history": history}
    found = wording.doubts(known | {"schedule": {"step": "mackay", "lr": 0.03}})
    if said is None:
        assert found == []
    else:
        (caution,) = found
        assert caution.startswith(f"The evidence was unsteady: {said}")
        assert "Try a smaller learning rate (lr=0.01 for 0.03)" in caution


@pytest.mark.parametrize(
    ("omega", "learned", "expected"),
    [(1e-3, True, "constant"), (0.5, True, "free"), (1e-3, False, "free"), (-1e-3, True, "constant")],
)
def test_a_sparse_path_is_judged_by_learned_lengthscales(omega, learned, expected):
    precision = {"u_1": 1.0, "u_2": 1.0} | ({"u_1.omega": 9.0, "u_2.omega": 9.0} if learned else {})
    rows = [path("s-fc", symmetric=False, omega={"u_1": omega, "u_2": 0.0}, precision=precision)]
    layer = wording.layers(rows)[0]
    assert layer["verdict"] == expected
    assert ("became constant in space" in layer["words"]) == (expected == "constant")
    beside = wording.layers([path("conv", share=0.4), rows[0] | {"share": 0.6}])[0]["words"]
    known = "became translation-equivariant: its free paths are constant in space, by their lengthscales"
    assert (beside == known) == (expected == "constant"), "a convolution is not constant in space"


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [([1], "layer 1"), ([1, 2], "layers 1 and 2"), ([1, 2, 3], "layers 1 to 3"), ([1, 3, 4, 5, 7], "layers 1, 3 to 5 and 7")],
)
def test_layers_are_listed_as_people_do(numbers, expected):
    assert wording.named(numbers) == expected


def test_what_a_difference_in_nats_means():
    assert [wording.strength(d) for d in (0.5, 1.0, 2.9, 3.0, 5.0, -7)] == [
        "not worth more than a mention", "positive", "positive", "strong", "very strong", "very strong",
    ]  # fmt: skip
    assert wording.odds(math.log(20)) == "20 : 1"
    assert wording.odds(1000.0) == "10⁴³⁴ : 1"


def ranges(*values):
    return [{"ranges": {"rotation (degrees)": value}} for value in values]


def test_a_range_that_still_moves_is_said():
    (said,) = wording.widening(ranges(5, 10, 15, 20, 25, 26, 28, 31))
    assert "rotation (degrees) went from 26 to 31" in said
    assert wording.widening(ranges(5, 60, 120, 150, 170, 179, 180, 180)) == []
    assert wording.widening(ranges(5, 31)) == [], "too few steps to tell"
    assert wording.widening([{"loss": 1.0}]) == []


def test_what_belongs_beside_a_table():
    known = {
        "evidence": {"log_evidence": -50.0},
        "samples": 100,
        "outputs": 3,
        "likelihood": "categorical",
        "schedule": {"step": "mackay"},
    }
    assert wording.doubts(known | {"history": ranges(5, 10, 15, 20, 25, 26, 28, 31)})[0].startswith("Over the last quarter")
    (said,) = wording.doubts(known | {"evidence": {"log_evidence": -500.0}})
    assert said.startswith("Nothing is established yet")
    assert wording.doubts(known | {"evidence": {"log_evidence": -500.0}, "schedule": {"step": "none"}}) == []


def test_hardly_better_than_guessing_is_a_caution():
    """At 5 % better than guessing one of four classes; at 25 % it is none."""
    known = {"likelihood": "categorical", "samples": 100, "outputs": 4, "schedule": {"step": "mackay"}, "history": []}
    chance = -100 * math.log(4)
    (said,) = wording.doubts(known | {"evidence": {"log_evidence": 0.95 * chance}})
    assert said.startswith("The evidence is 5% better than guessing, which is little")
    assert wording.doubts(known | {"evidence": {"log_evidence": 0.75 * chance}}) == []
    assert wording.gained(chance, 100, 4) == 0.0
