"""Verdicts in words: the headline, what is said of layers, and what a difference of evidence means."""

import math
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

import autosym
from autosym.evidence import cautions, verdicts
from autosym.evidence.shares import WHOLE, Symmetry, limits
from autosym.evidence.verdicts import Known
from autosym.linear.conv import Conv
from autosym.linear.dense import Dense
from autosym.nn import layers, nets
from autosym.report import findings, page, words
from learned import chain, network, path
from models import small

pytest.importorskip("jinja2")


def headline(paths, learned=True, approximate=None):
    return words.headline(verdicts.verdict(paths, Known(learned=learned), approximate))


def predicates(paths, learned=True, approximate=None):
    return [words.predicate([layer]) for layer in verdicts.layers(paths, learned, approximate)]


# ---- the sentence


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ((0.0,) * 6 + (0.61,), "Layers 1 to 6 became translation-equivariant; layer 7 uses position."),
        ((0.0099, 0.01, 0.0499, 0.05), "Layer 1 became translation-equivariant; layers 2 and 3 are nearly translation-equivariant; "
         "layer 4 uses position."),
        ((0.0, 0.5, 0.0, 0.0, 0.0), "Layers 1 and 3 to 5 became translation-equivariant; layer 2 uses position."),
        ((0.0, 0.0), "Both layers became translation-equivariant."),
        ((0.0, 0.0, 0.0), "All 3 layers became translation-equivariant."),
        ((0.02,), "Layer 1 is nearly translation-equivariant."),
        ((0.9, 1.0), "Both layers use position."),
        ((0.0, None), "Layer 1 became translation-equivariant; "
         "layer 2 has a path that is frozen or learned nothing: the evidence says nothing about it."),
        ((0.0, 0.02, 0.5, None, 0.6), "Of 5 layers, 1 keeps its symmetry, 1 nearly does, 2 break it, 1 cannot be judged."),
    ],
)  # fmt: skip
def test_the_headline_says_which_layers_became_symmetric(shares, expected):
    assert headline(network(*shares)) == expected


def test_the_row_of_a_layer_has_its_share():
    assert predicates(network(0.0, 0.0153, 0.0499, 0.61, 0.999996)) == [
        "became translation-equivariant",
        "is nearly translation-equivariant (1.5 % free)",
        "is nearly translation-equivariant (5 % free)",
        "uses position (61 % free)",
        "uses position (100 % free)",
    ]


def test_the_headline_without_a_choice():
    assert "no relaxed layer" in headline([])
    assert headline([path()]) == "No layer had a choice: all of them are translation-equivariant by construction."
    assert headline([path(), path("pool", "2")]) == "No layer had a choice: all of them are symmetric by construction."
    assert headline([path("fc", symmetric=False)]) == "No layer had a choice: none of them has a symmetric path."
    assert "not learned" in headline(network(0.0), learned=False)
    assert "became" not in headline(network(0.0), learned=False)
    assert headline([path()], learned=False) == headline([path()])
    assert predicates(network(0.4), learned=False) == ["has 40 % of its effective parameters free, held fixed"]
    rows = [path(), path("fc", "2", symmetric=False)]
    assert predicates(rows) == ["is translation-equivariant by construction", "has no symmetric path"]


def test_the_headline_of_evidence_that_has_failed_says_so_and_nothing_else():
    known = Known(-0.33, 600, 4, lr=0.1, log_likelihood=0.0, most=-math.log(24), effective_parameters=0.2)
    found = verdicts.verdict(network(0.0, 0.9), known)
    assert words.headline(found) == "The evidence must not be used: the Laplace approximation has failed."
    assert words.cautions(found) == [
        "The log evidence, -0.330, is above -3.2, the most that these labels allow. Do not rely on shares, precisions or predictive(); "
        "accuracy is not affected. Try a smaller learning rate (lr=0.033 for 0.1)."
    ]
    assert {words.predicate([layer]) for layer in found.layers} == {"is not judged: the evidence must not be used"}
    (bounded,) = words.cautions(verdicts.verdict(network(0.0), replace(known, log_evidence=0.5, most=0.0, lr=None)))
    assert bounded.startswith("The log evidence, 0.500, is above 0.000, the most")
    assert bounded.endswith("Try a smaller learning rate.")
    (saturated,) = words.cautions(verdicts.verdict(network(0.0), replace(known, log_evidence=-9.0)))
    assert saturated.startswith("The softmax is saturated (0.2 effective parameters cannot explain 100% of the labels). Do not")


def test_a_convolution_beside_a_group_convolution_is_a_choice():
    rows = [
        path(name, f"l{i}", s) for i, p in enumerate((0.0, 0.03, 0.4, 0.6)) for name, s in (("conv", p), ("gconv:c4", 1 - p))
    ]
    assert headline(rows) == (
        "Layer 1 became equivariant to translations and c4; layer 2 is nearly equivariant to translations and c4; "
        "layers 3 and 4 are equivariant to translations, not to c4."
    )
    assert predicates(rows)[1:3] == [
        "is nearly equivariant to translations and c4 (3 % break c4)",
        "is equivariant to translations, not to c4 (40 % break c4)",
    ]
    assert predicates(rows[-2:], learned=False) == ["has 60 % of its effective parameters in paths that break c4, held fixed"]
    alone = [path("gconv:c4", share=1.0)]
    assert headline(alone) == "No layer had a choice: all of them are equivariant to translations and c4 by construction."


def test_words_for_groups_within_groups_and_paths_that_are_no_convolutions():
    def rows(**shares):
        return [path(name.replace("_", ":"), share=share) for name, share in shares.items()]

    assert predicates(rows(conv=0.03, gconv_c4=0.5, gconv_d4=0.47)) == [
        "is nearly equivariant to translations and c4 (3 % break c4), not to d4 (53 % break d4)"
    ]
    assert headline(rows(conv=0.0, gconv_c4=0.0, gconv_d4=1.0)) == "Layer 1 became equivariant to translations and d4."
    assert "not to d4 or c4 (80 % break d4, 60 % break c4)" in predicates(rows(conv=0.6, gconv_c4=0.2, gconv_d4=0.2))[0]
    assert "break" not in headline(rows(pool=0.6, gconv_c4=0.4))
    assert predicates(rows(conv=0.6, gconv_c4=0.4), approximate={"1": ["borders", "interpolation"]}) == [
        "is equivariant to translations up to borders, not to c4 (60 % break c4)"
    ]


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        ((1.0, 0.0, 0.0, 0.0), "became equivariant to translations and d4"),
        ((0.6, 0.4, 0.0, 0.0), "became equivariant to translations and c4, not to d4 (40 % break d4)"),
        (
            (0.6, 0.37, 0.03, 0.0),
            "became equivariant to translations and c2, nearly to c4 (3 % break c4), not to d4 (40 % break d4)",
        ),
        (
            (0.6, 0.2, 0.17, 0.03),
            "is nearly equivariant to translations and c2 (3 % break c2), not to d4 or c4 (40 % break d4, 20 % break c4)",
        ),
        (
            (0.4, 0.2, 0.2, 0.2),
            "is equivariant to translations, not to d4 or c4 or c2 (60 % break d4, 40 % break c4, 20 % break c2)",
        ),
        ((0.7, 0.2, 0.0, 0.0, 0.1), "uses what breaks the symmetry (10 % free) and is not equivariant to d4 (30 % break d4)"),
        (
            (0.6, 0.1, 0.1, 0.1, 0.1),
            "uses position (10 % free) and is not equivariant to d4 or c4 or c2 (40 % break d4, 30 % break c4, 20 % break c2)",
        ),
    ],
    ids=str,
)
def test_words_for_every_step_of_a_chain(shares, said):
    assert predicates(chain(*shares)) == [said]
    assert headline(chain(*shares)) == f"Layer 1 {re.sub(' [(].*?[)]', '', said)}."


def test_layers_with_a_chain_are_said_in_one_breath_where_they_break_the_same_groups():
    rows = [row for i, p in enumerate((0.4, 0.5, 0.03)) for row in chain(1 - p, p, 0.0, 0.0, layer=f"l{i}")]
    assert headline(rows) == (
        "Layers 1 and 2 became equivariant to translations and c4, not to d4; layer 3 became equivariant to translations and c4, nearly "
        "to d4."
    )


def test_layers_that_differ_are_not_said_in_one_breath():
    free = [path("f-fc", "l0", 0.03, symmetric=False), path("gconv:c4", "l0", 0.97)]
    plain = [path("conv", "l1", 0.04), path("gconv:c4", "l1", 0.96)]
    assert headline([*free, *plain]) == "Both layers are nearly equivariant to translations and c4."
    assert [said.partition("(")[2] for said in predicates([*free, *plain])] == ["3 % free)", "4 % break c4)"]
    said = headline([*network(0.6), path("conv", "l1", 0.6), path("gconv:c4", "l1", 0.4)])
    assert said == "Layer 1 uses position; layer 2 is equivariant to translations, not to c4."

    turned = [path("f-fc", "l1", 0.6, symmetric=False), path("gconv:c4", "l1", 0.4)]
    assert headline([*network(0.6), *turned]) == "Layer 1 uses position; layer 2 uses what breaks the symmetry."
    assert headline(network(0.6, 0.7), approximate={"l0": ["borders"]}) == "Both layers use position."

    rows = [path(name, layer, share) for layer in ("l0", "l1") for name, share in (("conv", 0.6), ("gconv:c4", 0.4))]
    limits = {"l0": ["borders"]}
    assert headline(rows, approximate=limits) == "Both layers are equivariant to translations, not to c4."
    assert [" up to borders" in said for said in predicates(rows, approximate=limits)] == [True, False]


def test_the_headline_names_the_group_only_where_nothing_but_its_convolution_is_left():
    rows = [path("f-fc", share=0.0, symmetric=False), path("conv", share=0.005), path("gconv:c4", share=0.995)]
    assert headline(rows) == "Layer 1 became equivariant to translations and c4."
    rows = [path("f-fc", share=0.0, symmetric=False), path("conv", share=0.3), path("gconv:c4", share=0.7)]
    assert headline(rows) == "Layer 1 became translation-equivariant, not equivariant to c4."
    rows = [path("own", share=1.0), path("other", share=0.0, symmetric=False)]
    assert headline(rows) == "Layer 1 became symmetric."
    rows = [path("pool", share=0.4), path("fc", share=0.6, symmetric=False)]
    assert headline(rows) == "Layer 1 uses position."
    rows = [path("pool", share=1.0), path("fc", share=0.0, symmetric=False)]
    assert headline(rows) == "Layer 1 became translation-invariant."
    rows = [path("gconv:c4", share=0.4), path("fc", share=0.6, symmetric=False)]
    assert headline(rows) == "Layer 1 uses what breaks the symmetry."


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
    borders = dict.fromkeys(("zeros", "valid", "padded pointwise"), ("borders",))
    assert limits(model) == borders | {"strided": ("strides",)}
    assert predicates(network(0.0, 0.0, 0.5), approximate={"l1": ["borders"], "l2": ["borders"]}) == [
        "became translation-equivariant",
        "became translation-equivariant up to borders",
        "uses position (50 % free)",
    ]


def test_a_group_that_interpolates_is_not_called_exact():
    net = nets.build("f-fc+gconv:c8", (1, 8, 8), 3, 1, channels=(1, 1), strides=(1, 2), hidden=2)
    assert limits(net) == {"blocks.0": ("interpolation",), "blocks.1": ("interpolation",)}
    assert limits(nets.build("f-fc+gconv:c4", (1, 8, 8), 3, 1, channels=(1,), strides=(1,), hidden=2)) == {}
    rows = [path("f-fc", share=0.0, symmetric=False), path("gconv:c8", share=1.0)]
    approximate = {"1": ["interpolation"]}
    assert predicates(rows, approximate=approximate) == ["became equivariant to translations and c8 up to interpolation"]
    rows = [path("f-fc", share=0.0, symmetric=False), path("conv", share=0.4), path("gconv:c8", share=0.6)]
    assert predicates(rows, approximate=approximate) == [
        "became translation-equivariant, not equivariant to c8 (40 % break c8)"
    ]


def test_words_for_paths_that_are_constant_in_space():
    sparse = path("s-fc", share=0.6, symmetric=False, omega={"u_1": 1e-3}, learned_omega=True)
    assert predicates([sparse]) == ["became constant in space, by its lengthscales"]
    assert predicates([path("conv", share=0.4), sparse]) == [
        "became translation-equivariant: its free paths are constant in space, by their lengthscales"
    ], "a convolution is not constant in space"
    wide = path("s-fc", share=0.6, symmetric=False, omega={"u_1": 0.5}, learned_omega=True)
    assert predicates([path("conv", share=0.4), wide]) == ["uses position (60 % free)"]


def test_a_layer_without_an_effective_parameter_is_not_judged():
    said = "has too few effective parameters to judge (less than one)"
    assert headline(network(0.9, effective=0.4)) == f"Layer 1 {said}."
    assert headline(network(0.9, 0.9, effective=0.4)) == f"Both layers {said.replace('has', 'have')}."


def test_the_headline_of_a_network_that_averages():
    none = verdicts.verdict([], Known())
    assert words.headline(none, [{"text": "rotation ±30 degrees"}]) == "The network averages over rotation ±30 degrees."
    both = verdicts.verdict(network(0.0), Known())
    assert words.headline(both, [{"text": "rotation ±30 degrees"}]) == "Layer 1 became translation-equivariant."
    assert words.invariance([]) == ""


def test_what_all_layers_hold_that_breaks_a_symmetry():
    assert WHOLE == 0.05
    assert words.whole({}) == ""
    assert words.whole({"free": 0.02, "c4": 0.584}) == (
        "Of the effective parameters of all layers, 2 % are free, 58.4 % break c4. If the data have the symmetry, it is usually less than "
        "5 %."
    )
    assert "layers, less than 0.1 % are free." in words.whole({"free": 1e-8})


def test_the_rule_has_the_thresholds_that_decide():
    assert f"less than {100 * verdicts.STRICT:g}\u202f%" in words.RULE
    assert f"nearly symmetric below {100 * verdicts.NEARLY:g}\u202f%" in words.RULE


# ---- of what a report holds


def said_of(evidence, symmetry=None, **more):
    """A report's contents as far as words go: ten samples of three classes."""
    terms = dict.fromkeys(("log_likelihood", "log_prior", "complexity", "occam", "bound_of"))
    known = {"likelihood": "categorical", "samples": 10, "outputs": 3, "evidence": {"log_evidence": evidence, **terms}}
    return {"symmetry": Symmetry(tuple(network(0.0, 0.9) if symmetry is None else symmetry)).as_dicts(), **known, **more}


def shown(contents):
    return page.view(contents)["headline"]


def test_nothing_is_said_to_be_learned_at_the_evidence_of_guessing():
    chance = -10 * math.log(3)
    learned, guessed = page.view(said_of(chance + 0.1)), page.view(said_of(chance - 0.1))
    assert learned["headline"].startswith("Layer 1 became translation-equivariant; layer 2 uses position")
    assert learned["rule"] == words.RULE
    assert guessed["headline"] == "Nothing is established yet: the evidence is not better than guessing."
    assert guessed["cautions"] == [
        "The log evidence is -1.1086 nats per sample; guessing one of 3 classes has -1.0986. Train longer, or on more data."
    ]
    assert [layer["words"] for layer in guessed["layers"]] == ["is not judged: the evidence is not better than guessing"] * 2
    assert guessed["rule"] == ""
    assert shown(said_of(chance, schedule={"step": "none"})).startswith("Symmetry was not learned")
    for unknown in ({"likelihood": "gaussian"}, {"outputs": None}, {"evidence": None}, {"samples": None}):
        assert shown(said_of(chance - 0.1) | unknown) == learned["headline"]


def test_labels_of_one_class_are_said_in_the_headline():
    said = "Nothing can be learned: all 10 labels are of class 2."
    assert shown(said_of(-1.0, fingerprint=[20.0, 40.0])) == said
    assert shown(said_of(-1.0, fingerprint=[20.0, 40.0], outputs=None)) == said
    assert "Nothing" not in shown(said_of(-1.0, fingerprint=[20.0, 42.0]))
    assert "Nothing" not in shown(said_of(-1.0, fingerprint=[20.0, 40.0], likelihood="gaussian"))


def test_cautions_are_on_the_page_beside_the_headline():
    history = [{"epoch": n, "loss": 1.0, "log_evidence": -100.0 + 5 * n} for n in range(1, 13)]
    contents = said_of(-5.0, network(None, effective=0.0), history=history, schedule={"step": "mackay", "lr": 0.03})
    one, other = page.view(contents)["cautions"]
    assert one == str(cautions.Dead(("l0",), 0.03))
    assert other.startswith("The evidence was still rising")
    assert all(caution in page.html(contents) for caution in (one, other))
    assert page.view(contents | {"schedule": {"step": "none"}})["cautions"] == []
    assert page.view(contents | {"history": None})["cautions"] == [one]


def test_random_labels_are_not_a_symmetry():
    """Noise with labels of no meaning: the page, its headline and its layers claim nothing."""
    torch.manual_seed(0)
    data = torch.randn(60, 2, 4, 4), torch.randint(3, (60,))
    fit = autosym.fit(small(), data, epochs=40, lr=0.02)
    assert float(fit.evidence.log_evidence) / 60 < -1.0986
    text = page.html(findings.contents(fit))
    assert "Nothing is established yet: " in text
    assert "Train longer, or on more data." in text
    assert not re.search("became|use position|uses position|counts as symmetric", text)


def test_a_page_says_what_the_fit_decides(fitted):
    """By way of JSON: the same paths, the same verdict."""
    fit, _ = fitted
    contents = findings.contents(fit)
    found = findings.decided(contents)
    assert [path for layer in found.layers for path in layer.paths] == list(fit.symmetry())
    assert found.cautions == fit.symmetry().cautions


# ---- cautions


@pytest.mark.parametrize(
    ("caution", "expected"),
    [
        (cautions.OneClass(12, 2), "Nothing can be learned: all 12 labels are of class 2. Add samples of other classes."),
        (cautions.Dead(("l0",)), "Layer l0 has no effective parameters, so no shares. Try a smaller learning rate, and "
         "standardised inputs."),
        (cautions.Dead(("l0", "l1"), 3e6), "Layers l0, l1 have no effective parameters, so no shares. Try a smaller learning rate "
         "(lr=1e+06 for 3e+06), and standardised inputs."),
        (cautions.Guessing(-2.0, -math.log(3), 3), "Nothing is established yet: the evidence is not better than guessing. The log "
         "evidence is -2.0000 nats per sample; guessing one of 3 classes has -1.0986. Train longer, or on more data."),
        (cautions.Unused(("",)), "Layer (the model) has less than one effective parameter, too little to judge by. Use more data "
         "to judge."),
        (cautions.Unused(("l0", "l1")), "Layers l0, l1 have less than one effective parameter, too little to judge by. Use more data to "
         "judge."),
        (cautions.Little(0.05), "The evidence is only 5% better than guessing. A model that ignores some classes may then win. Train "
         "longer, or on more data, before you rely on a symmetry."),
        (cautions.OneStep(), "Precisions were learned in one step only. Train longer before you rely on the shares."),
        (cautions.Rising(12.34), "The evidence was still rising, by 12.3 nats over the last steps. Train longer before you rely on the "
         "shares."),
        (cautions.Moving((("rotation (degrees)", 26.0, 31.0), ("shift (pixels)", 1.0, 2.0))), "Ranges still moved in the last quarter of "
         "the steps: rotation (degrees) from 26 to 31, shift (pixels) from 1 to 2. Train longer, or use every=1 and a larger hyper_lr."),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_a_caution_ends_with_what_to_do(caution, expected):
    assert str(caution) == expected
    assert re.match("Add|Try|Train|Use", expected.split(". ")[-1])
    assert str(Symmetry((), cautions=(caution,))).endswith(f"\nCaution: {expected}")


def test_a_dead_network_is_not_told_to_train_longer():
    dead = cautions.Dead(("l0",), 0.3)
    said = str(cautions.Guessing(-2.0, -math.log(3), 3, dead))
    assert said.startswith("Nothing is established yet")
    assert said.endswith(f". {dead}")
    assert "train longer" not in said


# ---- numbers


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [([1], "layer 1"), ([1, 2], "layers 1 and 2"), ([1, 2, 3], "layers 1 to 3"), ([1, 3, 4, 5, 7], "layers 1, 3 to 5 and 7")],
)
def test_layers_are_listed_as_people_do(numbers, expected):
    assert words.named(numbers) == expected


def test_what_a_difference_in_nats_means():
    assert [words.strength(d) for d in (0.5, 1.0, 2.9, 3.0, 5.0, -7)] == [
        "not worth more than a mention", "positive", "positive", "strong", "very strong", "very strong",
    ]  # fmt: skip
    assert words.odds(math.log(20)) == "20 : 1"
    assert words.odds(1000.0) == "10⁴³⁴ : 1"
