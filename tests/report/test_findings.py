"""The report: what it says (findings) of a fit, its filters and alternatives."""

import base64
import copy
import json
import math
import re
import zlib

import pytest
import torch
from torch import nn

import autosym
from autosym.answer.equivariance import equivariance_error
from autosym.answer.margins import chances
from autosym.evidence.predictive import calibration_error, reliability
from autosym.linear.conv import Conv
from autosym.linear.dense import Bias, Dense
from autosym.nn import layers, nets
from autosym.report import findings, page
from models import certain, images, mlp, regression, small
from pages import Page

pytest.importorskip("jinja2")

# ---- what it says


def test_contents_are_strict_json_and_equal_the_fit(fitted):
    fit, data = fitted
    said = findings.contents(fit, data)
    assert json.loads(json.dumps(said, allow_nan=False)) == said
    assert said["symmetry"] == fit.symmetry().as_dicts()
    assert said["evidence"]["log_evidence"] == float(fit.evidence.log_evidence)
    assert said["evidence"]["log_evidence"] == pytest.approx(said["evidence"]["log_likelihood"] + said["evidence"]["occam"])
    assert said["effective_parameters"] == pytest.approx(float(fit.laplace.effective_parameters(fit.prior).detach().sum()))
    assert said["samples"] == 24
    assert said["history"] == fit.history
    assert said["command"].startswith(
        "autosym.fit(model, data, 'categorical', epochs=6, lr=0.1, burn_in=0, every=1, seed=3)  #"
    )
    assert said["provenance"]["autosym"] == autosym.__version__
    direct = autosym.equivariance_error(fit.model, findings.GROUPS_SHOWN, data)
    assert [row["error"] for row in said["equivariance"]] == [row.error for row in direct]
    with torch.no_grad():
        logits = fit.model(data[0])
    assert said["calibration"]["error"] == pytest.approx(calibration_error(logits.softmax(1), data[1]))
    assert said["calibration"]["accuracy"] == pytest.approx(float((logits.argmax(1) == data[1]).double().mean()))


def test_the_network_as_it_was_given_is_measured_beside_the_fitted_one(trained):
    """A CNN that was trained before is as equivariant as it was; a network from scratch was nothing worth knowing."""
    from trained_before import pictures

    x, y = pictures()
    given = copy.deepcopy(trained)
    fit = autosym.fit(autosym.relax(copy.deepcopy(trained), x[:8]), (x, y), epochs=30)
    said = findings.contents(fit, (x, y))
    before = equivariance_error(given, findings.GROUPS_SHOWN, x).output()
    rows = {row["group"]: row for row in said["equivariance"] if not row["layer"]}
    assert {group: row["given"] for group, row in rows.items()} == pytest.approx(before, rel=1e-4)
    assert rows["c4"]["given"] != rows["c4"]["error"]
    shown = Page(page.html(said))
    assert [float(v) for v in shown.values["equivariance.given"]][: len(before)] == [row["given"] for row in rows.values()]
    assert "“Was” is the error of the same layer with the weights that were given." in shown.text
    fit.check_weights()
    assert autosym.fit(small(), images(), epochs=1, burn_in=0, every=1).given == {}


def test_it_is_said_what_was_measured_on(fitted):
    fit, (x, y) = fitted
    order = torch.randperm(len(x))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 5, shuffle=True)
    for data, options, known, words in (
        ((x, y), {}, "training", "training accuracy"),
        ((x[order], y[order]), {}, "training", "training accuracy"),
        (loader, {}, "training", "training accuracy"),
        ((x[:9], y[:9]), {}, "given", "accuracy on the data given"),
        ((x[:9], y[:9]), {"measured_on": "held out"}, "held out", "held-out accuracy"),
    ):
        said = findings.contents(fit, data, **options)
        assert said["measured_on"] == known
        text = Page(page.html(said)).text
        assert words in text
        assert words.replace("accuracy", "calibration error") in text
        assert f"{said['calibration']['samples']} {words.partition('accuracy')[0]}samples," in text
    assert "measured_on" not in findings.contents(fit)


def test_a_fit_by_kernel_evidence_knows_its_data():
    x, y = torch.randn(12, 5), torch.arange(12) % 3
    fit = autosym.fit(mlp(5, 4, 3).float(), (x, y), epochs=1, kernel=6)
    assert findings.contents(fit, (x, y))["measured_on"] == "training"
    assert findings.contents(fit, (x, y.flip(0)))["measured_on"] == "given"


def test_contents_without_data_measure_nothing(fitted):
    said = findings.contents(fitted[0])
    assert "equivariance" not in said
    assert "calibration" not in said
    text = Page(page.html(said)).text
    assert text.count("Not measured") == 2


def test_contents_of_a_model_without_images_or_classes():
    fit = autosym.fit(mlp(5, 4, 2), regression(), "gaussian", epochs=2, burn_in=0, every=1)
    said = findings.contents(fit, regression())
    assert said["equivariance"] is None
    assert said["calibration"] is None
    assert said["sigma_noise"] == pytest.approx(math.exp(fit.likelihood.log_variance.item() / 2))
    text = Page(page.html(said)).text
    assert "No layer had a choice: the model has no relaxed layer." in text
    assert "noise (standard deviation)" in text


def test_groups_that_do_not_act_on_the_images_are_left_out_and_unknown_ones_refused(fitted):
    net = nets.build("conv", (1, 4, 8), 3, 2, channels=(1,), strides=(1,), hidden=2)
    data = torch.randn(12, 1, 4, 8), torch.arange(12) % 3
    fit = autosym.fit(net, data, epochs=1)
    said = findings.contents(fit, data, groups=("translations", "c4"))
    assert {row["group"] for row in said["equivariance"]} == {
        row.group for row in equivariance_error(net, "translations", data)
    }
    with pytest.raises(ValueError, match="unknown group 'so3'"):
        findings.contents(fitted[0], fitted[1], groups=("so3",))


def test_reliability_bins_give_the_calibration_error():
    probabilities = torch.randn(500, 4, dtype=torch.float64).mul(2).softmax(-1)
    labels = torch.randint(4, (500,))
    bins = reliability(probabilities, labels)
    assert sum(one["count"] for one in bins) == 500
    gaps = [one["count"] * abs(one["accuracy"] - one["confidence"]) for one in bins if one["count"]]
    assert sum(gaps) / 500 == pytest.approx(calibration_error(probabilities, labels))
    assert all(one["from"] <= one["confidence"] <= one["to"] for one in bins if one["count"])
    assert [one for one in bins if not one["count"]], "a bin without samples has no mean"
    assert all(one["accuracy"] is None for one in bins if not one["count"])


def test_a_long_history_is_thinned():
    lines = [{"epoch": e, "loss": 1.0, **({"log_evidence": -1.0} if e % 3 == 0 else {})} for e in range(1, 2001)]
    kept = findings.thinned(lines)
    assert len(kept) == 2 * findings.LINES
    assert [line["epoch"] for line in kept] == sorted({line["epoch"] for line in kept})
    assert (kept[0]["epoch"], kept[-1]["epoch"]) == (1, 2000)
    steps = [line["epoch"] for line in kept if "log_evidence" in line]
    assert (steps[0], steps[-1]) == (3, 1998)
    assert findings.thinned(lines[:50]) == lines[:50]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_none(value):
    assert findings.finite({"a": [value, 1.0, "nan"], 1: (True, {"b": value})}) == {
        "a": [None, 1.0, "nan"],
        "1": [True, {"b": None}],
    }


# ---- filters


def test_filters_are_the_strongest_as_levels_of_the_largest_weight(fitted):
    model = fitted[0].model
    found = findings.filters(model)
    assert [(one["layer"], one["path"], one["part"]) for one in found if one["layer"] == "blocks.1"] == [
        ("blocks.1", "conv", "linear"),
        ("blocks.1", "f-fc", "theta_2"),
        ("blocks.1", "f-fc", "theta_1"),
    ]
    conv = next(one for one in found if one["layer"] == "blocks.1" and one["path"] == "conv")
    weight = model.blocks[1]["conv"].linear.filters().detach().flatten(0, 1)
    strongest = weight[weight.flatten(1).norm(dim=1).argmax()]
    assert conv["of"] == len(weight)
    assert torch.tensor(conv["pictures"][0]) / 127 * conv["scale"] == pytest.approx(strongest, abs=conv["scale"] / 250)
    for one in found:
        assert torch.tensor(one["pictures"]).abs().max() == 127


def test_a_page_says_what_breaks_each_symmetry_of_the_whole_network():
    torch.manual_seed(0)
    x, y = torch.randn(200, 1, 4, 4), torch.arange(200) % 2
    x[y == 1] += 2
    fit = autosym.fit(
        nets.build("f-fc+conv+gconv:c4", (1, 4, 4), 2, 1, channels=(1,), strides=(1,), hidden=2), (x, y), epochs=30
    )
    contents = findings.contents(fit)
    share = fit.symmetry().network_share("c4")
    assert contents["broken"] == {"free": fit.symmetry().network_share(), "c4": share}
    assert f"{100 * share:.3g} % break c4" in Page(page.html(contents)).text


@pytest.mark.parametrize("name", ["fc", "conv", "f-fc", "where", "s-fc+s-conv", "f-fc+conv+gconv:c4"])
def test_every_path_with_positions_has_pictures(name):
    net = nets.build(name, (1, 8, 8), 3, 2, channels=(1, 2), strides=(1, 2), hidden=2)
    found = findings.filters(net)
    assert {one["path"] for one in found} == set(name.split("+"))
    for one in found:
        assert 1 <= len(one["pictures"]) <= findings.PICTURES
        assert all(1 <= len(picture) <= findings.SIDE for picture in one["pictures"])


def test_pictures_of_a_path_are_its_weights():
    dense = Dense((2, 3, 5), (4,))
    assert torch.equal(dense.pictures().double(), dense.weight.detach().double().view(8, 3, 5))
    factored = layers.Factored((2, 3, 5), (4, 2, 6))
    assert torch.equal(factored.theta_1.pictures()[1].double(), factored.theta_1.weight.detach().double()[0, :, 1].view(2, 6))
    sparse = layers.SparseFactored((2, 3, 5), (4, 2, 6), 7, 5)
    through = sparse.u_1.weight[1, :, 0].double() @ sparse.u_1.basis().double()
    assert sparse.u_1.pictures()[2].flatten() == pytest.approx(through.detach())
    assert Bias((3,)).pictures() is None
    assert Dense((5,), (3,)).pictures() is None
    wide = findings.strongest(torch.randn(20, 40, 33).double())
    assert wide.shape == (findings.PICTURES, findings.SIDE, findings.SIDE)


def test_a_path_of_zeros_is_blank():
    layer = layers.Relaxed({"conv": Conv(1, 2)}, {"fc": Dense((1, 4, 4), (2, 4, 4))})
    nn.init.zeros_(layer["fc"].weight)
    conv, fc = findings.filters(nn.Sequential(layer))
    assert not torch.tensor(fc["pictures"]).any()
    assert fc["scale"] == 0
    assert torch.tensor(conv["pictures"]).any()


def test_pictures_of_a_path_that_is_gone_are_faded(fitted):
    said = findings.contents(fitted[0])
    for row in said["symmetry"]:
        row["share"] = 0.005 if row["path"] == "f-fc" else 0.995
    faded = [(part["path"]["path"], part["faded"]) for one in page.view(said)["filters"] for part in one["parts"]]
    assert set(faded) == {("f-fc", True), ("conv", False)}


def test_a_picture_is_a_png_of_its_levels():
    data = base64.b64decode(page.png([[-127, 0, 127], [10, -200, 5]]).removeprefix("data:image/png;base64,"))
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    body = data[data.index(b"IDAT") + 4 : data.index(b"IEND") - 8]
    assert zlib.decompress(body) == bytes([0, 0, 30, 60, 0, 32, 0, 31])
    alpha = data[data.index(b"tRNS") + 4 :]
    assert (alpha[0], alpha[30], alpha[60]) == (255, 0, 255)
    palette = data[data.index(b"PLTE") + 4 :]
    assert (tuple(palette[:3]), tuple(palette[180:183])) == (page.NEGATIVE, page.POSITIVE)


# ---- alternatives


def test_alternatives_are_compared_with_this_fit(fitted):
    fit, data = fitted
    own = float(fit.evidence.log_evidence)
    other = autosym.fit(small("conv"), data, epochs=1)
    rows = findings.contents(fit, compare={"conv": other, "better": own + math.log(9)}, title="this")["compare"]
    assert rows[0]["name"] == "better"
    assert {row["name"] for row in rows} == {"this", "conv", "better"}
    assert rows[0]["warnings"] == [findings.UNCHECKED]
    expected = chances({row["name"]: row["log_evidence"] for row in rows}, {row["name"]: row.get("error", 0) for row in rows})
    assert {row["name"]: row["probability"] for row in rows} == pytest.approx(expected), "errors are in the odds"
    assert all(row["error"] > 0 for row in rows[1:])
    assert next(row for row in rows if row["name"] == "conv")["log_evidence"] == float(other.evidence.log_evidence)


def test_a_comparison_is_shown_with_its_warnings(fitted):
    fit, data = fitted
    other = autosym.fit(small("conv"), data, epochs=1)
    compared = autosym.compare({"mine": fit, "conv": other}, data)
    said = findings.contents(fit, compare=compared)
    assert said["compare"] == findings.finite(compared.rows)
    text = Page(page.html(said)).text
    assert compared.warnings
    assert all(warning in text for warning in compared.warnings)
    third = autosym.fit(small("fc"), data, epochs=1)
    assert {row["name"] for row in findings.contents(third, compare=compared, title="third")["compare"]} == {
        "mine",
        "conv",
        "third",
    }
    with pytest.raises(ValueError, match="both called 'conv'"):
        findings.contents(third, compare=compared, title="conv")
    with pytest.raises(TypeError, match="compare takes what autosym"):
        findings.contents(fit, compare=[("conv", -3.0)])


def test_a_fit_whose_evidence_has_failed_has_that_as_its_headline_and_is_the_best_of_no_comparison():
    (fit, _), (other, _) = certain(), certain(0.1)
    better = other.evidence.log_evidence + 1
    said = findings.contents(fit, compare={"slow": other, "number": float(better), "record": fit.evidence}, title="this")
    assert json.loads(json.dumps(said, allow_nan=False)) == said
    assert said["evidence"]["most"] == fit.evidence.most
    rows = {row["name"]: row for row in said["compare"]}
    assert list(rows) == ["number", "slow", "this", "record"]
    assert [row["failed"] for row in rows.values()] == [False, False, True, True]
    assert [row["probability"] for row in rows.values()] == pytest.approx([0.73, 0.27, None, None], abs=0.01)
    for name in ("this", "record"):
        assert rows[name]["warnings"][0].startswith("its evidence must not be used, so it is not ranked: the log evidence, -")
    whole = page.view(said)
    (caution,) = fit.symmetry().cautions
    assert [whole["headline"], *whole["cautions"]] == [caution.headline, caution.details]
    assert [row["behind"] for row in whole["compare"]] == [0.0, pytest.approx(1.0), None, None]
    assert [row["strength"] for row in whole["compare"]] == [
        None,
        "not worth more than a mention",
        "it has failed",
        "it has failed",
    ]
    text = page.html(said)
    assert text.count("its evidence must not be used, so it is not ranked") == 2
    assert Page(text).text.count("The evidence must not be used: the Laplace approximation has failed.") == 1
    alone = page.view(findings.contents(fit, compare={"record": fit.evidence}))["compare"]
    assert [row["behind"] for row in alone] == [None, None], "none is the best"
    older = said | {"evidence": {key: value for key, value in said["evidence"].items() if key != "most"}}
    assert "saturated" in page.view(older)["cautions"][0], "without the bound, by effective parameters"


def test_evidence_of_other_data_is_refused(fitted):
    fit, (x, y) = fitted
    other = autosym.fit(small("conv"), (x[:9], y[:9]), epochs=1)
    with pytest.raises(ValueError, match="24 samples with 3 outputs, conv to 9"):
        findings.contents(fit, compare={"conv": other})
    with pytest.raises(ValueError, match="conv has the evidence of 9 samples, this fit of 24"):
        findings.contents(fit, compare={"conv": other.evidence})
    with pytest.raises(TypeError, match="but a is a str"):
        findings.contents(fit, compare={"a": "b"})
    gaussian = autosym.fit(small("conv"), (x, torch.randn(24, 3)), "gaussian", epochs=1)
    with pytest.raises(ValueError, match="a density and a probability"):
        findings.contents(fit, compare={"gauss": gaussian})


def test_the_page_says_how_far_behind_an_alternative_is(fitted):
    own = float(fitted[0].evidence.log_evidence)
    text = Page(page.html(findings.contents(fitted[0], compare={"conv": own - 4.0}, title="this"))).text
    assert re.search(r"conv .* 4\.00 5\d\.\d : 1 1\.9 % strong", text.replace("\u202f", " ")), "54.6 : 1 without errors"
