import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import autosym

pytest.importorskip("tyro")
pytest.importorskip("rich")
pytest.importorskip("sklearn")

from autosym import __main__, cli
from autosym.experiments import provenance, quadrant_digits, running
from autosym.experiments.quadrant_digits import DEMO, LEARNED, METHODS, MODELS, RUNS, TASKS, Run

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
    for word in ("demo", "run", "table", "--version", "symmetry"):
        assert word in text


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("demo", ("--out", "--jobs", "--epochs", "--json")),
        ("run", ("--epochs", "--seed", "--out", "--json")),
        ("table", ("--json",)),
    ],
)
def test_help_of_a_command_explains_its_options(capsys, command, options):
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert all(option in text for option in options)
    assert "and nothing else" in " ".join(text.split()), "--json is explained"


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


# ---- table


def test_a_table_without_results_says_what_to_do(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out, err = shown(capsys, "table", "quadrant-digits", status=1)
    assert out == ""
    assert re.search(r"autosym: runs/demo/result.json does not exist: run `autosym demo` first", err)


def test_an_unknown_table_names_the_tables(capsys):
    err = shown(capsys, "table", "spam", status=1).err
    assert err == "autosym: no table is called 'spam'; there are: 1, 2, 3, quadrant-digits\n"


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
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "a" / "b" / "c" / "provenance.py"))
    assert provenance.commit() is None
