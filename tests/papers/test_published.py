"""The numbers of the papers as they are printed, and the results that are kept here."""

import json
import math
import os
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from autosym.papers import images, table1, table2, table3
from autosym.papers.images import Run
from autosym.training.schedule import Schedule
from tables import RUNS, TABLES, recomputed

# ---- the paper's numbers, as they are printed

PRINTED_1 = """
                fc/map  conv/map  fc/evidence  conv/evidence  f-fc+conv/evidence
digit           95.73   99.38     97.04        99.23          98.86
digit+quadrant  95.10   24.68     95.46        24.50          99.00
"""
# NLL and accuracy by MAP, then by evidence, and minus the log evidence of a sample
PRINTED_2 = """
fc                 2.423  64.42  1.319  52.36  1.896
conv               1.184  82.81  0.464  84.07  1.022
fc+conv            1.713  76.93  0.489  83.32  1.019
f-fc               4.291  50.47  1.307  53.38  2.119
f-fc+conv          1.343  81.61  0.468  83.92  1.277
s-fc/u             5.614  50.21  1.496  46.18  1.926
s-conv/u           0.604  82.53  0.562  81.29  1.037
s-fc+s-conv/u      5.485  58.80  0.538  81.55  0.978
s-fc/omega         7.783  49.69  1.319  52.22  1.813
s-conv/omega       0.913  81.84  0.549  81.20  1.055
s-fc+s-conv/omega  2.040  77.97  0.564  80.63  1.067
"""
PRINTED_3 = """
mnist             0.172  97.59  0.023  99.21  0.328  10  15  75
translated-mnist  0.812  90.78  0.053  98.27  0.216   0  23  77
rotated-mnist     0.819  91.02  0.136  95.55  0.896   8   8  83
cifar-10          3.540  68.33  0.552  80.94  0.926   0  44  56
rotated-cifar-10  5.953  48.30  1.236  55.68  1.630   4  14  82
"""


def printed():
    """(accuracy, NLL, log evidence of a sample) by the name of a run; None where the paper has none."""
    head, *lines = PRINTED_1.strip().splitlines()
    for task, *accuracies in map(str.split, lines):
        for cell, accuracy in zip(head.split(), accuracies, strict=True):
            yield f"table1/{task}/{cell}", (float(accuracy), None, None)
    for table, text in (("table2", PRINTED_2), ("table3", PRINTED_3)):
        for cell, *numbers in map(str.split, text.strip().splitlines()):
            nll, accuracy, nll_2, accuracy_2, evidence, *_ = map(float, numbers)
            yield f"{table}/{cell}/map", (accuracy, nll, None)
            yield f"{table}/{cell}/evidence", (accuracy_2, nll_2, -evidence)


def test_rows_hold_the_numbers_of_the_paper_for_every_cell_it_has(tmp_path):
    rows = [row for table, module in TABLES.items() for row in images.rows(table, module.RUNS, module.PAPER, tmp_path)]
    found = {row["name"]: (row["paper_accuracy"], row["paper_nll"], row["paper_evidence"]) for row in rows}
    learned_by_map = {f"table1/{task}/f-fc+conv/map": (None,) * 3 for task in table1.TASKS}  # which the paper has not
    assert found == dict(printed()) | learned_by_map
    assert sum(len(module.PAPER) for module in TABLES.values()) == len(found) - 2, "none is of a cell that is no run"


def test_shares_of_the_paper():
    rows = images.rows("table3", table3.RUNS, table3.PAPER, Path("none"))
    found = {row["task"]: row["paper_shares"] for row in rows if row["method"] == "evidence"}
    paths = table3.MODEL.split("+")
    assert found == {
        task: dict(zip(paths, (int(number) / 100 for number in numbers[-3:]), strict=True))
        for task, *numbers in map(str.split, PRINTED_3.strip().splitlines())
    }


# ---- the results of this repository

KEPT = sorted((Path(__file__).parents[2] / "results").glob("table*/*.json"))


@cache
def labels_of_test(task, seed):
    return images.tensors(Run("", task, "", seed=seed), None)[1][1]


@pytest.mark.skipif(not KEPT, reason="there are no results")
@pytest.mark.parametrize("path", KEPT, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_result_is_of_a_run_with_its_labels_beside_it(path):
    result = json.loads(path.read_text())
    run = Run(**result["config"])
    assert path == path.parent.parent / f"{run.file}.json"
    assert path.with_suffix(".npy").exists()
    assert result["provenance"]["commit"]


@pytest.mark.skipif(not KEPT, reason="there are no results")
@pytest.mark.parametrize("path", KEPT, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_result_has_the_settings_that_its_command_has(path):
    """Network, data, rate and length of `autosym run NAME`, and when its evidence steps are, in whichever words."""
    run = Run(**json.loads(path.read_text())["config"])
    expected = replace(RUNS[run.name], seed=run.seed)
    assert replace(run, every=None) == replace(expected, every=None)
    if run.method == "evidence":
        steps = [Schedule(epochs=run.epochs, every=every).evidence_epochs() for every in (run.every, expected.every)]
        assert steps[0] == steps[1]


@pytest.mark.skipif(not KEPT, reason="there are no results")
@pytest.mark.skipif(not os.environ.get("AUTOSYM_DATA"), reason="AUTOSYM_DATA is not set")
@pytest.mark.parametrize("path", KEPT, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_accuracy_of_a_result_follows_from_its_labels(path):
    result = json.loads(path.read_text())
    run = Run(**result["config"])
    expected = labels_of_test(run.task, run.seed)
    accuracy = recomputed(path, expected)
    assert accuracy == pytest.approx(result["row"]["accuracy"], abs=1e-9)
    error = math.sqrt(accuracy * (100 - accuracy) / (len(expected) - 1))
    assert result["row"]["standard_error"] == pytest.approx(error, rel=1e-6)


def figure(table, runs, monkeypatch):
    """What is drawn of the results that are kept."""
    drawn = []
    figures = pytest.importorskip("matplotlib.figure")
    monkeypatch.setattr(figures.Figure, "savefig", lambda figure, path, **options: drawn.append(figure))
    images.figure(table, runs, Path("none.png"), Path(__file__).parents[2] / "results")
    return drawn[0]


def test_the_legend_of_a_figure_has_the_paths_of_every_network(monkeypatch):
    """Of Table 2: factored and sparse networks, two by two."""
    drawn = figure("table2", table2.RUNS, monkeypatch)
    titles = [title.split(":")[1].rsplit(",", 1)[0].strip() for axis in drawn.axes if (title := axis.get_title())]
    assert titles == ["fc+conv", "f-fc+conv", "s-fc+s-conv, prior on u", "s-fc+s-conv, prior on omega"], "as in the table"
    named = {text.get_text() for text in drawn.legends[0].get_texts()}
    assert named == {"conv (symmetric)", "fc (free)", "f-fc (free)", "s-conv (symmetric)", "s-fc (free)"}


def test_five_networks_are_drawn_three_and_two(monkeypatch):
    """Each with its precisions below its shares; nothing is drawn in the sixth place."""
    drawn = figure("table3", table3.RUNS, monkeypatch)
    rows = [drawn.axes[start : start + 3] for start in range(0, 12, 3)]
    tasks = [[axis.get_title().split(":")[0] for axis in row] for row in rows]
    assert tasks == [["mnist", "translated-mnist", "rotated-mnist"], [""] * 3, ["cifar-10", "rotated-cifar-10", ""], [""] * 3]
    assert [[axis.axison for axis in row] for row in rows] == [[True] * 3, [True] * 3, [True, True, False], [True, True, False]]
    assert all("precision" in axis.get_xlabel() for axis in [*rows[1], *rows[3][:2]])
