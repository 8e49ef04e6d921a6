"""The report in a real browser: the distribution's Chromium, driven by Playwright. Screenshots go to pytest's temporary folder."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

import autosym
from autosym.answer.answers import Answer, Candidate, LayerAnswer, Verdict
from autosym.answer.margins import Margin
from autosym.report import answered, findings, writing
from models import images, small

pytest.importorskip("jinja2")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium")

SIZES = {"narrow": (320, 640), "phone": (360, 740), "wide": (1280, 900), "projector": (1920, 1080)}
AXE = Path(__file__).parents[2] / ".venv/axe/node_modules/axe-core/axe.min.js"  # .ci/run puts it there
PAGES = ("report", "beside", "answer", "conserved")
EVIL = "<script>document.title = 'taken'</script><b>a & \"b\"</b>"


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The folder of a report with everything in it, and its contents as JSON beside it."""
    torch.manual_seed(0)
    data = images()
    fit = autosym.fit(small(), data, epochs=8, burn_in=1, every=1)
    own = float(fit.evidence.log_evidence)
    folder = tmp_path_factory.mktemp("report")
    said = findings.contents(fit, data, compare={"conv alone": own - 2.5, f"{EVIL}2": own - 700.0}, title=EVIL)
    said["symmetry"][0]["layer"] = said["symmetry"][1]["layer"] = EVIL
    (folder / "contents.json").write_text(json.dumps(said))
    writing.write_page(said, folder / "report.html")
    other = autosym.fit(small(), data, epochs=4, burn_in=1, every=1)
    fit.report(folder / "beside.html", data, beside={EVIL: other})
    margins = {"breaking": Margin(2.4, 6.0, 3), "tie": Margin(803.0, 60.0, 3)}
    layers = (LayerAnswer("blocks.0", 333.0, True),)
    found = (Verdict("translations", "yes", **margins), Verdict("c4", "undecided", **margins, why=EVIL, layers=layers))
    candidates = (Candidate("conv", 2.0, 1, -500.25, 3.0, 11, "", 1234), Candidate("f-fc", 1.0, 0, -1303.5, 4.0, 9, "", 4321))
    answered.write(Answer(found, candidates, 500, 4.2, 60.0), folder / "answer.html")
    return folder


@pytest.fixture(scope="module")
def conserved(tmp_path_factory):
    pytest.importorskip("tyro")
    from autosym.cli import commands

    folder = tmp_path_factory.mktemp("conserved")
    assert commands.main(["noether", "--demo", "oscillator", "--points", "10", "--out", str(folder)]) == 0
    return folder / "report.html"


@pytest.fixture
def opened(browser, written):
    """Opens the report; what it logs and asks for must stay empty until the end."""
    contexts, complaints = [], []

    def visit(size="wide", scheme="light", file=written / "report.html", **options):
        width, height = SIZES[size]
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda r: r.url.startswith(("file:", "data:")) or complaints.append(f"asked for {r.url}"))
        page.goto(file.as_uri())
        return page

    yield visit
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture
def said(written):
    return json.loads((written / "contents.json").read_text())


def numbers(page, key):
    """Exact numbers of the page, by key; a missing one is None."""
    values = page.eval_on_selector_all(f'data[data-key="{key}"]', "found => found.map(one => one.value)")
    return [float(value) if value else None for value in values]


def contrast(one, two):
    """The ratio of contrast of two colours (r, g, b) of 0 to 255, as WCAG has it."""

    def luminance(colour):
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in colour)]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted([luminance(one), luminance(two)])
    return (high + 0.05) / (low + 0.05)


def colour(page, selector, name):
    text = page.eval_on_selector(selector, f"one => getComputedStyle(one).{name}")
    return [float(part) for part in text[text.index("(") + 1 : -1].split(",")[:3]]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", list(SIZES))
def test_it_fits_and_can_be_read(opened, tmp_path, size, scheme):
    page = opened(size, scheme)
    for details in page.query_selector_all("details"):
        details.evaluate("one => { one.open = true }")
    assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0], "nothing runs off the side"
    page.screenshot(path=tmp_path / f"{size}-{scheme}.png", full_page=True)
    assert (tmp_path / f"{size}-{scheme}.png").stat().st_size > 20_000
    background = colour(page, "body", "backgroundColor")
    assert (sum(background) > 600) is (scheme == "light")
    for selector in ("h1", "main p", ".soft", ".figures dt", "td", "caption, .eyebrow"):
        assert contrast(colour(page, selector, "color"), background) >= 4.5, selector
    for selector in (".bar .c-conv", ".bar .c-f-fc"):
        assert contrast(colour(page, selector, "backgroundColor"), background) >= 2, selector
    small = page.eval_on_selector_all(
        ".chart text", "found => found.map(t => t.getBoundingClientRect().height).filter(h => h > 0 && h < 9)"
    )
    assert small == [], "ticks can be read on a phone"


def test_the_numbers_are_those_of_the_json(opened, said):
    page = opened()
    assert numbers(page, "share") == [path["share"] for path in said["symmetry"]]
    assert numbers(page, "effective") == [path["effective_parameters"] for path in said["symmetry"]]
    assert numbers(page, "precision") == [value for path in said["symmetry"] for value in path["precision"].values()]
    for key in ("log_evidence", "log_likelihood", "occam"):
        assert numbers(page, key) == [said["evidence"][key]]
    assert numbers(page, "evidence") == [said["evidence"]["log_evidence"]]
    assert numbers(page, "evidence_per_sample") == [said["evidence"]["log_evidence"] / said["samples"]]
    for key in ("accuracy", "nll", "error"):
        assert numbers(page, f"calibration.{key}") == [said["calibration"][key]]
    assert sorted(numbers(page, "equivariance")) == sorted(row["error"] for row in said["equivariance"])
    assert numbers(page, "alternative") == [row["log_evidence"] for row in said["compare"]]
    parts = page.eval_on_selector_all(
        ".network .bar", "bars => bars.map(b => [...b.children].map(i => i.getBoundingClientRect().width))"
    )
    shares = [[path["share"] for path in said["symmetry"][i : i + 2]] for i in (0, 2)]
    for widths, expected in zip(parts, shares, strict=True):
        assert [w / sum(widths) for w in widths] == pytest.approx(expected, abs=0.01), "bars are as long as they say"
    steps = [line for line in said["history"] if "log_evidence" in line]
    shown = page.eval_on_selector_all("figure[data-curve]:first-of-type tbody tr th", "cells => cells.map(c => c.textContent)")
    assert shown[: len(steps)] == [str(line["epoch"]) for line in steps]


def test_the_numbers_of_a_run_are_those_of_its_result(browser, tmp_path, monkeypatch, capsys):
    for needed in ("tyro", "rich", "sklearn"):
        pytest.importorskip(needed)
    from autosym.cli import commands
    from autosym.papers import quadrant_digits

    monkeypatch.setitem(quadrant_digits.RUNS, "quadrant-digits", quadrant_digits.Run(width=2, test=1600))
    assert commands.main(["run", "quadrant-digits", "--epochs", "2", "--out", str(tmp_path)]) == 0
    assert f"Report: {tmp_path / 'report.html'}" in capsys.readouterr().out
    result = json.loads((tmp_path / "result.json").read_text())
    page = browser.new_page()
    page.goto((tmp_path / "report.html").as_uri())
    assert numbers(page, "share") == [path["share"] for path in result["symmetry"]]
    assert numbers(page, "precision") == [value for path in result["symmetry"] for value in path["precision"].values()]
    assert numbers(page, "accuracy") == [result["row"]["accuracy"] / 100]
    assert numbers(page, "calibration_error") == [result["row"]["calibration_error"]]
    assert numbers(page, "evidence_per_sample") == pytest.approx([result["row"]["evidence"]])
    assert numbers(page, "parameters") == [result["row"]["parameters"]]
    text = page.inner_text("#repeat")
    assert all(str(value) in text for value in result["config"].values())
    page.close()


def test_names_are_text(opened):
    page = opened()
    assert page.title() == f"{EVIL}: what was learned"
    assert page.inner_text(".eyebrow") == EVIL
    assert page.inner_text(".network .name >> nth=0") == EVIL
    assert page.locator("main b").count() == 0


def test_pointing_at_a_chart_shows_its_numbers(opened, said):
    page = opened()
    chart = page.locator("figure[data-curve] .chart").first
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    page.mouse.move(box["x"] + box["width"] - 2, box["y"] + box["height"] / 2)
    tip = page.locator("figure[data-curve] .tip").first
    last = [line for line in said["history"] if "log_evidence" in line][-1]
    name, value = tip.inner_text().splitlines()
    assert name == f"epoch {last['epoch']}"
    shown = float(value.removeprefix("Evidence ").replace("−", "-"))
    assert shown == pytest.approx(last["log_evidence"] / said["samples"], rel=1e-3)
    page.mouse.move(0, 0)
    assert tip.is_hidden()


def test_the_keyboard_reaches_and_reads_the_marks(opened, said):
    page = opened("narrow")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    reached = {"charts": 0, "layers": 0}
    for _ in range(80):
        page.keyboard.press("Tab")
        where = page.evaluate("[document.activeElement.tagName, document.activeElement.closest('.network') !== null]")
        reached["layers"] += where == ["SUMMARY", True]
        if where[0] == "svg":
            reached["charts"] += 1
            break
    assert reached == {"layers": 2, "charts": 1}
    tip = page.locator("figure[data-curve] .tip").first
    epochs = [line["epoch"] for line in said["history"] if "log_evidence" in line]
    assert tip.inner_text().startswith(f"epoch {epochs[-1]}\n")
    for key, epoch in (("ArrowLeft", epochs[-2]), ("Home", epochs[0]), ("ArrowLeft", epochs[0]), ("End", epochs[-1])):
        page.keyboard.press(key)
        assert tip.inner_text().startswith(f"epoch {epoch}\n")
    page.keyboard.press("Escape")
    assert tip.is_hidden()


def test_a_layer_opens_by_the_keyboard(opened):
    page = opened()
    first = page.locator(".network details").first
    assert not first.locator("table").is_visible()
    first.locator("summary").focus()
    page.keyboard.press("Enter")
    assert first.locator("table").is_visible()


def test_it_says_the_same_without_scripts(opened):
    page = opened(java_script_enabled=False)
    assert page.locator("h1").inner_text()
    assert page.locator(".chart polyline").count() > 10
    page.locator("details.numbers summary").first.click()
    assert page.locator("details.numbers table").first.is_visible()


def test_a_browser_reads_it_as_a_document(opened):
    """Every chart and picture has a name, every section one of its own."""
    page = opened()
    assert page.locator("main section").count() == page.locator("main section h2").count() == 8
    named = page.eval_on_selector_all(
        "[role=img], [role=region]", "found => found.every(one => one.getAttribute('aria-label'))"
    )
    assert named
    assert page.get_by_role("navigation", name="Sections").count() == 1
    assert page.get_by_role("img", name="Reliability diagram").count() == 1
    assert math.isfinite(page.evaluate("performance.timing.domComplete"))


def page_of(name, written, request):
    return request.getfixturevalue("conserved") if name == "conserved" else written / f"{name}.html"


@pytest.mark.skipif(not AXE.exists(), reason="no axe-core: npm install --prefix .venv/axe axe-core")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", ["phone", "wide"])
@pytest.mark.parametrize("name", PAGES)
def test_axe_finds_nothing_to_mend(opened, written, request, name, size, scheme):
    """By its default rules, with every layer and table open."""
    page = opened(size, scheme, page_of(name, written, request))
    page.eval_on_selector_all("details", "found => found.forEach(one => { one.open = true })")
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    told = [f"{v['id']}: {v['help']}: {v['nodes'][0]['html'][:200]} ({len(v['nodes'])} times)" for v in found["violations"]]
    assert told == []
    assert len(found["passes"]) > 10, "it was run"


@pytest.mark.skipif(not AXE.exists(), reason="no axe-core: npm install --prefix .venv/axe axe-core")
def test_axe_finds_what_is_wrong(opened):
    page = opened()
    page.eval_on_selector("svg.chart", "one => one.removeAttribute('aria-label')")
    page.eval_on_selector(".rule, .soft", "one => { one.style.color = '#ddd' }")
    page.evaluate(AXE.read_text(encoding="utf-8"))
    assert {"svg-img-alt", "color-contrast"} <= {v["id"] for v in page.evaluate("axe.run()")["violations"]}


@pytest.mark.parametrize("size", list(SIZES))
@pytest.mark.parametrize("name", PAGES)
def test_every_page_fits_every_screen(opened, written, request, name, size):
    page = opened(size, file=page_of(name, written, request))
    page.eval_on_selector_all("details", "found => found.forEach(one => { one.open = true })")
    assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0], "nothing runs off the side"
    body = float(page.eval_on_selector("body", "one => parseFloat(getComputedStyle(one).fontSize)"))
    assert body == (20 if size == "projector" else 16), "it can be read from the back of a room"


@pytest.mark.parametrize("name", PAGES)
def test_print_has_the_bars_and_no_links(opened, written, request, name):
    page = opened(file=page_of(name, written, request))
    page.emulate_media(media="print")
    assert not page.locator("nav").is_visible()
    assert all(not one.is_visible() for one in page.locator("details.numbers").all())
    exact = page.eval_on_selector_all(".bar i, .swatch", "f => f.every(o => getComputedStyle(o).printColorAdjust === 'exact')")
    assert exact, "browsers leave out backgrounds, which bars are, unless they are told"
    assert len(page.pdf(format="A4")) > 10_000


def test_two_fits_stand_side_by_side_or_above_each_other(opened, written):
    """The same pieces as in their own pages, the one beside the other; on a phone the first is above."""

    def places(size):
        page = opened(size, file=written / "beside.html")
        boxes = [one.bounding_box() for one in page.locator("#networks .beside > div").all()]
        return page, [(box["x"], box["y"]) for box in boxes]

    page, ((left, top), (right, level)) = places("wide")
    assert (left < right, top) == (True, level)
    assert page.locator("#networks .network").count() == 2
    assert len(numbers(page, "share")) == 8
    assert page.inner_text("#figures thead th >> nth=1") == EVIL
    _, ((x, first), (same, second)) = places("phone")
    assert (x, first < second) == (same, True)
