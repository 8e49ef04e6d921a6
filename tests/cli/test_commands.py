import json
import re
import runpy
import subprocess
import sys

import pytest
import torch

import autosym

pytest.importorskip("tyro")
pytest.importorskip("rich")
pytest.importorskip("sklearn")

from autosym import __main__
from autosym.cli import commands
from autosym.papers.quadrant_digits import METHODS, MODELS, RUNS, TASKS, Run
from autosym.runtime import provenance
from commands import check_row, check_symmetry, shown

# ---- the commands themselves


def test_version(capsys):
    assert shown(capsys, "--version").out == f"autosym {autosym.__version__}\n"


def test_python_dash_m(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["autosym", "--version"])
    monkeypatch.delitem(sys.modules, "autosym.__main__")
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("autosym", run_name="__main__")
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"autosym {autosym.__version__}\n"


@pytest.mark.parametrize("arguments", [["--help"], []], ids=["--help", "nothing"])
def test_help_lists_the_commands(capsys, arguments):
    with pytest.raises(SystemExit) as stop:
        commands.main(arguments)
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for word in ("fit", "audit", "demo", "run", "table", "report", "--version", "symmetry"):
        assert word in text


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("fit", ("--out", "--model", "--epochs", "--seed", "--size", "--classes", "--test", "--resume", "--force", "--json")),
        ("audit", ("--groups", "--size", "--mean", "--std", "--samples", "--json")),
        ("demo", ("--out", "--jobs", "--epochs", "--force", "--json")),
        (
            "run",
            ("--all", "--seeds", "--epochs", "--seed", "--samples", "--out", "--results", "--data-dir", "--resume", "--json"),
        ),
        ("table", ("--results", "--figure", "--json")),
        ("report", ("--out", "--compare", "--json")),
        ("noether", ("--demo", "--out", "--force", "--json")),
        ("discover", ("--symmetries", "--minutes", "--force", "--json")),
    ],
)
def test_help_of_a_command_explains_its_options(capsys, command, options):
    with pytest.raises(SystemExit) as stop:
        commands.main([command, "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert all(option in text for option in options)
    assert "--json" not in options or "and nothing else" in " ".join(text.split()), "--json is explained"


def test_an_unknown_command_is_refused(capsys):
    with pytest.raises(SystemExit) as stop:
        commands.main(["spam"])
    assert stop.value.code != 0
    assert "spam" in capsys.readouterr().err


def test_without_tyro_it_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tyro", None)
    monkeypatch.delitem(sys.modules, "autosym.cli.commands")
    monkeypatch.delattr(autosym.cli, "commands")
    assert __main__.main() == 2
    assert "pip install 'autosym[cli]'" in capsys.readouterr().err


# ---- run


def test_run_prints_one_json_object_and_writes_it(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOSYM_COMMIT", "abc123")
    monkeypatch.setitem(RUNS, "quadrant-digits", Run(width=2, test=1600))
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
    assert result["config"] == {**RUNS["quadrant-digits"].__dict__, "epochs": 1}
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
    for folder, seed in enumerate((3, 3, 4)):
        options = ("--seed", seed, "--epochs", "1", "--out", tmp_path / str(folder), "--json")
        rows.append({**json.loads(shown(capsys, "run", "quadrant-digits", *options).out)["row"], "seconds": 0})
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
    assert err.endswith("no run is called 'quadrant-digit': name one of these, or take all of them by --all\n")
    assert all(name in err for name in RUNS)
    assert "table1" not in err  # which does not begin so
    assert "table1" in shown(capsys, "run", "nonsense", status=1).err
    assert len(RUNS) == len(TASKS) * len(MODELS) * len(METHODS) + 1


# ---- provenance


def test_commit_is_that_of_the_checkout_or_of_the_environment(monkeypatch):
    monkeypatch.delenv("AUTOSYM_COMMIT", raising=False)
    found = provenance.commit()
    assert found is None or re.fullmatch(r"[0-9a-f]{40}(-dirty)?", found)
    monkeypatch.setenv("AUTOSYM_COMMIT", "abc123")
    assert provenance.commit() == provenance.provenance()["commit"] == "abc123"


def test_commit_of_an_installed_package_is_unknown(monkeypatch, tmp_path):
    monkeypatch.delenv("AUTOSYM_COMMIT", raising=False)
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "a" / "b" / "runtime" / "provenance.py"))
    assert provenance.commit() is None


def test_commit_of_a_project_that_holds_an_installed_package_is_not_ours(monkeypatch, tmp_path):
    """As by pip install --target."""
    monkeypatch.delenv("AUTOSYM_COMMIT", raising=False)
    author = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    for command in (("init", "-q"), (*author, "commit", "-q", "--allow-empty", "-m", "one")):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "libraries" / "autosym" / "runtime" / "provenance.py"))
    assert provenance.commit() is None
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "src" / "autosym" / "runtime" / "provenance.py"))
    assert provenance.commit(), "the control: as in a checkout"
