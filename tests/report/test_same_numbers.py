"""One fit has one log evidence: the command line, its files, its table and its page show the same digits."""

import json

import numpy as np
import pytest

pytest.importorskip("jinja2")
pytest.importorskip("tyro")
pytest.importorskip("rich")

import autosym
from autosym.evidence.record import in_words, nats, per_sample
from autosym.report import answered, findings, page
from commands import bars, shown
from pages import Page


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (-169.3127, 0.0, "-169.3"),
        (-0.6931, 0.0, "-0.693"),
        (-442.4, 27.0, "-442"),
        (-12345.678, 0.5, "-12345.7"),
        (1.04, 0, "1.0"),
    ],
)
def test_a_log_evidence_as_text(value, error, text):
    assert nats(value, error) == text
    assert page.in_nats(value, error) == text.replace("-", "−")


def test_a_log_evidence_in_words():
    assert in_words(-169.3127, 256) == "log evidence -169.3 nats over 256 samples (-0.6614 per sample)"
    assert page.in_nats(None) == "–"


def figures_of(text):
    """The figures at the top of a page, by name."""
    words = Page(text).text
    return words[: words.index("Network Evidence")].replace("−", "-")


def test_one_fit_has_the_same_digits_everywhere(fitted, tmp_path):
    fit, data = fitted
    value = float(fit.evidence.log_evidence)
    total, each = nats(value), per_sample(value / 24)
    assert f"log evidence {total} nats over 24 samples ({each} per sample)" in str(fit.symmetry())
    assert f"log evidence {total} nats over 24 samples" in str(fit.evidence)
    assert f"log evidence {total} nats over 24 samples" in repr(fit)
    compared = str(autosym.compare({"this": fit, "again": fit}, curvature="kronecker"))
    assert f" {total}" in compared
    assert f" {each}" in compared
    text = fit.report(tmp_path / "report.html", data, compare={"other": value - 3}).read_text(encoding="utf-8")
    assert f"log evidence {total} nats log evidence per sample {each} " in figures_of(text)
    words = Page(text).text.replace("−", "-")
    assert f"The log evidence is {total} nats over 24 samples." in words
    assert f"A fit by autosym {total} " in words, "among the alternatives"


def test_a_run_of_the_command_line_has_the_same_digits_everywhere(capsys, tmp_path):
    images, labels = bars()
    np.savez(tmp_path / "bars.npz", x=images, y=labels)
    out = shown(capsys, "fit", tmp_path / "bars.npz", "--out", tmp_path / "r", "--epochs", "3", "--model", "conv").out
    result, report = (json.loads((tmp_path / "r" / name).read_text()) for name in ("result.json", "report.json"))
    row = result["row"]
    assert row["log_evidence"] == report["evidence"]["log_evidence"]
    assert row["evidence"] == row["log_evidence"] / row["samples"]
    assert f"Log evidence {in_words(row['log_evidence'], row['samples']).partition(' evidence ')[2]}" in out
    text = (tmp_path / "r" / "report.html").read_text(encoding="utf-8")
    total, each = nats(row["log_evidence"]), per_sample(row["evidence"])
    assert f"log evidence {total} nats log evidence per sample {each} " in figures_of(text)
    assert f"{row['train_accuracy']:.1f} %" in out
    assert f"training accuracy {row['train_accuracy']:.1f} %" in figures_of(text)


def test_curves_show_no_other_number_for_the_evidence(fitted):
    """The last step of a run is not its end: its value stands in the table of the curve, and nowhere else."""
    fit, _ = fitted
    said = findings.contents(fit)
    last = [line for line in said["history"] if "log_evidence" in line][-1]
    last["log_evidence"] = 24 * -7.654
    assert Page(page.html(said)).text.count("−7.654") == 1


def test_an_answer_has_the_digits_that_its_error_allows():
    best = {"network": "conv", "log_evidence": -442.4, "error": 27.0, "runs": 3}
    strict = {"network": "gconv", "log_evidence": -440.0, "error": 27.0, "runs": 3}
    (*_, found) = answered.figures({"candidates": [strict, best], "samples": 500, "best": "conv"})
    assert page.figure(found) == "−442"
