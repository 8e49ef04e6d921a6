"""The page of a report, its charts, and the figure for notebooks."""

import json
import math
import re
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import autosym
from autosym.answer.equivariance import equivariance_error
from autosym.evidence.shares import Symmetry
from autosym.nn import nets
from autosym.report import charts, drawing, findings, page
from learned import network, path
from models import draw, images, mlp, small
from pages import Page

pytest.importorskip("jinja2")

ROOT = Path(__file__).parents[2]


# ---- the page


def test_the_page_holds_the_numbers(fitted, tmp_path):
    fit, data = fitted
    path = fit.report(tmp_path / "deep" / "report.html", data=data, title="my fit")
    assert path == tmp_path / "deep" / "report.html"
    assert [file.name for file in path.parent.iterdir()] == ["report.html"]
    shown = Page(path.read_text(encoding="utf-8"))
    said = findings.contents(fit, data, title="my fit")
    assert [float(v) for v in shown.values["share"]] == [p["share"] for p in said["symmetry"]]
    assert [float(v) for v in shown.values["precision"]] == [v for p in said["symmetry"] for v in p["precision"].values()]
    assert [float(v) for v in shown.values["log_evidence"]] == [said["evidence"]["log_evidence"]]
    assert sorted(map(float, shown.values["equivariance"])) == sorted(row["error"] for row in said["equivariance"])
    assert [float(v) for v in shown.values["calibration.error"]] == [said["calibration"]["error"]]
    assert sum(map(int, shown.values["bin.count"])) == 24
    assert "my fit" in shown.text
    assert " ".join(said["command"].split()) in shown.text
    for name, value in said["schedule"].items():
        assert f"{name} {'–' if value is None else value}" in shown.text


def test_the_page_needs_nothing_else(fitted):
    text = page.html(findings.contents(*fitted))
    shown = Page(text)
    assert not re.findall(r"""(?:src|href)=["'](?!#|data:)""", text), "only anchors and data"
    assert not re.search(r"https?://|url\(|@import|fetch\(|XMLHttp", text)
    assert len(text.encode()) < 500_000
    assert shown.of("html")[0]["lang"] == "en"
    assert {"header", "nav", "main", "footer"} <= {tag for tag, _ in shown.tags}
    levels = [int(tag[1]) for tag, _ in shown.tags if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(later - earlier <= 1 for earlier, later in pairwise(levels)), "headings in order"
    ids = [attributes["id"] for _, attributes in shown.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {a["href"][1:] for a in shown.of("a")} <= set(ids)
    charts_shown = [svg for svg in shown.of("svg") if svg.get("class") == "chart"]
    assert len(charts_shown) > 6
    assert all(svg["role"] == "img" and svg["aria-label"] and svg["tabindex"] == "0" for svg in charts_shown)
    assert all("alt" in img for img in shown.of("img"))


def test_names_are_escaped(fitted):
    evil = "<script>alert(1)</script>\"'&"
    said = findings.contents(*fitted, title=evil, compare={f"{evil}2": -3.0})
    for row in said["symmetry"]:
        row["layer"] = row["path"] = evil
    for row in said["equivariance"]:
        row["layer"] = row["kind"] = row["group"] = evil
    for row in said["filters"]:
        row["layer"] = row["path"] = row["part"] = evil
    for line in said["history"]:
        line["precision"] = {f"{evil}.{evil}.{evil}": 1.0}
        line["effective_parameters"] = {f"{evil}.{evil}": 1.0}
        line["free_share"] = {evil: 0.5}
    said |= {"config": {evil: evil}, "provenance": {evil: evil}, "schedule": {evil: evil}, "command": evil}
    text = page.html(said)
    assert "<script>alert" not in text
    shown = Page(text)
    assert len(shown.of("script")) == 1
    assert evil in shown.text


def test_what_is_not_known_is_a_dash():
    nowhere = replace(path("fc", share=None, symmetric=False), precision={"linear": math.nan})
    said = {
        "symmetry": Symmetry((path(share=None), nowhere)).as_dicts(),
        "evidence": {"log_evidence": math.nan, "log_likelihood": math.inf, "occam": None, "bound_of": None},
        "samples": 5,
        "history": [
            {"epoch": 1, "loss": math.nan, "log_evidence": math.nan, "log_likelihood": -1.0, "occam": -2.0, "precision": {"a": None}},
            {"epoch": 2, "loss": 1.0, "log_evidence": -3.0, "log_likelihood": -1.0, "occam": -2.0, "precision": {"a": 1.0}},
        ],
        "equivariance": [{"layer": "", "kind": "Net", "group": "c4", "compared": "map", "error": math.nan}],
        "calibration": {"samples": 0, "accuracy": None, "nll": math.inf, "error": math.nan, "bins": []},
        "compare": [{"name": "a", "log_evidence": math.nan}, {"name": "b", "log_evidence": -1.0}],
    }  # fmt: skip
    text = Page(page.html(said)).text
    assert not re.search(r"\b(nan|inf|None|Undefined)\b", text), text
    assert "the evidence says nothing" in text
    assert "conv –" in text


def test_the_headline_of_a_fit_that_gained_nothing_says_so():
    said = {"symmetry": Symmetry((path(),)).as_dicts(), "epoch": 0}
    shown = page.view(said)
    assert shown["headline"] == "Nothing was gained: the network is as it was given."
    assert shown["cautions"][0].startswith("Training found no more evidence than the given network has")
    assert page.view(said | {"epoch": 3})["headline"] != shown["headline"]


def test_rows_of_equivariance_say_what_is_compared_and_what_is_rounding():
    def row(layer, compared, error, given):
        return {"layer": layer, "kind": "Kind", "group": "shifts", "compared": compared, "error": error, "given": given}

    errors = [
        row("", "invariant", 0.25, 0.5),
        row("a", "map", 3e-7, 0.0),
        row("b", "map", 3e-7, 0.1),
        row("c", "map", math.nan, 0.1),
        row("d", "map", math.nan, None),
    ]
    found = page.equivariance(findings.finite(errors))
    assert [(one["layer"], one["compared"], one["cells"][0]["rounding"]) for one in found["rows"]] == [
        ("", "should stay the same", False),
        ("a", "should move along", True),
        ("b", "should move along", False),
        ("c", "should move along", False),
    ], "a row without an error cannot be read"
    text = Page(page.html({"symmetry": Symmetry((path(),)).as_dicts(), "equivariance": errors})).text
    assert "a Kind, should move along no measurable error b Kind" in text
    assert "Each row compares what a layer returns for an image with what it returns for the moved image" in text
    assert "An error that fell does not say that a layer became stricter" in text
    assert "An error that fell" not in Page(page.html({"symmetry": [], "equivariance": [errors[0] | {"given": None}]})).text


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, "–"), (0.0, "0"), (1.0, "1.00"), (-2.0623, "−2.06"), (12345.6, "12\u202f346"), (1e-8, "1.00 × 10⁻⁸"),
     (3.14e9, "3.14 × 10⁹"), (-1e12, "−1.00 × 10¹²"), (7, "7"), (1730805, "1\u202f730\u202f805"), (True, "True"), ("a", "a")],
)  # fmt: skip
def test_numbers_for_people(value, expected):
    assert page.number(value) == expected


def test_shares_for_people():
    assert [page.percent(v) for v in (None, 0.0, 1e-5, 0.0005, 0.9957, 1.0)] == [
        "–", "0.0\u202f%", "< 0.1\u202f%", "0.1\u202f%", "99.6\u202f%", "100.0\u202f%",
    ]  # fmt: skip


def test_the_page_of_a_long_run_of_a_deep_network_stays_small():
    """Eight layers with every kind of picture, a thousand epochs."""
    net = nets.build("f-fc+conv", (3, 32, 32), 10)
    symmetry = Symmetry(tuple(network(*(0.1,) * 8))).as_dicts()
    names = [f"l{i}.{p}" for i in range(8) for p in ("conv.linear", "conv.bias", "f-fc.theta_1", "f-fc.theta_2", "f-fc.b_1")]
    numbers = {name: 0.123456789012345 * 10.0**i for i, name in enumerate(names)}
    lines = [
        {"epoch": e, "loss": 0.123456789, "log_evidence": -e, "log_likelihood": -e / 2, "occam": -e / 2, "seconds": 1.0,
         "precision": numbers, "effective_parameters": numbers, "free_share": {f"l{i}": 0.1 for i in range(8)}}
        for e in range(1, 1001)
    ]  # fmt: skip
    said = findings.finite({"symmetry": symmetry, "history": findings.thinned(lines), "filters": findings.filters(net)})
    for one in said["filters"]:
        one["layer"] = one["layer"].replace("blocks.", "l")
    assert len(json.dumps(said["filters"])) < 300_000
    assert len(page.html(said).encode()) < 2_000_000


def test_the_page_of_a_network_of_sixty_layers_stays_small():
    symmetry = Symmetry(tuple(network(*(0.1,) * 60))).as_dicts()
    names = [f"l{i}.{p}" for i in range(60) for p in ("conv.linear", "conv.bias", "f-fc.theta_1", "f-fc.theta_2", "f-fc.b_1")]
    lines = [
        {"epoch": e, "loss": 0.123456789, "log_evidence": -e / 7, "log_likelihood": -e / 2, "occam": -e / 2, "seconds": 1.0,
         "precision": {name: (e + i) * 1.2345678 for i, name in enumerate(names)},
         "effective_parameters": {name: (e + i) * 0.123456789 for i, name in enumerate(names)},
         "free_share": {f"l{i}": 0.123456789 for i in range(60)}}
        for e in range(1, 1001)
    ]  # fmt: skip
    draw = torch.Generator().manual_seed(0)
    pictures = torch.randint(-127, 128, (8, 16, 16), generator=draw).tolist()
    filters = [
        {"layer": f"l{i}", "path": path, "part": part, "of": 99, "scale": 1.0, "pictures": pictures}
        for i in range(60)
        for path, part in (("conv", "linear"), ("f-fc", "theta_2"), ("f-fc", "theta_1"))
    ]
    text = page.html({"symmetry": symmetry, "history": findings.thinned(lines), "filters": filters})
    assert len(text.encode()) < 2_000_000
    assert len(Page(text).of("img")) == 60 * 3 * 2
    few = page.bounded(findings.thinned(lines))
    assert (few[0]["epoch"], few[-1]["epoch"]) == (1, 1000)


def test_data_that_can_be_read_only_once_are_refused(fitted, tmp_path):
    fit, data = fitted
    with pytest.raises(ValueError, match="an iterator, which can be read only once"):
        fit.report(tmp_path / "r.html", iter([data]))
    with pytest.raises(ValueError, match="no batch held a sample to measure on"):
        equivariance_error(fit.model, "translations", [])
    assert list(tmp_path.iterdir()) == []


def test_a_folder_gets_a_report_and_what_fails_leaves_nothing(fitted, tmp_path, monkeypatch):
    assert fitted[0].report(tmp_path) == tmp_path / "report.html"
    (tmp_path / "report.html").unlink()

    def fail(*_):
        raise OSError("no space")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        fitted[0].report(tmp_path / "r.html")
    assert list(tmp_path.iterdir()) == []


def test_without_jinja2_it_says_what_to_install(fitted, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match=re.escape("pip install 'autosym[report]'")):
        fitted[0].report(tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []


def test_colours_of_the_page_are_those_of_the_pictures():
    css = (ROOT / "src/autosym/report/templates/report.css").read_text()
    for name, colour in {**drawing.COLOURS, "symmetric": drawing.OTHER_SYMMETRIC, "free": drawing.OTHER_FREE}.items():
        assert f"--{name}: {colour.lower()}" in css
        assert f".c-{name} " in css


# ---- charts


def test_ticks_are_round_and_cover():
    assert charts.linear_ticks(0.13, 0.92) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert charts.linear_ticks(-3285.6, -3100) == [-3300, -3250, -3200, -3150, -3100]
    assert charts.linear_ticks(2.0, 2.0) == [2.0]
    assert charts.log_ticks(0.02, 900) == pytest.approx([0.01, 0.1, 1, 10, 100, 1000])
    assert charts.log_ticks(1e-8, 1e12)[0] <= 1e-8
    assert len(charts.log_ticks(1e-8, 1e12)) <= 7
    assert charts.log_ticks(1e-8, 1e12)[-1] >= 1e12
    assert [charts.tick(-2.5), charts.tick(1e-3, log=True)] == ["−2.5", "10⁻³"]


def test_lines_lie_within_the_chart_and_break_where_nothing_is_known():
    series = [{"name": "a", "values": [1.0, None, 100.0, math.nan, 10.0]}, {"name": "b", "values": [None] * 5}]
    chart = charts.lines("t", [1, 2, 3, 4, 5], series, log=True)
    assert [len(piece) for piece in chart["series"][0]["pieces"]] == [1, 1, 1]
    assert chart["series"][1]["pieces"] == []
    heights = [piece[0][1] for piece in chart["series"][0]["pieces"]]
    assert heights[0] == chart["bottom"]
    assert heights[1] == chart["top"]
    assert heights[2] == pytest.approx((chart["top"] + chart["bottom"]) / 2)
    assert charts.lines("t", [1, 2], [{"name": "a", "values": [None, -1.0]}], log=True) is None


def test_a_reliability_diagram_has_bars_of_accuracy_and_lines_of_confidence():
    empty = {"from": 0.0, "to": 0.5, "count": 0, "accuracy": None, "confidence": None}
    drawn = charts.diagonal([empty, {"from": 0.5, "to": 1.0, "count": 10, "accuracy": 0.2, "confidence": 0.75}], size=300)
    (bar,) = drawn["bars"]
    across, up = drawn["right"] - drawn["left"], drawn["bottom"] - drawn["top"]
    assert (bar["x"], bar["width"]) == pytest.approx((drawn["left"] + across / 2, across / 2), abs=2)
    assert (bar["y"], bar["height"]) == pytest.approx((drawn["bottom"] - 0.2 * up, 0.2 * up), abs=0.1)
    assert bar["gap"] == pytest.approx(drawn["bottom"] - 0.75 * up, abs=0.1)
    assert [tick["label"] for tick in drawn["ticks"]] == ["0", "25", "50", "75", "100"]
    assert all(
        tick["x"] - drawn["left"] == pytest.approx((drawn["bottom"] - tick["y"]) * across / up, abs=0.2)
        for tick in drawn["ticks"]
    )


def test_curves_have_the_signs_of_their_titles():
    """Evidence is fit less complexity, per sample; what is larger is drawn higher."""
    steps = [
        {"epoch": e, "loss": 3.0 - e, "log_evidence": 10.0 * e - 90, "log_likelihood": -50.0 + 2 * e, "occam": 8.0 * e - 40}
        for e in (1, 2, 3)
    ]
    curves = {chart["title"]: chart for chart in page.curves(steps, [], 10, {})}
    values = {title: chart["series"][0]["values"] for title, chart in curves.items()}
    assert values["Evidence"] == pytest.approx([-8, -7, -6])
    assert values["Fit"] == pytest.approx([-4.8, -4.6, -4.4])
    assert values["Complexity"] == pytest.approx([3.2, 2.4, 1.6])
    assert values["Training loss"] == pytest.approx([2, 1, 0])
    for title, rises in (("Evidence", True), ("Fit", True), ("Complexity", False), ("Training loss", False)):
        heights = [-y for (piece,) in [curves[title]["series"][0]["pieces"]] for _, y in piece]  # a drawing counts downwards
        assert heights == sorted(heights, reverse=not rises)
        assert heights[0] != heights[-1]


def test_one_line_of_history_can_be_drawn():
    chart = charts.lines("t", [4], [{"name": "a", "values": [2.0]}])
    ((point,),) = chart["series"][0]["pieces"]
    assert all(math.isfinite(value) for value in point)


# ---- for notebooks


def test_plot_is_a_figure_with_the_shares(fitted):
    pytest.importorskip("matplotlib")
    figure = fitted[0].plot()
    shares, evidence, precision = figure.axes
    widths = [patch.get_width() for patch in shares.patches]
    assert widths == pytest.approx(
        [100 * p["share"] for p in sorted(fitted[0].symmetry().as_dicts(), key=lambda p: p["layer"])]
    )
    for layer in {round(patch.get_y(), 3) for patch in shares.patches}:
        own = [patch for patch in shares.patches if round(patch.get_y(), 3) == layer]
        ends = [patch.get_x() + patch.get_width() for patch in own]
        assert [patch.get_x() for patch in own] == pytest.approx([0.0, *ends[:-1]]), "beside each other"
        assert ends[-1] == pytest.approx(100)
    steps = [line["log_evidence"] for line in fitted[0].history if "log_evidence" in line]
    assert evidence.lines[0].get_ydata().tolist() == steps
    assert precision.get_xscale() == "log"


def test_plot_of_a_map_fit_shows_the_loss():
    pytest.importorskip("matplotlib")
    fit = autosym.fit(mlp(5, 4, 3), draw("categorical", 12), epochs=2, step="none")
    figure = fit.plot()
    assert figure.axes[1].lines[0].get_ydata().tolist() == [line["loss"] for line in fit.history]


def test_the_page_of_a_map_fit_judges_nothing():
    fit = autosym.fit(small(), images(), epochs=2, step="none")
    text = Page(page.html(findings.contents(fit))).text
    assert "Symmetry was not learned" in text
    assert "Precisions were held fixed in this run" in text
    assert not re.search("became|counts as symmetric|uses position", text)


def test_the_epoch_whose_network_was_kept_is_named():
    assert page._earlier({"epoch": 98, "history": [{"epoch": 1}, {"epoch": 188}]}) == 98
    assert page._earlier({"epoch": 188, "history": [{"epoch": 188}]}) is None
    assert page._earlier({"history": [{"epoch": 188}]}) is None  # of an older run: not known
    assert page._earlier({"epoch": 98}) is None
