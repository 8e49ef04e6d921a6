"""Two fits side by side: from fits, from files of runs, and what is said of their evidence."""

import json

import pytest

pytest.importorskip("jinja2")

import autosym
from autosym.report import beside, findings, writing
from commands import shown
from models import images, small
from pages import Page


def said_of(fit, value, **changes):
    found = findings.contents(fit)
    return found | {"evidence": found["evidence"] | {"log_evidence": value}} | changes


@pytest.mark.parametrize(
    ("one", "other", "changes", "headline", "doubt"),
    [
        (-50.0, -62.34, {}, "The evidence prefers A to B by 12.3 nats, which is very strong.", False),
        (-62.34, -50.0, {}, "The evidence prefers B to A by 12.3 nats, which is very strong.", False),
        (-50.0, -54.0, {}, "The evidence prefers A to B by 4.0 nats, which is strong.", True),
        (-50.0, -50.5, {}, "The evidence does not decide between A and B: they differ by 0.500 nats.", True),
        (-50.0, -60.0, {"samples": 23}, "The evidence is not compared: the fits are of different data.", False),
        (
            -50.0,
            -60.0,
            {"fingerprint": [1.0, 2, 3, 4, 5]},
            "The evidence is not compared: the fits are of different data.",
            False,
        ),
        (-50.0, -60.0, {"fingerprint": None}, "The evidence is not compared: a file does not say it.", True),
        (-50.0, None, {}, "The evidence is not compared: a file does not say it.", True),
        (-50.0, 1.0, {}, "The evidence is not compared: that of B must not be used.", False),
    ],
)
def test_the_headline_says_which_fit_has_more_evidence(fitted, one, other, changes, headline, doubt):
    fit, _ = fitted
    shown = beside.view([said_of(fit, one, title="A"), said_of(fit, other, title="B", **changes)])
    assert shown["headline"] == headline
    assert bool(shown["cautions"]) is doubt


def test_a_fit_beside_another(fitted, tmp_path):
    fit, data = fitted
    other = autosym.fit(small(), images(), epochs=2, burn_in=0, every=1)
    file = fit.report(tmp_path / "two.html", data, beside={"short": other}, title="long")
    page = Page(file.read_text(encoding="utf-8"))
    assert [float(v) for v in page.values["share"]] == [p.share for one in (fit, other) for p in one.symmetry()]
    assert [float(v) for v in page.values["evidence"]] == [float(one.evidence.log_evidence) for one in (fit, other)]
    errors = [autosym.equivariance_error(one.model, findings.GROUPS_SHOWN, data).output() for one in (fit, other)]
    assert [float(v) for v in page.values["equivariance"]] == [found[group] for group in errors[0] for found in errors]
    assert {"long", "short"} <= set(page.words)
    alone = Page(fit.report(tmp_path / "one.html", beside=other).read_text(encoding="utf-8"))
    assert "Not measured" in alone.text
    assert "the other fit" in alone.text


def test_two_runs_are_shown_from_their_files(capsys, tmp_path, fitted):
    for needed in ("tyro", "rich"):
        pytest.importorskip(needed)
    fit, data = fitted
    for name in ("a", "b"):
        found = findings.contents(fit, data, title="same")
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text(json.dumps({"symmetry": found["symmetry"]}))
        (tmp_path / name / "report.json").write_text(json.dumps(found))
    out = shown(capsys, "report", tmp_path / "a", tmp_path / "b").out
    assert out == f"Written: {tmp_path / 'a' / 'beside.html'}\n"
    text = (tmp_path / "a" / "beside.html").read_text(encoding="utf-8")
    assert all(f"same ({tmp_path / name})" in text for name in ("a", "b"))
    shown(capsys, "report", tmp_path / "a", tmp_path / "b", "--out", tmp_path / "new.html")
    assert (tmp_path / "new.html").read_text(encoding="utf-8") == text
    both = "report", tmp_path / "a", tmp_path / "b", "--compare", tmp_path / "b"
    assert "--compare is for the report of one run" in shown(capsys, *both, status=2).err
    (tmp_path / "b" / "report.json").write_text(json.dumps(found | {"fingerprint": [1.0]}))
    assert "is of another version or broken" in shown(capsys, "report", tmp_path / "a", tmp_path / "b", status=1).err
    (tmp_path / "b" / "report.json").unlink()
    writing.write_pair(tmp_path / "a", tmp_path / "b" / "result.json")
    assert "a file does not say it" in (tmp_path / "a" / "beside.html").read_text(encoding="utf-8")
