import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import autosym

pytest.importorskip("tyro")
pytest.importorskip("rich")
pytest.importorskip("sklearn")

from autosym import __main__, cli, provenance
from autosym.experiments import group_digits, quadrant_digits, running, table1, table2, table3
from autosym.experiments.quadrant_digits import DEMO, LEARNED, METHODS, MODELS, RUNS, TASKS, Run
from files import mnist_parts, write_mnist

ROW = {"task", "model", "method", "accuracy", "standard_error", "nll", "evidence", "parameters", "seconds"}


@pytest.fixture
def tiny(monkeypatch):
    """Every run of the experiment with small networks, in this process, one after the other."""
    small = {name: replace(run, width=2, test=1600, epochs=2) for name, run in RUNS.items()}
    monkeypatch.setattr(quadrant_digits, "RUNS", small)
    monkeypatch.setattr(quadrant_digits, "execute_all", lambda runs, jobs: map(quadrant_digits.execute, runs))


def shown(capsys, *arguments, status=0):
    """What a command prints, as (stdout, stderr)."""
    assert cli.main([str(a) for a in arguments]) == status
    return capsys.readouterr()


def check_row(row):
    assert set(row) >= ROW
    assert row["task"] in TASKS
    assert row["model"] in MODELS
    assert row["method"] in ("map", "evidence")
    assert 0 <= row["accuracy"] <= 100
    assert 0 <= row["standard_error"] <= 5
    assert all(math.isfinite(row[key]) for key in ("nll", "evidence", "seconds"))
    assert isinstance(row["parameters"], int)


def check_symmetry(symmetry):
    """The shares of the four layers of a learned network, each summing to one."""
    assert {path["path"] for path in symmetry} == {"conv", "f-fc"}
    assert len(symmetry) == 8
    for layer in {path["layer"] for path in symmetry}:
        assert sum(path["share"] for path in symmetry if path["layer"] == layer) == pytest.approx(1)


# ---- the commands themselves


def test_version(capsys):
    assert shown(capsys, "--version").out == f"autosym {autosym.__version__}\n"


def test_python_dash_m():
    command = [sys.executable, "-m", "autosym", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.stdout == f"autosym {autosym.__version__}\n"


@pytest.mark.parametrize("arguments", [["--help"], []], ids=["--help", "nothing"])
def test_help_lists_the_commands(capsys, arguments):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for word in ("fit", "audit", "demo", "run", "table", "report", "--version", "symmetry"):
        assert word in text


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("fit", ("--out", "--model", "--epochs", "--seed", "--size", "--classes", "--test", "--resume", "--json")),
        ("audit", ("--groups", "--size", "--mean", "--std", "--samples", "--json")),
        ("demo", ("--out", "--jobs", "--epochs", "--json")),
        (
            "run",
            ("--all", "--seeds", "--epochs", "--seed", "--samples", "--out", "--results", "--data-dir", "--resume", "--json"),
        ),
        ("table", ("--results", "--figure", "--json")),
        ("report", ("--out", "--compare")),
    ],
)
def test_help_of_a_command_explains_its_options(capsys, command, options):
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert all(option in text for option in options)
    assert "--json" not in options or "and nothing else" in " ".join(text.split()), "--json is explained"


def test_an_unknown_command_is_refused(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["spam"])
    assert stop.value.code != 0
    assert "spam" in capsys.readouterr().err


def test_without_tyro_it_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tyro", None)
    monkeypatch.delitem(sys.modules, "autosym.cli")
    monkeypatch.delattr(autosym, "cli")
    assert __main__.main() == 2
    assert "pip install 'autosym[cli]'" in capsys.readouterr().err


# ---- run


def test_run_prints_one_json_object_and_writes_it(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOSYM_COMMIT", "abc123")
    out, err = shown(capsys, "run", "quadrant-digits", "--epochs", "1", "--out", tmp_path / "new", "--json")
    assert err == ""
    result = json.loads(out)
    assert out.count("\n") == 1
    assert json.loads((tmp_path / "new" / "result.json").read_text()) == result
    names = {file.name for file in (tmp_path / "new").iterdir()}
    assert names >= {"history.jsonl", "result.json"}
    assert not [name for name in names if name.endswith(".tmp")]
    lines = [json.loads(line) for line in (tmp_path / "new" / "history.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1]
    check_row(result["row"])
    assert {key: result["row"][key] for key in ("task", "model", "method")} == {
        "task": "digit",
        "model": "f-fc+conv",
        "method": "evidence",
    }
    check_symmetry(result["symmetry"])
    assert result["config"] == {**Run().__dict__, "epochs": 1}
    assert result["config"]["seed"] == RUNS["quadrant-digits"].seed
    assert len(result["correct"]) == result["config"]["test"]
    assert result["row"]["accuracy"] == pytest.approx(100 * sum(result["correct"]) / len(result["correct"]))
    assert result["provenance"]["commit"] == "abc123"
    assert result["provenance"]["autosym"] == autosym.__version__
    assert result["provenance"]["torch"] == torch.__version__


@pytest.mark.usefixtures("tiny")
def test_run_for_people(capsys, tmp_path):
    name = "quadrant-digits/digit+quadrant/f-fc+conv/evidence"
    text = shown(capsys, "run", name, "--seed", "7", "--out", tmp_path).out
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["config"]["seed"] == 7
    assert result["row"]["task"] == "digit+quadrant"
    assert f"{name}: test accuracy {result['row']['accuracy']:.2f} +-" in text
    for word in ("Learned symmetry", "blocks.3", "conv", "f-fc", str(tmp_path / "result.json")):
        assert word in text.replace("\n", "") or word in text


@pytest.mark.usefixtures("tiny")
def test_runs_differ_by_seed_and_repeat_by_seed(capsys, tmp_path):
    rows = []
    for seed in (3, 3, 4):
        out = shown(capsys, "run", "quadrant-digits", "--seed", seed, "--epochs", "1", "--out", tmp_path, "--json").out
        rows.append({**json.loads(out)["row"], "seconds": 0})
    assert rows[0] == rows[1]
    assert rows[0]["nll"] != rows[2]["nll"]


def test_run_writes_to_runs_by_default(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(RUNS, "quadrant-digits", Run(model="conv", width=2, test=1600))
    shown(capsys, "run", "quadrant-digits", "--epochs", "1", "--json")
    assert (tmp_path / "runs" / "quadrant-digits" / "result.json").exists()


def test_an_unknown_run_names_the_runs(capsys):
    out, err = shown(capsys, "run", "quadrant-digit", status=1)
    assert out == ""
    assert err.startswith("autosym: no run is called 'quadrant-digit'; there are:")
    assert all(name in err for name in RUNS)
    assert len(RUNS) == len(TASKS) * len(MODELS) * len(METHODS) + 1


# ---- report


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
    assert "No history is at hand" in (tmp_path / "alone.html").read_text(encoding="utf-8")


def test_report_of_a_committed_result(capsys, tmp_path):
    file = Path(__file__).parent.parent / "results/table1/digit_f-fc_conv_evidence-seed0.json"
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
    assert f"map ({tmp_path / 'map'}): its precisions were not learned, those of others were" in text
    bulk = json.loads((tmp_path / "conv" / "report.json").read_text())
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
        ("result.json", "[]", "is not the result of a run"),
        ("result.json", '{"rows": [], "symmetry": {}}', "the summary of several runs"),
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

    monkeypatch.setattr("autosym.applications.train", fail)
    assert "not enough memory (Unable to allocate 3 TiB)" in shown(capsys, "fit", "x.npz", status=1).err


@pytest.mark.usefixtures("tiny")
def test_a_run_without_jinja2_says_so(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    text = shown(capsys, "run", "quadrant-digits", "--out", tmp_path).out
    assert "pip install 'autosym[report]'" in text
    assert not (tmp_path / "report.html").exists()


# ---- run: the published tables


@pytest.fixture
def published(tmp_path, monkeypatch):
    """The runs of Table 1 with small networks, on 80 images of MNIST, in a folder of their own; returns their options."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AUTOSYM_DATA", raising=False)
    monkeypatch.setattr(table1, "RUNS", {name: replace(run, width=1) for name, run in table1.RUNS.items()})
    write_mnist(tmp_path / "data", mnist_parts(80, 30))
    return ("--data-dir", "data", "--epochs", "1", "--json")


def test_run_of_a_table_keeps_its_result_beside_the_others(capsys, tmp_path, published):
    out, err = shown(capsys, "run", "table1/digit/conv/map", "--samples", "64", "--seed", "5", *published)
    assert err == ""
    assert out.count("\n") == 1
    result = json.loads(out)
    assert {key: result["config"][key] for key in ("samples", "seed", "epochs", "method")} == {
        "samples": 64,
        "seed": 5,
        "epochs": 1,
        "method": "map",
    }
    assert json.loads((tmp_path / "results/table1/digit_conv_map-samples64-seed5.json").read_text()) == result
    assert (tmp_path / "results/table1/digit_conv_map-samples64-seed5.npy").exists()
    folder = tmp_path / "runs" / "table1/digit/conv/map"
    written = ["checkpoint.safetensors", "history.jsonl", "report.html", "report.json", "result.json"]
    assert sorted(file.name for file in folder.iterdir()) == written
    assert json.loads((folder / "result.json").read_text()) == result


def test_run_of_a_table_is_by_evidence_if_nothing_else_is_said(capsys, tmp_path, published, monkeypatch):
    monkeypatch.setenv("AUTOSYM_DATA", str(tmp_path / "data"))
    options = ("--epochs", "1", "--results", "kept", "--out", "here")
    text = shown(capsys, "run", "table1/digit+quadrant/conv", *options).out
    name = "table1/digit+quadrant/conv/evidence"
    result = json.loads((tmp_path / "kept/table1/digit_quadrant_conv_evidence-seed0.json").read_text())
    assert f"{name}: test accuracy {result['row']['accuracy']:.2f} +- {result['row']['standard_error']:.2f} %" in text
    assert "Written: here/result.json and here/history.jsonl, and kept/table1/digit_quadrant_conv_evidence-seed0.json" in text
    assert not (tmp_path / "results").exists()


def test_run_all_runs_every_cell_that_begins_so(capsys, tmp_path, published):
    out = shown(capsys, "run", "table1/digit/conv/", "--all", *published).out
    rows = [json.loads(line)["row"] for line in out.splitlines()]
    assert [(row["task"], row["model"], row["method"]) for row in rows] == [
        ("digit", "conv", "map"),
        ("digit", "conv", "evidence"),
    ]
    assert sorted(file.name for file in (tmp_path / "results/table1").glob("*.json")) == [
        "digit_conv_evidence-seed0.json",
        "digit_conv_map-seed0.json",
    ]
    for method in ("map", "evidence"):
        assert (tmp_path / f"runs/table1/digit/conv/{method}/seed0/result.json").exists()


def test_run_all_chooses_by_the_beginning_of_a_name(capsys, monkeypatch):
    """The runs of any experiment; none is trained here."""
    ran = []
    monkeypatch.setattr(cli, "_run", lambda name, *rest: ran.append(name))
    for beginning, names in (
        ("table2", list(table2.RUNS)),
        ("table2/s-fc/", [f"table2/s-fc/{prior}/{method}" for prior in ("u", "omega") for method in METHODS]),
        ("table", [*table1.RUNS, *table2.RUNS, *table3.RUNS]),
        ("group", list(group_digits.RUNS)),
        ("quadrant", [name for name in RUNS if name != "quadrant-digits"]),  # which is one of the others by a short name
    ):
        ran.clear()
        shown(capsys, "run", beginning, "--all")
        assert ran == names
    for nothing in ("table4", "digit/conv/map"):
        assert f"no run is called '{nothing}'" in shown(capsys, "run", nothing, "--all", status=1).err
    assert "no run is called 'table2'" in shown(capsys, "run", "table2", status=1).err


def test_run_of_two_seeds_is_two_results(capsys, tmp_path, published):
    options = ("--seeds", "2", "--seed", "3", "--out", "there")
    results = [
        json.loads(line) for line in shown(capsys, "run", "table1/digit/conv/map", *options, *published).out.splitlines()
    ]
    assert [result["config"]["seed"] for result in results] == [3, 4]
    assert results[0]["row"]["nll"] != results[1]["row"]["nll"]
    for result, seed in zip(results, (3, 4), strict=True):
        folder = tmp_path / "there" / "table1/digit/conv/map" / f"seed{seed}"
        assert json.loads((folder / "result.json").read_text()) == result
    row = next(
        row for row in json.loads(shown(capsys, "table", "1", "--json").out)["rows"] if row["name"] == "table1/digit/conv/map"
    )
    assert row["seeds"] == [3, 4]
    assert row["accuracy"] == pytest.approx(sum(result["row"]["accuracy"] for result in results) / 2)
    assert row["spread"] == pytest.approx(abs(results[0]["row"]["accuracy"] - results[1]["row"]["accuracy"]) / math.sqrt(2))


def test_seeds_count_from_the_experiments_own(capsys, monkeypatch):
    ran = []
    monkeypatch.setattr(cli, "_run", lambda name, config, *rest: ran.append((config.seed, str(rest[0]))))
    shown(capsys, "run", "quadrant-digits", "--seeds", "3")
    assert ran == [(1 + i, f"runs/quadrant-digits/seed{1 + i}") for i in range(3)]


def test_an_experiment_without_samples_to_choose_says_so(capsys):
    err = shown(capsys, "run", "quadrant-digits", "--samples", "64", status=1).err
    assert err == "autosym: quadrant-digits has no samples to choose: that is for tables 1 to 3\n"


def test_a_run_of_a_table_resumes(capsys, tmp_path, published):
    """From the end of a whole run: nothing is trained again."""
    options = published
    first = json.loads(shown(capsys, "run", "table1/digit/conv/map", *options).out)
    history = (tmp_path / "runs/table1/digit/conv/map/history.jsonl").read_text()
    again = json.loads(shown(capsys, "run", "table1/digit/conv/map", "--resume", *options).out)
    assert (tmp_path / "runs/table1/digit/conv/map/history.jsonl").read_text() == history
    assert {**first["row"], "seconds": 0} == {**again["row"], "seconds": 0}


def test_a_run_without_its_data_says_where_they_may_be(capsys, tmp_path, published, monkeypatch):
    monkeypatch.setitem(sys.modules, "pooch", None)
    err = shown(capsys, "run", "table1/digit/conv/map", "--data-dir", "none", status=1).err
    assert err.startswith("autosym: ")
    assert all(word in err for word in ("none", "AUTOSYM_DATA", "--data-dir"))


# ---- table


PUBLISHED_ROW = {"name", "task", "dataset", "model", "prior", "method", "accuracy", "nll", "evidence", "seconds", "spread"}
PUBLISHED_ROW |= {"seeds", "epochs", "shares", "paper_accuracy", "paper_nll", "paper_evidence"}


@pytest.mark.parametrize(("number", "module"), [("1", table1), ("2", table2), ("3", table3), ("table3", table3)])
def test_published_tables_as_json_without_a_result(capsys, tmp_path, monkeypatch, number, module):
    monkeypatch.chdir(tmp_path)
    out, err = shown(capsys, "table", number, "--json")
    assert err == ""
    assert out.count("\n") == 1
    found = json.loads(out)
    assert set(found) == {"rows"}
    assert [row["name"] for row in found["rows"]] == list(module.RUNS)
    for row, run in zip(found["rows"], module.RUNS.values(), strict=True):
        assert set(row) >= PUBLISHED_ROW
        assert row["accuracy"] is None
        assert row["paper_accuracy"] == module.PAPER.get((run.task, run.model, run.prior, run.method), {}).get("accuracy")


def printed(text):
    """The rows of a printed table, as lists of (column, cell)."""
    lines = [[cell.strip() for cell in re.split("[┃│]", line)[1:-1]] for line in text.splitlines() if line[:1] in ("┃", "│")]
    return [list(zip(lines[0], line, strict=True)) for line in lines[1:]]


def test_published_tables_for_people(capsys, tmp_path):
    """Columns without a number of the paper, or with the same word in all rows, are left out."""
    run = table1.RUNS["table1/digit/conv/map"]
    for seed, accuracy in ((0, 98.25), (1, 99.25)):
        row = {"accuracy": accuracy, "nll": 0.126, "evidence": -0.5, "seconds": 12.0, "parameters": 5}
        config = {**run.__dict__, "seed": seed, "epochs": 77}
        result = {"row": row, "config": config, "symmetry": [], "provenance": {"device": "D"}}
        running.write(result, tmp_path / f"{replace(run, seed=seed).file}.json")
    text = shown(capsys, "table", "1", "--results", tmp_path).out
    assert "Table 1: ours and the paper's" in text
    rows = {tuple(cell for _, cell in row[:3]): row[3:] for row in printed(text)}
    assert len(rows) == len(table1.RUNS)
    assert rows["digit", "conv", "map"] == [
        ("accuracy (%)", "98.75 ± 0.71"),
        ("paper", "99.38"),
        ("NLL", "0.126"),
        ("evidence/N", "-0.500"),
        ("epochs", "77"),
        ("seconds", "12"),
    ]
    assert [cell for _, cell in rows["digit", "f-fc+conv", "map"]] == ["-"] * 6
    assert [cell for _, cell in rows["digit+quadrant", "conv", "map"]] == ["-", "24.68", *["-"] * 4]
    second = printed(shown(capsys, "table", "2", "--results", tmp_path).out)
    assert [column for column, _ in second[0]][:3] == ["model", "prior", "by"], "its data are always the same"
    assert ["s-conv", "omega", "evidence", "-", "81.20", "-", "0.549", "-", "-1.055", "-", "-"] in [
        [cell for _, cell in row] for row in second
    ]


def test_a_table_is_drawn_on_request(capsys, tmp_path, published):
    pytest.importorskip("matplotlib")
    none = shown(capsys, "table", "1", "--figure", "none.png", status=1).err
    assert none.startswith("autosym: results/table1 holds no network with a choice that was trained by evidence")
    assert not (tmp_path / "none.png").exists()
    shown(capsys, "run", "table1/digit/f-fc+conv", *published)
    plain = shown(capsys, "table", "1", "--json").out
    assert shown(capsys, "table", "1", "--json", "--figure", "deep/table.png").out == plain
    assert (tmp_path / "deep" / "table.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_table_without_results_says_what_to_do(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out, err = shown(capsys, "table", "quadrant-digits", status=1)
    assert out == ""
    assert re.search(r"autosym: runs/demo/result.json does not exist: run `autosym demo` first", err)


def test_an_unknown_table_names_the_tables(capsys):
    err = shown(capsys, "table", "spam", status=1).err
    assert (
        err
        == "autosym: no table is called 'spam'; there are: 1, 2, 3, invariance-1, invariance-2, invariance-3, noether, quadrant-digits\n"
    )


# ---- demo


def check_demo(summary, path):
    """The schema that the demo promises."""
    assert json.loads((path / "result.json").read_text()) == summary
    cells = [(row["task"], row["model"], row["method"]) for row in summary["rows"]]
    assert cells == [(t, m, k) for t in TASKS for m in MODELS for k in METHODS if (t, m, k) in DEMO]
    assert {(t, *LEARNED) for t in TASKS} | {(t, m, "map") for t in TASKS for m in MODELS} == set(cells)
    for row in summary["rows"]:
        check_row(row)
    assert list(summary["symmetry"]) == list(TASKS)
    for symmetry in summary["symmetry"].values():
        check_symmetry(symmetry)
    assert len(summary["configs"]) == len(cells)
    assert set(summary["provenance"]) >= {"autosym", "torch", "python", "device", "commit"}
    assert (path / "demo.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert sorted(file.name for file in path.iterdir()) == ["demo.png", "result.json"]


@pytest.mark.usefixtures("tiny")
def test_demo_and_its_table(capsys, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("AUTOSYM_COMMIT", "abc123")
    out, err = shown(capsys, "demo", "--epochs", "1", "--out", tmp_path, "--json")
    assert err == ""
    assert out.count("\n") == 1
    summary = json.loads(out)
    check_demo(summary, tmp_path)
    assert summary["provenance"]["commit"] == "abc123"
    assert {config["epochs"] for config in summary["configs"]} == {1}

    rows = json.loads(shown(capsys, "table", "quadrant-digits", "--results", tmp_path / "result.json", "--json").out)
    assert rows == {"rows": summary["rows"]}
    text = shown(capsys, "table", "quadrant-digits", "--results", tmp_path / "result.json").out
    for word in ("Task: digit", "Task: digit and quadrant", "convolution", "dense", "(f-fc+conv)", "Learned symmetry"):
        assert word in text
    for row in summary["rows"]:
        assert f"{row['accuracy']:.1f} ± {row['standard_error']:.1f}" in text
    assert text.count("against the better fixed model") == 2

    capsys.readouterr()
    text = shown(capsys, "demo", "--epochs", "1", "--out", tmp_path / "again").out
    assert f"{len(DEMO)}/{len(DEMO)}" in text
    assert "demo.png" in text


@pytest.mark.slow
def test_demo_in_processes(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    out, _ = shown(capsys, "demo", "--epochs", "1", "--jobs", "2", "--out", tmp_path, "--json")
    check_demo(json.loads(out), tmp_path)


def cell(task, model, method, correct):
    row = {"task": task, "model": model, "method": method, "accuracy": 100 * sum(correct) / len(correct)}
    return {"row": row, "correct": correct, "symmetry": [f"of {task}"], "config": {"model": model}}


def test_the_learned_network_is_compared_with_the_better_fixed_one_in_pairs():
    results = [
        cell("digit", *LEARNED, [1, 1, 1, 0]),
        cell("digit", "conv", "map", [1, 1, 0, 0]),
        cell("digit", "fc", "evidence", [0, 1, 0, 0]),
        cell("digit+quadrant", *LEARNED, [0] * 50 + [1] * 50),
        cell("digit+quadrant", "fc", "map", [1] * 100),
    ]
    summary = quadrant_digits.summarise(results)
    first, second = summary["comparison"]
    assert (first["task"], first["best_fixed"], first["difference"]) == ("digit", "conv (map)", 25.0)
    assert first["standard_error"] == pytest.approx(25.0)  # of the differences 0, 0, 100, 0: their deviation is 50
    assert first["within_two_standard_errors_or_above"]
    assert (second["best_fixed"], second["difference"]) == ("fc (map)", -50.0)
    assert not second["within_two_standard_errors_or_above"]
    assert summary["symmetry"] == {"digit": ["of digit"], "digit+quadrant": ["of digit+quadrant"]}
    assert [(row["task"], row["model"]) for row in summary["rows"]] == [
        ("digit", "fc"),
        ("digit", "conv"),
        ("digit", "f-fc+conv"),
        ("digit+quadrant", "fc"),
        ("digit+quadrant", "f-fc+conv"),
    ]


@pytest.mark.parametrize("task", TASKS)
def test_training_and_test_images_are_apart_and_normalised(task):
    (x, y), (x_test, y_test) = quadrant_digits.tensors(Run(task=task))
    assert (len(x), len(x_test)) == (1437, 360)
    assert x.shape[1:] == x_test.shape[1:] == (1, 16, 16)
    assert float(x.mean()) == pytest.approx(0, abs=1e-5)
    assert float(x.std()) == pytest.approx(1, abs=1e-5)
    assert y.unique().tolist() == list(range(TASKS[task]))
    assert int(y_test.max()) < TASKS[task]
    if task == "digit+quadrant":
        assert not torch.equal(y[:360] // 10, y_test // 10), "placed with another seed"


def test_a_result_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "result.json"
    running.write({"a": 1}, path)
    with pytest.raises(TypeError):
        running.write({"a": object()}, path)
    assert json.loads(path.read_text()) == {"a": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["result.json"]


# ---- provenance


def test_commit_is_that_of_the_checkout_or_of_the_environment(monkeypatch):
    monkeypatch.delenv("AUTOSYM_COMMIT", raising=False)
    found = provenance.commit()
    assert found is None or re.fullmatch(r"[0-9a-f]{40}(-dirty)?", found)
    monkeypatch.setenv("AUTOSYM_COMMIT", "abc123")
    assert provenance.commit() == provenance.provenance()["commit"] == "abc123"


def test_commit_of_an_installed_package_is_unknown(monkeypatch, tmp_path):
    monkeypatch.delenv("AUTOSYM_COMMIT", raising=False)
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "a" / "b" / "provenance.py"))
    assert provenance.commit() is None
