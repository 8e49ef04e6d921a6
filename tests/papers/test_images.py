"""The harness of the published tables: names, dataset variants, and results on disk."""

import json
import math
import os
import re
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import autosym
from autosym.nn import nets
from autosym.papers import datasets, images, measuring, table1, table2, table3
from autosym.papers.images import DATASETS, Run
from autosym.runtime import workers
from files import mnist_parts, write_cifar10, write_mnist
from tables import RUNS, TABLES, recomputed


@pytest.fixture
def folder(tmp_path):
    """80 and 30 images of MNIST, 80 and 30 of CIFAR-10."""
    write_mnist(tmp_path / "data" / "MNIST" / "raw", mnist_parts(80, 30))
    write_cifar10(tmp_path / "data" / "cifar-10-batches-bin", (16, 16, 16, 16, 16, 30))
    return tmp_path / "data"


# ---- names


def test_names_are_of_the_command_line_and_files_of_any_file_system():
    assert next(iter(table1.RUNS)) == "table1/digit/fc/map"
    assert {"table1/digit+quadrant/f-fc+conv/evidence", "table2/conv/map", "table2/s-fc+s-conv/omega/evidence"} < set(RUNS)
    assert "table3/rotated-cifar-10/map" in RUNS, "its model is always the same"
    for name, run in RUNS.items():
        assert run.name == name
        assert re.fullmatch(r"table[123](/[a-z0-9+-]+){2,3}", name)
        assert run.file.parent == Path(run.table)
        assert re.fullmatch(r"[A-Za-z0-9._-]+-seed0", run.file.name)
    assert str(RUNS["table1/digit+quadrant/f-fc+conv/map"].file) == "table1/digit_quadrant_f-fc_conv_map-seed0"
    assert len({str(run.file).lower() for run in RUNS.values()}) == len(RUNS), "none overwrites another, whatever the case"


def test_every_cell_is_a_run_of_a_known_dataset_and_network():
    assert [len(table.RUNS) for table in TABLES.values()] == [2 * 3 * 2, 11 * 2, 5 * 2]
    for run in RUNS.values():
        assert run.task in DATASETS
        assert run.method in measuring.METHODS
        assert run.samples is None
        with torch.device("meta"):
            nets.build(run.model, (1, 32, 32), 10, 1)


def test_a_file_is_of_one_seed():
    run = RUNS["table2/s-conv/u/evidence"]
    assert [str(replace(run, seed=seed).file) for seed in (0, 12)] == [f"table2/s-conv_u_evidence-seed{s}" for s in (0, 12)]
    assert replace(run, seed=12).name == run.name


def test_widths_are_those_of_the_parameter_counts_of_the_paper():
    """Millions of parameters, as printed there; Table 3's network has 1.1 (``nets``)."""
    printed = {"fc": 133.6, "conv": 0.3, "fc+conv": 133.9, "f-fc": 1.5, "f-fc+conv": 1.8, "s-fc": 0.8, "s-fc+s-conv": 1.0}
    for run in table2.RUNS.values():
        if run.model in printed:
            with torch.device("meta"):
                count = sum(p.numel() for p in nets.build(run.model, (3, 32, 32), 10, run.width).parameters())
            assert round(count / 1e6, 1) == printed[run.model], run.model
    assert {run.width for run in (*table1.RUNS.values(), *table2.RUNS.values())} == {10}
    assert {run.width for run in table3.RUNS.values()} == {2}


# ---- datasets


def labels(folder):
    """Labels of both parts, of MNIST and of CIFAR-10."""
    return {"mnist": [y for _, y in datasets.mnist(folder)], "cifar-10": [y for _, y in datasets.cifar10(folder)]}


def source(task):
    return "cifar-10" if "cifar" in task else "mnist"


@pytest.mark.parametrize("task", DATASETS)
def test_datasets_have_their_shapes_and_labels(task, folder):
    train, test, classes = images.tensors(Run("table3", task, "conv"), folder)
    channels = 3 if "cifar" in task else 1
    assert classes == (40 if task == "digit+quadrant" else 10)
    for (x, y), count, expected in zip((train, test), (80, 30), labels(folder)[source(task)], strict=True):
        assert x.shape == (count, channels, 32, 32)
        assert x.dtype == torch.float32
        assert y.dtype == torch.int64
        assert torch.equal(y % 10, expected)
        assert int(y.max()) < classes
        assert x.isfinite().all()
    assert (int(train[1].max()) >= 10) is (task == "digit+quadrant")


NORMAL = {"mnist": datasets.MNIST, "cifar-10": datasets.CIFAR10}
FORMS = {
    "digit": lambda x, seed: datasets.quadrants(x, seed)[0],
    "digit+quadrant": lambda x, seed: datasets.quadrants(x, seed)[0],
    "mnist": lambda x, seed: datasets.resized(x),
    "translated-mnist": lambda x, seed: datasets.translated(datasets.resized(x), seed),
    "rotated-mnist": lambda x, seed: datasets.rotated(datasets.resized(x), seed),
    "cifar-10": lambda x, seed: x,
    "rotated-cifar-10": lambda x, seed: datasets.rotated(x, seed),
}


@pytest.mark.parametrize("task", DATASETS)
@pytest.mark.parametrize("seed", [0, 3])
def test_datasets_are_the_images_transformed_by_draws_of_their_own_and_normalised(task, seed, folder):
    read = datasets.cifar10 if "cifar" in task else datasets.mnist
    train, test, _ = images.tensors(Run("table3", task, "conv", seed=seed), folder)
    for part, ((x, _), (pixels, _)) in enumerate(zip((train, test), read(folder), strict=True)):
        expected = FORMS[task](datasets.as_floats(pixels), 2 * seed + part)
        torch.testing.assert_close(x, datasets.normalised(expected, *NORMAL[source(task)]), rtol=0, atol=1e-5)


def test_quadrants_are_where_the_labels_say(folder):
    train, test, _ = images.tensors(Run("table1", "digit+quadrant", "conv"), folder)
    same = images.tensors(Run("table1", "digit", "conv"), folder)
    for (x, y), (plain, _) in zip((train, test), same[:2], strict=True):
        assert torch.equal(x, plain), "both tasks have the same images"
        ink = (x[:, 0] - x.min()).unflatten(1, (2, 16)).unflatten(3, (2, 16)).sum((2, 4)).flatten(1)
        assert torch.equal(ink.argmax(1), y // 10)
        assert (y // 10).unique().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("task", DATASETS)
def test_random_datasets_are_of_a_seed(task, folder):
    first, again, other = (images.tensors(Run("table3", task, "conv", seed=seed), folder) for seed in (1, 1, 2))
    assert torch.equal(first[0][0], again[0][0])
    assert torch.equal(first[0][0], other[0][0]) is (task in ("mnist", "cifar-10"))


# ---- one run

SMALL = {"epochs": 1, "width": 1}
CELLS = [
    Run("table1", "digit+quadrant", "f-fc+conv", **SMALL),
    Run("table1", "digit", "conv", "map", seed=3, **SMALL),
    Run("table2", "cifar-10", "s-conv", "map", prior="u", **SMALL),
    Run("table2", "cifar-10", "s-fc+s-conv", prior="omega", **SMALL),
    Run("table3", "translated-mnist", table3.MODEL, **SMALL),
]
IN_CI = [pytest.param(run, marks=pytest.mark.slow) for run in CELLS[3:]]


@pytest.mark.parametrize("run", CELLS[:3] + IN_CI, ids=lambda run: run.name)
def test_a_run_keeps_its_result_and_the_labels_from_which_its_accuracy_follows(run, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOSYM_COMMIT", "abc123")
    result = images.execute(run, data_dir=folder, results=tmp_path / "results", out=tmp_path / "out")
    kept = tmp_path / "results" / run.file
    assert sorted(path.name for path in kept.parent.iterdir()) == [f"{kept.name}.json", f"{kept.name}.npy"]
    assert json.dumps(json.loads(Path(f"{kept}.json").read_text())) == json.dumps(result)
    assert recomputed(Path(f"{kept}.json"), images.tensors(run, folder)[1][1]) == pytest.approx(result["row"]["accuracy"])
    assert Run(**result["config"]) == run
    assert not {"correct", "predicted"} & set(result), "which the other file says"
    row = result["row"]
    assert (row["task"], row["model"], row["method"]) == (run.task, run.model, run.method)
    assert all(math.isfinite(row[key]) for key in ("nll", "evidence", "calibration_error", "standard_error", "seconds"))
    names = {path["path"] for path in result["symmetry"]}
    assert names == set(run.model.split("+"))
    parts = {part.rsplit(".", 1)[-1] for path in result["symmetry"] for part in path["precision"]}
    assert ("omega" in parts) is (run.prior == "omega"), "a prior on lengthscales"
    assert result["schedule"]["step"] == measuring.METHODS[run.method]
    assert {key: result["schedule"][key] for key in ("epochs", "batch_size", "lr", "every")} == {
        key: getattr(run, key) for key in ("epochs", "batch_size", "lr", "every")
    }
    assert (result["provenance"]["commit"], result["provenance"]["autosym"]) == ("abc123", autosym.__version__)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"history.jsonl", "checkpoint.safetensors", "report.json"}


@pytest.mark.parametrize("method", ["map", "evidence"])
def test_a_result_is_strict_json_at_any_number_of_epochs(method, folder, tmp_path):
    """NaN is no JSON; where every epoch has an evidence step there is no other to compare its time with."""

    def refuse(constant):
        raise ValueError(f"{constant} is no JSON")

    run = Run("table1", "digit", "conv", method, **SMALL)
    images.execute(run, data_dir=folder, results=tmp_path)
    json.loads((tmp_path / f"{run.file}.json").read_text(), parse_constant=refuse)


def test_a_run_trains_on_the_first_samples_and_is_tested_on_all(folder, tmp_path, monkeypatch):
    seen, real = [], images.train_and_measure
    monkeypatch.setattr(
        images, "train_and_measure", lambda build, *rest: seen.append((*rest[:2], rest[-1])) or real(build, *rest)
    )
    for task in ("mnist", "cifar-10"):
        for samples in (64, None):
            run = replace(CELLS[1], task=task, samples=samples)
            images.execute(run, data_dir=folder, results=tmp_path)
            (train, test, augment), (whole, whole_test, _) = seen[-1], images.tensors(run, folder)
            assert len(train[0]) == len(train[1]) == (samples or 80)
            assert torch.equal(train[0], whole[0][: samples or 80])
            assert torch.equal(train[1], whole[1][: samples or 80])
            assert torch.equal(test[0], whole_test[0])
            assert augment is (datasets.flip_and_crop if task == "cifar-10" else None)


@pytest.mark.parametrize(("start", "ratio"), [(1.0, 1.0), (0.1, 0.1)])
def test_a_run_builds_the_network_of_its_start(start, ratio, folder, tmp_path, monkeypatch):
    class Built(Exception):
        pass

    def stop(build, *rest):
        raise Built(build)

    monkeypatch.setattr(images, "train_and_measure", stop)
    weights = []
    for run in (
        Run("table3", "mnist", "conv+gconv:c4", width=1, start=start),
        Run("table3", "mnist", "conv+gconv:c4", width=1),
    ):
        with pytest.raises(Built) as caught:
            images.execute(run, data_dir=folder, results=tmp_path)
        torch.manual_seed(0)
        block = caught.value.args[0]().requires_grad_(False).blocks[0]
        weights.append(block["conv"].linear.weight.norm() / block["gconv:c4"].linear.weight.norm())
    assert float(weights[0] / weights[1]) == pytest.approx(ratio, rel=1e-5), (
        "by default paths start alike, as in Tables 1 and 2"
    )


def test_a_run_repeats_and_another_seed_is_another(folder, tmp_path):
    results = [
        images.execute(replace(CELLS[1], seed=seed), data_dir=folder, results=tmp_path / str(number))
        for number, seed in enumerate((0, 0, 1))
    ]
    nlls = [result["row"]["nll"] for result in results]
    assert nlls[0] == nlls[1] != nlls[2]
    assert [file.name for file in sorted((tmp_path / "2" / "table1").iterdir())] == [
        f"digit_conv_map-seed1.{suffix}" for suffix in ("json", "npy")
    ]


@pytest.mark.parametrize(
    ("evidence", "times", "expected"),
    [
        ([False, True, False, True], [1.0, 4.0, 1.0, 6.0], 8.0),
        ([False, False], [1.0, 2.0], 0.0),
        ([False, True, False, False], [5.0, 3.0, 1.0, 1.0], 2.0),  # the median: the first epoch warms up
    ],
    ids=["two steps", "none", "a slow start"],
)
def test_the_time_of_evidence_steps_is_what_their_epochs_take_beyond_the_others(evidence, times, expected):
    seconds = np.cumsum(times)
    lines = [{"seconds": s, **({"log_evidence": 0.0} if e else {})} for s, e in zip(seconds, evidence, strict=True)]
    assert measuring._evidence_seconds(lines) == pytest.approx(expected)


def test_seconds_of_a_resumed_run_are_those_of_all_its_parts(folder, tmp_path, monkeypatch):
    """Of one that was stopped in its third epoch, after a second of a thousand seconds; and again, when nothing is left to train."""
    fit, clock, ahead = measuring.fit, time.perf_counter, [0.0]

    def stopped(*arguments, log, **options):
        def logged(line):
            ahead[0] = 1000.0
            if line["epoch"] == 3:
                raise KeyboardInterrupt

        return fit(*arguments, log=logged, **options | {"checkpoint_seconds": 0.0})

    def execute(resume):
        run = Run("table1", "digit", "conv", "map", epochs=3, width=1)
        return images.execute(run, data_dir=folder, results=tmp_path, out=tmp_path / "out", resume=resume)

    monkeypatch.setattr(time, "perf_counter", lambda: clock() + ahead[0])
    monkeypatch.setattr(measuring, "fit", stopped)
    with pytest.raises(KeyboardInterrupt):
        execute(resume=False)
    monkeypatch.setattr(measuring, "fit", fit)
    seconds = [execute(resume=True)["row"]["seconds"] for _ in range(2)]
    assert min(seconds) > 1000


def test_a_run_on_a_part_of_the_data_is_no_cell(folder, tmp_path):
    """It has a file of its own, and does not enter the table."""
    run = replace(CELLS[1], **SMALL, samples=16)
    images.execute(run, data_dir=folder, results=tmp_path)
    assert "samples16" in run.file.name
    assert (tmp_path / run.file.parent / f"{run.file.name}.json").exists()
    assert all(row["accuracy"] is None for row in images.rows("table1", table1.RUNS, table1.PAPER, tmp_path))


def test_a_shorter_run_does_not_replace_a_longer_one(tmp_path):
    long = {"config": {"epochs": 80}, "correct": [1, 0], "predicted": [3, 4]}
    images.keep(dict(long), tmp_path / "cell")
    with pytest.warns(UserWarning, match=r"cell\.json is of a longer run, and is not replaced"):
        images.keep({"config": {"epochs": 2}, "correct": [1, 1], "predicted": [0, 0]}, tmp_path / "cell")
    assert json.loads((tmp_path / "cell.json").read_text())["config"]["epochs"] == 80
    assert np.load(tmp_path / "cell.npy").tolist() == [3, 4]
    images.keep({"config": {"epochs": 90}, "correct": [1, 1], "predicted": [5, 5]}, tmp_path / "cell")
    assert np.load(tmp_path / "cell.npy").tolist() == [5, 5]


def _write_or_die(name: str, folder: Path) -> None:
    if name == "killed":
        os._exit(9)
    (folder / name).write_text("done")


@pytest.mark.usefixtures("forked")
def test_a_killed_process_does_not_end_the_others(tmp_path):
    with pytest.raises(ValueError, match="1 of 4 runs failed: killed"):
        workers.at_a_time(_write_or_die, [(name, tmp_path) for name in ("a", "killed", "b", "c")], 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]
