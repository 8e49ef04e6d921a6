"""The runs of the invariance tables: names, data, one tiny run of each kind, and the rows of a table."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

pytest.importorskip("tyro")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from autosym.cli import commands
from autosym.papers import datasets, invariance, learned_ranges
from autosym.papers.invariance import PAPER, RUNS, TABLES
from autosym.runtime import workers
from files import mnist_parts, write_mnist


@pytest.fixture
def folder(tmp_path, monkeypatch):
    write_mnist(tmp_path, mnist_parts())
    monkeypatch.setattr(invariance, "FEATURES", 16)
    monkeypatch.setattr(invariance, "COPIES", 3)
    return tmp_path


def test_every_published_cell_has_a_run():
    assert {run.table for run in RUNS.values()} == set(TABLES)
    for table in TABLES:
        tasks = invariance.TURNED if table == "invariance-1" else invariance.CHANGED
        assert all(f"{table}/{task}/{model}" in RUNS for model in PAPER[table] for task in tasks)
        assert all(len(values) == len(tasks) for values in PAPER[table].values())
        assert any(run.method == "laplace" for run in RUNS.values() if run.table == table)
    assert len({run.file for run in RUNS.values()}) == len(RUNS)
    assert not RUNS["invariance-1/full/fixed-45"].learn


CHANGES = {
    "regular": lambda x, seed: x,
    "full": lambda x, seed: datasets.rotated(x, seed, 180.0),
    "half": lambda x, seed: datasets.rotated(x, seed, 90.0),
    "rotated": lambda x, seed: datasets.rotated(x, seed, 180.0),
    "translated": lambda x, seed: datasets.translated(x, seed, 8),
    "scaled": lambda x, seed: datasets.scaled(x, seed, 2.0),
}


@pytest.mark.parametrize("task", sorted({*invariance.TURNED, *invariance.CHANGED}))
def test_images_are_changed_as_their_task_says_each_part_by_its_own_draws(folder, task):
    table = "invariance-1" if task in invariance.TURNED else "invariance-2"
    run = invariance.Run(task, "mlp", seed=3, samples=20, table=table)
    for part, ((x, y), (pixels, labels)) in enumerate(
        zip(invariance.tensors(run, folder), datasets.mnist(folder), strict=True)
    ):
        count = 20 if part == 0 else len(labels)
        torch.testing.assert_close(x, CHANGES[task](datasets.as_floats(pixels), 6 + part)[:count], rtol=0, atol=1e-6)
        assert torch.equal(y, labels[:count])


@pytest.mark.parametrize(
    "name",
    [
        "invariance-1/full/learned",
        "invariance-1/half/point-estimate",
        "invariance-1/full/point-estimate-relu",
        "invariance-2/scaled/mlp",
        "invariance-2/translated/mlp+affine",
    ],
)
def test_a_tiny_run_is_kept_and_shown(folder, tmp_path, capsys, name):
    results, out = tmp_path / "results", tmp_path / "run"
    arguments = [
        "run",
        name,
        "--epochs",
        "2",
        "--data-dir",
        str(folder),
        "--results",
        str(results),
        "--out",
        str(out),
        "--json",
    ]
    assert commands.main(arguments) == 0
    result = json.loads(capsys.readouterr().out)
    run = replace(RUNS[name], epochs=2)
    kept = json.loads((results / f"{run.file}.json").read_text())
    assert kept["config"]["epochs"] == 2
    assert kept["row"]["accuracy"] == result["row"]["accuracy"]
    assert len(kept["history"]) == 2
    assert [f"{r['name']} ({r['unit']})" for r in kept["ranges"]] == list(kept["history"][-1]["ranges"])
    table, _, rest = name.partition("/")
    assert commands.main(["table", table, "--json", "--results", str(results)]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows[name]["accuracy"] == pytest.approx(result["row"]["accuracy"])
    assert sum(row["accuracy"] is not None for row in rows.values()) == 1
    figure = ["--figure", str(tmp_path / "table.png")]
    learned = bool(kept["ranges"])
    assert commands.main(["table", table, "--results", str(results), *(figure if learned else [])]) == 0
    assert (tmp_path / "table.png").exists() is learned
    assert rest.split("/")[0] in capsys.readouterr().out
    if "affine" in name:  # a filter for each of six ranges, as text
        pictures = learned_ranges.unpacked(kept["filter_banks"][2])
        assert len(kept["filter_banks"]) == 6
        assert pictures[3].shape == (28, 28)
        assert abs(int(pictures[3].max())) <= 127


def test_fixed_ranges_stay_and_learned_ones_move(folder):
    for name, moves in (("invariance-1/full/fixed-45", False), ("invariance-1/full/learned-from-45", True)):
        result = invariance.execute(replace(RUNS[name], epochs=2), data_dir=folder, results=folder / "results")
        assert (abs(result["ranges"][0]["value"] - 45) > 1e-3) is moves


def test_the_laplace_row(folder, monkeypatch):
    monkeypatch.setattr(invariance, "convolutional", lambda run, shape: _small(run))
    result = invariance.execute(
        replace(RUNS["invariance-1/full/laplace"], epochs=2, samples=20), data_dir=folder, results=folder / "results"
    )
    assert result["ranges"][0]["name"] == "rotation"
    assert result["config"]["samples"] == 20


def _small(run):
    net = torch.nn.Sequential(torch.nn.AvgPool2d(7), torch.nn.Flatten(), torch.nn.Linear(16, 10))
    return invariance.symmetrise(net, {run.symmetry: run.start}, 2)


def test_the_convolutional_network_takes_both_kinds_of_images():
    for shape in ((1, 28, 28), (3, 32, 32)):
        net = invariance.convolutional(replace(RUNS["invariance-1/full/laplace"]), shape)
        assert net(torch.randn(2, *shape)).shape == (2, 10)


def test_a_figure_has_a_row_of_panels_for_each_unit(tmp_path, monkeypatch):
    """With every range in the panel of its own task and unit, and named beside it."""
    drawn = []
    monkeypatch.setattr(learned_ranges, "save_figure", lambda figure, path, dpi: drawn.append(figure))
    keys = ("rotation (degrees)", "x-scale (factor)", "y-scale (factor)")
    results = [
        {
            "config": {"task": task, "model": "mlp+affine", "method": "elbo"},
            "history": [{"epoch": e, "ranges": {key: 10.0 * e + i for i, key in enumerate(keys)}} for e in (1, 2)],
        }
        for task in ("rotated", "scaled")
    ]
    learned_ranges.draw(results, tmp_path / "figure.png")
    axes = drawn[0].axes
    assert [len(axis.lines) for axis in axes] == [1, 1, 2, 2]
    assert [axis.get_ylabel() for axis in axes] == ["degrees", "", "factor", ""]
    assert [axis.get_title() for axis in axes] == ["rotated", "scaled", "", ""]
    assert axes[2].lines[1].get_ydata().tolist() == [12.0, 22.0]
    assert [text.get_text() for text in axes[3].get_legend().get_texts()] == ["mlp+affine: x-scale", "mlp+affine: y-scale"]


def test_a_figure_of_nothing_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="run one first"):
        invariance.figure("invariance-1", tmp_path / "figure.png", tmp_path)


def test_a_resumed_run_is_left_alone_where_it_is_finished_and_else_says_that_it_starts_anew(folder, capsys):
    run = replace(RUNS["invariance-1/full/learned"], epochs=2)
    results = folder / "results"
    options = {"progress": True, "resume": True, "data_dir": folder, "results": results}
    first = invariance.execute(run, **options)
    assert "keeps no checkpoint: it starts anew" in capsys.readouterr().err
    again = invariance.execute(run, **options)
    assert again["row"] == first["row"], "the seconds, too"
    assert capsys.readouterr() == ("", "")
    longer = invariance.execute(replace(run, epochs=3), **options)
    assert longer["config"]["epochs"] == 3


def test_many_runs_at_a_time_and_some_that_fail(folder, tmp_path, capfd, monkeypatch):
    """By threads here, which see the smaller networks of these tests."""
    monkeypatch.setattr(workers, "ProcessPoolExecutor", lambda jobs, **_: ThreadPoolExecutor(jobs))
    results, out = tmp_path / "results", tmp_path / "runs"
    options = ["--epochs", "1", "--samples", "30", "--data-dir", str(folder), "--results", str(results), "--out", str(out)]
    assert commands.main(["run", "invariance-2/regular/mlp", "--all", "--jobs", "2", *options]) == 0
    printed = capfd.readouterr().out
    models = ("mlp", "mlp+affine", "mlp+rotation", "mlp+translation", "mlp+scale")
    assert all(f"invariance-2/regular/{model}: test accuracy" in printed for model in models)
    assert len(list(results.rglob("*.json"))) == len(list(results.rglob("*.npy"))) == len(models)
    assert commands.main(["run", "invariance-3/regular/mlp", "--all", "--jobs", "2", *options]) == 1
    assert "5 of 5 runs failed" in capfd.readouterr().err


def test_names_of_results_are_of_letters_digits_and_dots_only():
    assert all(re.fullmatch(r"[\w.-]+", part, re.ASCII) for run in RUNS.values() for part in run.file.parts)
