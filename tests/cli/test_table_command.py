"""autosym run and autosym table of the published tables."""

import json
import math
import re
import sys
from dataclasses import replace

import pytest

pytest.importorskip("tyro")
pytest.importorskip("rich")
pytest.importorskip("sklearn")

from autosym.papers import group_digits, measuring, table1, table2, table3
from autosym.papers.quadrant_digits import METHODS, RUNS
from commands import shown
from files import mnist_parts, write_mnist

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


def test_run_all_chooses_by_the_beginning_of_a_name(capsys, tmp_path, monkeypatch):
    """The runs of any experiment; none is trained here."""
    monkeypatch.chdir(tmp_path)
    ran = []
    monkeypatch.setattr("autosym.cli.published._run", lambda name, *rest: ran.append(name))
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


def test_seeds_count_from_the_experiments_own(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ran = []
    monkeypatch.setattr("autosym.cli.published._run", lambda name, config, *rest: ran.append((config.seed, str(rest[0]))))
    shown(capsys, "run", "quadrant-digits", "--seeds", "3")
    assert ran == [(1 + i, f"runs/quadrant-digits/seed{1 + i}") for i in range(3)]


def test_an_experiment_without_samples_to_choose_says_so(capsys):
    err = shown(capsys, "run", "quadrant-digits", "--samples", "64", status=1).err
    assert (
        err
        == "autosym: quadrant-digits has no samples to choose: samples are for tables 1 to 3, integrator and substeps for noether\n"
    )


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
PUBLISHED_ROW |= {"seeds", "epochs", "shares", "paper_accuracy", "paper_nll", "paper_evidence", "paper_shares"}


def keep(folder, run, **row):
    """A result of a run as it is kept."""
    own = {"accuracy": 98.25, "nll": 0.126, "evidence": -0.5, "seconds": 12.0, "parameters": 5, **row}
    result = {"row": own, "config": {**run.__dict__}, "symmetry": [], "provenance": {"device": "D"}}
    measuring.write(result, folder / f"{run.file}.json")


@pytest.mark.parametrize(("number", "module"), [("1", table1), ("2", table2), ("3", table3), ("table3", table3)])
def test_published_tables_as_json_with_one_result(capsys, tmp_path, monkeypatch, number, module):
    monkeypatch.chdir(tmp_path)
    first = next(iter(module.RUNS))
    keep(tmp_path / "results", module.RUNS[first])
    out, err = shown(capsys, "table", number, "--json")
    assert err == ""
    assert out.count("\n") == 1
    found = json.loads(out)
    assert set(found) == {"rows"}
    assert [row["name"] for row in found["rows"]] == list(module.RUNS)
    for row, run in zip(found["rows"], module.RUNS.values(), strict=True):
        assert set(row) >= PUBLISHED_ROW
        assert row["accuracy"] == (98.25 if row["name"] == first else None)
        assert row["paper_accuracy"] == module.PAPER.get((run.task, run.model, run.prior, run.method), {}).get("accuracy")


@pytest.mark.parametrize("options", [(), ("--json",), ("--figure", "none.png"), ("--results", "results")])
@pytest.mark.parametrize(
    ("name", "folder"),
    [("1", "table1"), ("table2", "table2"), ("3", "table3"), *((n, n) for n in ("invariance-1", "invariance-3", "noether"))],
)
def test_a_table_outside_of_a_checkout_says_where_it_looked_and_what_to_do(
    capsys, tmp_path, monkeypatch, name, folder, options
):
    """There are no results in the installed package."""
    monkeypatch.chdir(tmp_path)
    out, err = shown(capsys, "table", name, *options, status=1)
    assert out == ""
    assert err.startswith(f"autosym: {tmp_path / 'results' / folder} holds no result of this table: ")
    assert err.endswith(f"by --results FOLDER, or make results by `autosym run {folder} --all`\n")
    assert not list(tmp_path.iterdir())


def printed(text):
    """The rows of a printed table, as lists of (column, cell)."""
    lines = [[cell.strip() for cell in re.split("[┃│]", line)[1:-1]] for line in text.splitlines() if line[:1] in ("┃", "│")]
    return [list(zip(lines[0], line, strict=True)) for line in lines[1:]]


def test_published_tables_for_people(capsys, tmp_path):
    """Columns without a number of the paper, or with the same word in all rows, are left out."""
    run = table1.RUNS["table1/digit/conv/map"]
    for seed, accuracy in ((0, 98.25), (1, 99.25)):
        keep(tmp_path, replace(run, seed=seed, epochs=77), accuracy=accuracy)
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
    assert "\ndigit conv by map: 0.6 points below the paper, after 77 of its 1,000 epochs\n" in text
    assert text.count("below the paper") == 1, "cells that were not run, or are not published, are not below"
    assert [cell for _, cell in rows["digit", "f-fc+conv", "map"]] == ["-"] * 6
    assert [cell for _, cell in rows["digit+quadrant", "conv", "map"]] == ["-", "24.68", *["-"] * 4]
    keep(tmp_path, table2.RUNS["table2/s-fc/u/map"])
    second = printed(shown(capsys, "table", "2", "--results", tmp_path).out)
    assert [column for column, _ in second[0]][:3] == ["model", "prior", "by"], "its data are always the same"
    assert ["s-conv", "omega", "evidence", "-", "81.20", "-", "0.549", "-", "-1.055", "-", "-"] in [
        [cell for _, cell in row] for row in second
    ]


def test_learned_shares_stand_beside_the_published_ones(capsys, tmp_path):
    run = table3.RUNS["table3/rotated-mnist/evidence"]
    shares = {"f-fc": (0.2, 0.4), "conv": (0.3, 0.1), "gconv:c4": (0.5, 0.5)}  # by layer: their means are 30, 20 and 50 %
    symmetry = [{"path": path, "share": share} for path, both in shares.items() for share in both]
    row = {"accuracy": 97.0, "nll": 0.1, "evidence": -0.5, "seconds": 12.0, "parameters": 5}
    result = {"row": row, "config": run.__dict__, "symmetry": symmetry, "provenance": {"device": "D"}}
    measuring.write(result, tmp_path / f"{run.file}.json")
    second = shown(capsys, "table", "3", "--results", tmp_path).out.split("Learned by evidence")[1]
    rows = {row[0][1]: row[1:] for row in printed(second)}
    assert set(rows) == {run.task for run in table3.RUNS.values()}
    columns = ("f-fc", "paper", "conv", "paper", "gconv:c4", "paper")
    assert rows["rotated-mnist"] == list(zip(columns, ("30", "8", "20", "8", "50", "83"), strict=True))
    assert [cell for _, cell in rows["mnist"]] == ["-", "10", "-", "15", "-", "75"]


def test_a_table_is_drawn_on_request(capsys, tmp_path, published):
    pytest.importorskip("matplotlib")
    keep(tmp_path / "results", table1.RUNS["table1/digit/conv/map"])
    error = shown(capsys, "table", "1", "--figure", "none.png", status=1).err
    assert error.startswith("autosym: results/table1 holds no network with a choice that was trained by evidence")
    assert not (tmp_path / "none.png").exists()
    shown(capsys, "run", "table1/digit/f-fc+conv", *published)
    plain = shown(capsys, "table", "1", "--json").out
    assert shown(capsys, "table", "1", "--json", "--figure", "deep/table.png").out == plain
    assert (tmp_path / "deep" / "table.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_table_without_results_says_what_to_do(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out, err = shown(capsys, "table", "quadrant-digits", status=1)
    assert out == ""
    assert re.search(r"autosym: runs/fits/result.json does not exist: run `autosym demo --fits` first", err)


def test_an_unknown_table_names_the_tables(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    err = shown(capsys, "table", "spam", status=1).err
    assert (
        err
        == "autosym: no table is called 'spam'; there are: 1, 2, 3, invariance-1, invariance-2, invariance-3, noether, quadrant-digits\n"
    )
