"""The report of conserved quantities: everything it must show, words escaped, and a file that needs nothing else."""

import json
import re

import pytest

from autosym.cli import commands
from autosym.report import conserved

pytest.importorskip("jinja2")
EVIL = "<script>document.title = 'taken'</script>"


def quantity(**changes):
    return {
        "text": "0.50 q1^2 - 0.50 p1^2",
        "A": [[1.0, 0.0], [0.0, -1.0]],
        "b": [0.0, 0.0],
        "name": "energy",
        "angle": 0.71,
        "drift": 0.016,
        "nats": 28.7,
        "along": [[0.0, 0.01, -0.01], [0.02, 0.0, -0.02]],
    } | changes


def contents(**changes):
    return {
        "symmetries": 1,
        "quantities": [quantity()],
        "drifting": [],
        "parallelness": [0.9999],
        "singular_values": [1.71, 0.07],
        "generators": [[[0.0, 1.0, 0.0], [-1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]],
        "log_evidence": 92.0,
        "log_evidence_without": 50.3,
        "starts": [91.0, 92.0],
        "residual": 0.067,
        "points": 20,
    } | changes


def test_the_page_holds_all_that_was_found():
    page = conserved.html(contents())
    assert "1 conserved quantity: energy." in page
    assert "0.50 q1² − 0.50 p1²" in page
    assert len(re.findall(r'<img src="data:image/png;base64,', page)) == 1
    values = dict(re.findall(r'<data value="([^"]+)" data-key="(\w+)"', page)[::-1])
    assert {"0.71": "angle", "0.016": "drift", "28.7": "nats"}.items() <= values.items()
    assert "63.300" in page, "the evidence without it"
    assert len(re.findall(r'<rect class="in"', page)) == 1
    assert len(re.findall(r'<rect class="out"', page)) == 1
    assert page.count("<polyline") == 2
    assert "very strong" in page
    assert not re.search(r'(src|href)="(?!data:|#)', page), "nothing is fetched"


def test_words_of_others_are_escaped():
    page = conserved.html(contents(title=EVIL, command=EVIL, quantities=[quantity(name=EVIL, text=EVIL)]))
    assert "<script" not in page
    assert "&lt;script&gt;" in page


def test_cautions_say_what_to_doubt():
    said = lambda **changes: " ".join(conserved.view(contents(**changes))["cautions"])  # noqa: E731
    assert said() == ""
    assert "no more evidence" in said(log_evidence_without=93.0)
    assert "Not conserved: 1 found by evidence alone" in said(drifting=[quantity(drift=0.5)])
    assert "less noise" in said(undecided=[quantity(drift=0.03, doubt="unclear")])
    assert "other starts" in said(undecided=[quantity(doubt="alike")])
    assert "More states" in said(undecided=[quantity(doubt="evidence")])
    assert "Not needed to explain the velocities: energy" in said(quantities=[quantity(nats=0.1)])


def test_nothing_found_is_a_page_too():
    page = conserved.html(contents(symmetries=0, quantities=[], generators=[], singular_values=[0.3, 0.2]))
    assert "No conserved quantity was found among all that are linear or quadratic" in page
    assert "There is no quantity to follow." in page


def test_the_demo_prints_the_quantity_in_symbols_and_writes_result_and_report(tmp_path, capsys):
    assert commands.main(["noether", "--demo", "oscillator", "--points", "10", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    for words in ("1 conserved quantity was found", "q1^2", "parallelness", "report.html"):
        assert words in shown
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["title"] == "oscillator"
    assert "--points 10" in result["command"]
    assert (tmp_path / "report.html").read_text() == conserved.html(result)
