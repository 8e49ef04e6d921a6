"""Rows of the published tables: means over seeds of the results on disk, beside the paper's numbers."""

import math
from dataclasses import asdict, replace

import pytest

from autosym.papers import images, measuring, table1, table2, table3
from autosym.papers.images import Run
from tables import TABLES


def stored(results, run, accuracy, first=(0.2, 0.8), **row):
    """A result as a run writes it."""
    cells = {"nll": 0.5, "evidence": -1.0, "seconds": 10.0, "parameters": 7, **row}
    symmetry = [
        {"layer": layer, "path": path, "share": share}
        for layer, shares in (("0", first), ("1", (0.6, 0.4)), ("2", (None, None)))
        for path, share in zip(("f-fc", "conv"), shares, strict=True)
    ]
    result = {
        "row": {"task": run.task, "model": run.model, "method": run.method, "accuracy": accuracy, **cells},
        "config": asdict(run),
        "symmetry": symmetry,
        "provenance": {"device": "a device"},
    }
    measuring.write(result, results / f"{run.file}.json")


ROW = {"name", "task", "dataset", "model", "prior", "method", "accuracy", "nll", "evidence", "seconds", "spread", "seeds"}
ROW |= {"parameters", "epochs", "device", "shares", "paper_accuracy", "paper_nll", "paper_evidence", "paper_shares"}


def test_rows_are_means_over_seeds_with_their_spread(tmp_path):
    run = table1.RUNS["table1/digit/f-fc+conv/evidence"]
    for seed, accuracy, nll, free in ((0, 90.0, 0.1, 0.2), (1, 96.0, 0.2, 0.5), (2, 99.0, 0.6, 0.8)):
        stored(tmp_path, replace(run, seed=seed, epochs=80), accuracy, first=(free, 1 - free), nll=nll)
    once = table1.RUNS["table1/digit+quadrant/conv/map"]
    stored(tmp_path, once, 25.0)
    rows = {row["name"]: row for row in images.rows("table1", table1.RUNS, table1.PAPER, tmp_path)}
    row = rows[run.name]
    assert (row["accuracy"], row["nll"], row["evidence"], row["seconds"]) == pytest.approx((95.0, 0.3, -1.0, 10.0))
    assert row["spread"] == pytest.approx(math.sqrt((25 + 1 + 16) / 2)), "the standard deviation of one"
    assert row["seeds"] == [0, 1, 2]
    assert (row["epochs"], row["parameters"], row["device"]) == (80, 7, "a device")
    assert row["shares"] == pytest.approx({"f-fc": 1.1 / 3, "conv": 0.9 / 3}), "over layers and seeds"
    assert (rows[once.name]["accuracy"], rows[once.name]["spread"], rows[once.name]["seeds"]) == (25.0, None, [0])


@pytest.mark.parametrize("table", TABLES)
def test_rows_have_every_cell_and_none_where_there_is_no_run(table, tmp_path):
    module = TABLES[table]
    rows = images.rows(table, module.RUNS, module.PAPER, tmp_path)
    assert [row["name"] for row in rows] == list(module.RUNS)
    for row, run in zip(rows, module.RUNS.values(), strict=True):
        assert set(row) == ROW
        assert {key: row[key] for key in ("task", "model", "prior", "method")} == {
            key: getattr(run, key) for key in ("task", "model", "prior", "method")
        }
        assert row["dataset"] == run.task
        ours = {key: value for key, value in row.items() if key not in asdict(run) and not key.startswith("paper")}
        assert ours.pop("name") == run.name
        assert ours.pop("dataset") == run.task
        assert ours.pop("seeds") == []
        assert set(ours.values()) == {None}


def test_rows_have_the_order_of_seeds(tmp_path):
    """As numbers; what is not averaged is that of the first."""
    run = table3.RUNS["table3/mnist/map"]
    for seed in (10, 2):
        stored(tmp_path, replace(run, seed=seed, epochs=100 + seed), 90.0)
    row = next(row for row in images.rows("table3", table3.RUNS, table3.PAPER, tmp_path) if row["name"] == run.name)
    assert row["seeds"] == [2, 10]
    assert row["epochs"] == 102


def test_rows_are_of_their_own_table_and_cell(tmp_path):
    stored(tmp_path, Run("table1", "digit", "s-conv"), 1.0)  # of no cell
    stored(tmp_path, table3.RUNS["table3/mnist/map"], 2.0)
    stored(tmp_path, table2.RUNS["table2/s-fc/u/map"], 3.0)
    stored(tmp_path, table2.RUNS["table2/s-fc/omega/map"], 4.0)
    found = {
        row["name"]: row["accuracy"]
        for table, module in TABLES.items()
        for row in images.rows(table, module.RUNS, module.PAPER, tmp_path)
        if row["accuracy"] is not None
    }
    assert found == {"table3/mnist/map": 2.0, "table2/s-fc/u/map": 3.0, "table2/s-fc/omega/map": 4.0}


def test_mean_shares_are_over_layers():
    symmetry = [
        {"layer": layer, "path": path, "share": share}
        for layer, shares in (("0", (0.2, 0.8)), ("1", (0.6, 0.4)), ("2", (None, None)))
        for path, share in zip(("a", "b"), shares, strict=True)
    ]
    assert images.mean_shares(symmetry) == pytest.approx({"a": 0.8 / 3, "b": 1.2 / 3})
