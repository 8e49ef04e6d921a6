"""The benchmark of paths that break a symmetry, ``benchmarks/breaking.py``, at the smallest size that runs."""

import json

import pytest

import breaking
from breaking import CELLS, FAMILIES, TASKS, Cell, Shape
from files import mnist_parts, write_mnist

TINY = Shape(2, (1, 2), (4, 4), hidden=2)


def test_names_are_file_names_and_differ():
    names = [cell.name for cell in CELLS]
    assert len(set(names)) == len(names)
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-_") for name in names)
    assert {task for family in FAMILIES for task in family.tasks} == set(TASKS)


def test_a_run_is_measured_once_and_is_in_the_table(tmp_path, capsys):
    cell = Cell("place", "where+conv", seed=1, epochs=2, shape=TINY)
    folders = tmp_path / "results", tmp_path / "work"
    assert breaking.run_all([cell], None, *folders) == 0
    found = json.loads((tmp_path / "results" / f"{cell.name}.json").read_text())
    assert found["row"]["evidence"] < 0
    assert found["broken"] is None or 0 <= found["broken"] <= 1, "None if the network died"
    assert found["samples"] == 1437
    assert not (tmp_path / "work" / cell.name).exists()
    (tmp_path / "results" / f"{cell.name}.json").write_text(json.dumps(found | {"samples": 1}))
    assert breaking.run_all([cell], None, *folders) == 0
    (again,) = breaking.stored(tmp_path / "results")
    assert again["samples"] == 1, "a result is not made again"
    assert "where+conv" in capsys.readouterr().out


def test_a_run_that_fails_is_counted(tmp_path, capsys):
    cell = Cell("mnist-digit", "conv", shape=TINY)  # without data
    assert breaking.run_all([cell], tmp_path / "nowhere", tmp_path / "results", tmp_path / "work") == 1
    assert f"FAILED {cell.name}" in capsys.readouterr().err


def test_mnist_in_quadrants_with_fewer_images(tmp_path, monkeypatch):
    write_mnist(tmp_path, mnist_parts(60, 20))
    monkeypatch.setattr(breaking, "IMAGES", 40)
    (x, y), (x_test, _) = breaking.published(Cell("mnist-place", "conv"), tmp_path)
    assert x.shape == (40, 1, 32, 32)
    assert len(y) == 40
    assert len(x_test) == 20


def test_the_table_goes_by_task_and_evidence():
    def result(task, model, seed, evidence, broken):
        row = {"evidence": evidence, "accuracy": 90.0, "parameters": 1000, "seconds": 2.0}
        return {"config": {"task": task, "model": model, "seed": seed}, "row": row, "broken": broken, "samples": 100}

    found = [
        result("place", "conv", 1, -3.0, 0.0),
        result("digit", "conv", 2, -1.0, None),
        result("digit", "conv", 1, -2.0, None),
    ]
    found += [result("place", "where+conv", 1, -2.0, 0.1)]
    lines = breaking.rows(found).splitlines()[-3:]
    assert [line.split()[:3] for line in lines] == [
        ["digit", "yes", "conv"],
        ["place", "no", "where+conv"],
        ["place", "no", "conv"],
    ]
    assert lines[0].split()[3:7] == ["-150", "-200", "-100", "90.0"]
    assert lines[0].split()[7] == "?"
    assert "10.0" in lines[1]


def test_without_results_it_says_what_to_run(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"run the script without --table first"):
        breaking.stored(tmp_path)
