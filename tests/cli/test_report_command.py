"""autosym report, from the files of a run."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("tyro")
pytest.importorskip("rich")
pytest.importorskip("sklearn")

from commands import shown


@pytest.fixture
def done(capsys, tmp_path, tiny):
    """The folder of a run."""
    shown(capsys, "run", "quadrant-digits", "--out", tmp_path / "done", "--json")
    return tmp_path / "done"


def test_a_run_writes_its_report(done):
    result, bulk = (json.loads((done / name).read_text()) for name in ("result.json", "report.json"))
    text = (done / "report.html").read_text(encoding="utf-8")
    assert bulk["symmetry"] == result["symmetry"]
    assert bulk["schedule"] == result["schedule"]
    assert bulk["evidence"]["log_evidence"] / bulk["samples"] == pytest.approx(result["row"]["evidence"])
    assert bulk["calibration"]["error"] == pytest.approx(result["row"]["calibration_error"])
    assert bulk["calibration"]["accuracy"] == pytest.approx(result["row"]["accuracy"] / 100)
    assert bulk["command"] == "autosym run quadrant-digits/digit/f-fc+conv/evidence --seed 1 --epochs 2"
    assert all(f'value="{path["share"]}"' in text for path in result["symmetry"])
    assert f'value="{result["row"]["calibration_error"]}"' in text
    assert (done / "report.json").stat().st_size < 300_000
    assert not list(done.glob("*.tmp"))


def test_report_of_a_run(capsys, tmp_path, done):
    before = (done / "report.html").read_text(encoding="utf-8")
    (done / "report.html").unlink()
    assert shown(capsys, "report", done).out == f"Written: {done / 'report.html'}\n"
    assert (done / "report.html").read_text(encoding="utf-8") == before
    shown(capsys, "report", done, "--out", tmp_path / "new" / "page.html")
    assert (tmp_path / "new" / "page.html").read_text(encoding="utf-8") == before
    shown(capsys, "report", done, "--out", tmp_path / "new")
    assert (tmp_path / "new" / "report.html").read_text(encoding="utf-8") == before
    (done / "report.json").unlink()  # as an older run has none
    shown(capsys, "report", done)
    older = (done / "report.html").read_text(encoding="utf-8")
    assert "Not measured" in older
    assert "data-curve" in older, "curves from history.jsonl"
    shown(capsys, "report", done / "result.json", "--out", tmp_path / "alone.html")
    assert "There is no history" in (tmp_path / "alone.html").read_text(encoding="utf-8")


def test_report_of_a_committed_result(capsys, tmp_path):
    file = Path(__file__).parents[2] / "results/table1/digit_f-fc_conv_evidence-seed0.json"
    shown(capsys, "report", file, "--out", tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "became translation-equivariant" in text
    assert all(f'value="{path["share"]}"' in text for path in json.loads(file.read_text())["symmetry"])


@pytest.mark.usefixtures("tiny")
def test_report_compares_runs_on_the_same_data(capsys, tmp_path, done):
    for model, seed in (("conv", 1), ("fc", 2)):
        shown(capsys, "run", f"quadrant-digits/digit/{model}", "--seed", seed, "--out", tmp_path / model, "--json")
    shown(capsys, "report", done, "--compare", tmp_path / "conv")
    text = (done / "report.html").read_text(encoding="utf-8")
    for folder in (done, tmp_path / "conv"):
        evidence = json.loads((folder / "report.json").read_text())["evidence"]["log_evidence"]
        assert f'value="{evidence}" data-key="alternative"' in text
    assert "only on the same data" in shown(capsys, "report", done, "--compare", tmp_path / "fc", status=1).err
    shown(capsys, "run", "quadrant-digits/digit/fc/map", "--seed", 1, "--out", tmp_path / "map", "--json")
    shown(capsys, "report", done, "--compare", tmp_path / "map")
    text = (done / "report.html").read_text(encoding="utf-8")
    assert f"map ({tmp_path / 'map'}): its precisions were not learned, but other models learned theirs" in text
    bulk = json.loads((tmp_path / "conv" / "report.json").read_text())
    impossible = bulk["evidence"] | {"log_evidence": -1.0}
    (tmp_path / "conv" / "report.json").write_text(json.dumps(bulk | {"evidence": impossible}))
    shown(capsys, "report", done, "--compare", tmp_path / "conv")
    text = (done / "report.html").read_text(encoding="utf-8")
    assert (
        f"({tmp_path / 'conv'}): its evidence must not be used, so it is not ranked: the log evidence, -1.0, is above" in text
    )
    assert text.index(f"({done})</th>") < text.index(f"({tmp_path / 'conv'})</th>"), "the impossible one is last"
    for key, value in (("fingerprint", [1.0]), ("fingerprint", None), ("evidence", 3), ("samples", None)):
        (tmp_path / "conv" / "report.json").write_text(json.dumps(bulk | {key: value}))
        err = shown(capsys, "report", done, "--compare", tmp_path / "conv", status=1).err
        assert f"{tmp_path / 'conv'} is of another version or broken" in err
    (tmp_path / "conv" / "report.json").unlink()
    assert "does not say its evidence" in shown(capsys, "report", done, "--compare", tmp_path / "conv", status=1).err


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        (None, None, "result.json does not exist: name the folder of a run"),
        ("result.json", '{"row": {', "is not JSON"),
        ("result.json", "[]", "is not the result of a fit"),
        ("result.json", '{"rows": [], "symmetry": {}}', "the summary of several runs"),
        ("result.json", '{"verdicts": []}', "`autosym discover` has written its own page: open"),
        ("result.json", '{"quantities": []}', "`autosym noether` has written its own page: open"),
        ("history.jsonl", '{"epoch": 1, "lo', "is not JSON lines"),
        ("result.json", '{"symmetry": [{"layer": "a"}]}', "is of another version"),
        ("report.json", "", "report.json is not JSON"),
        ("report.json", "[]", "report.json is not what a run writes"),
    ],
)
def test_report_of_what_is_no_run_says_why(capsys, tmp_path, name, content, expected):
    if name is not None:
        (tmp_path / "result.json").write_text('{"symmetry": []}')
        (tmp_path / name).write_text(content)
    out, err = shown(capsys, "report", tmp_path, status=1)
    assert out == ""
    assert err.startswith("autosym: ")
    assert expected in err
    assert not (tmp_path / "report.html").exists()


EDITS = {
    "a precision that is a list": ("result.json", lambda found: found["symmetry"][0].update(precision=[1])),
    "an omega that is a number": ("result.json", lambda found: found["symmetry"][0].update(omega=3)),
    "a share in words": ("result.json", lambda found: found["symmetry"][0].update(share="all")),
    "parameters in words": ("result.json", lambda found: found["symmetry"][0].update(effective_parameters="many")),
    "a row that is a list": ("result.json", lambda found: found.update(row=[1])),
    "a schedule that is a list": ("result.json", lambda found: found.update(schedule=[1])),
    "provenance that is a list": ("result.json", lambda found: found.update(provenance=[1])),
    "evidence without parts": ("report.json", lambda found: found.update(evidence={"log_evidence": -1.0})),
    "evidence that is a number": ("report.json", lambda found: found.update(evidence=-1.0)),
    "lines without epochs": ("report.json", lambda found: [line.pop("epoch") for line in found["history"]]),
    "calibration without bins": ("report.json", lambda found: found["calibration"].pop("bins")),
    "limits in a list": ("report.json", lambda found: found.update(approximate=["blocks.0"])),
    "filters of no layer": ("report.json", lambda found: found["filters"][0].pop("layer")),
    "errors of no group": ("report.json", lambda found: found["equivariance"][0].pop("group")),
}  # fmt: skip


def test_files_that_were_changed_are_said_to_be(capsys, done):
    (done / "report.html").unlink()
    for kind, (name, edit) in EDITS.items():
        before = (done / name).read_text()
        found = json.loads(before)
        edit(found)
        (done / name).write_text(json.dumps(found))
        err = shown(capsys, "report", done, status=1).err
        assert f"{done} is of another version or broken (" in err, kind
        assert err.count("\n") == 1
        assert not (done / "report.html").exists()
        (done / name).write_text(before)
    shown(capsys, "report", done)


def test_tables_of_broken_files_name_them(capsys, tmp_path):
    (tmp_path / "result.json").write_text("{")
    assert (
        "result.json is not JSON"
        in shown(capsys, "table", "quadrant-digits", "--results", tmp_path / "result.json", status=1).err
    )
    (tmp_path / "result.json").write_text("{}")
    assert (
        "result.json is of another"
        in shown(capsys, "table", "quadrant-digits", "--results", tmp_path / "result.json", status=1).err
    )
    (tmp_path / "table1").mkdir()
    (tmp_path / "table1" / "a.json").write_text('{"config": {}}')
    assert "a.json is of another version" in shown(capsys, "table", "1", "--results", tmp_path, status=1).err


def test_memory_that_is_not_enough_is_an_error(capsys, monkeypatch):
    def fail(*_, **__):
        raise MemoryError("Unable to allocate 3 TiB")

    monkeypatch.setattr("autosym.cli.commands.own_images.train", fail)
    assert "not enough memory (Unable to allocate 3 TiB)" in shown(capsys, "fit", "x.npz", status=1).err


@pytest.mark.usefixtures("tiny")
def test_a_run_without_jinja2_says_so(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    text = shown(capsys, "run", "quadrant-digits", "--out", tmp_path).out
    assert "pip install 'autosym[report]'" in text
    assert not (tmp_path / "report.html").exists()
