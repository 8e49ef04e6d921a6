"""autosym demo, and the experiment it shows."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("tyro")
pytest.importorskip("rich")
pytest.importorskip("sklearn")

import printed
from autosym.papers import measuring, quadrant_answers, quadrant_digits
from autosym.papers.quadrant_digits import DEMO, LEARNED, METHODS, MODELS, TASKS, Run
from commands import check_row, check_symmetry, shown

ROOT = Path(__file__).parents[2]


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
    out, err = shown(capsys, "demo", "--fits", "--epochs", "1", "--out", tmp_path, "--json")
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
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    text, progress = shown(capsys, "demo", "--fits", "--epochs", "1", "--out", tmp_path / "again")
    assert f"{len(DEMO)}/{len(DEMO)}" in progress
    assert "demo.png" in text


@pytest.mark.slow
def test_demo_in_processes(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    out, _ = shown(capsys, "demo", "--fits", "--epochs", "1", "--jobs", "2", "--out", tmp_path, "--json")
    check_demo(json.loads(out), tmp_path)


@pytest.mark.slow
def test_demo_of_discover(capsys, tmp_path):
    text = shown(capsys, "demo", "--epochs", "2", "--out", tmp_path).out
    found = json.loads((tmp_path / "result.json").read_text())
    assert [result["task"] for result in found["answers"]] == ["digit", "digit+quadrant"]
    assert [result["truth"] for result in found["answers"]] == ["yes", "no"]
    assert "Digit and quadrant (shifts are a symmetry: no)" in text
    assert (tmp_path / "digit" / "answer.json").exists()


@pytest.mark.slow
def test_the_demo_prints_what_is_kept_of_it(capsys, tmp_path):
    """benchmarks/results/demo.json, from which README.md and docs/discover.md show it; numbers may differ between machines."""
    kept = json.loads((ROOT / "benchmarks" / "results" / "demo.json").read_text())
    quadrant_answers.show(kept)
    shown_before = capsys.readouterr().out
    assert printed.alike(f"{shown_before}\n...", shown(capsys, "demo", "--out", tmp_path).out)


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


@pytest.mark.parametrize(("lost", "within"), [(3, True), (5, False)])
def test_two_standard_errors_are_the_measure(lost, within):
    """Of 3 images of 100, 1.7 standard errors, and of 5, 2.3 of them."""
    results = [cell("digit", *LEARNED, [0] * lost + [1] * (100 - lost)), cell("digit", "conv", "map", [1] * 100)]
    (found,) = quadrant_digits.summarise(results)["comparison"]
    assert 1 < -found["difference"] / found["standard_error"] < 3
    assert found["within_two_standard_errors_or_above"] is within


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


def test_images_do_not_depend_on_the_number_of_threads():
    """Nor do they differ by a last bit: sixty epochs make 1e-12 visible."""
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(quadrant_digits.tensors(Run())[0][0])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


def test_a_result_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "result.json"
    measuring.write({"a": 1}, path)
    with pytest.raises(TypeError):
        measuring.write({"a": object()}, path)
    assert json.loads(path.read_text()) == {"a": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["result.json"]


@pytest.mark.slow
def test_an_interrupted_demo_ends_with_its_networks(tmp_path):
    """At once, and not after all that wait: the processes it started are gone, too."""
    command = [sys.executable, "-m", "autosym", "demo", "--fits", "--out", str(tmp_path), "--jobs", "2"]
    restored = partial(signal.signal, signal.SIGINT, signal.default_int_handler)  # a test run in the background ignores it
    screen, terminal = os.openpty()
    with subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=terminal, preexec_fn=restored
    ) as demo:
        assert os.read(screen, 8) == b"Training"
        time.sleep(5)
        os.killpg(demo.pid, signal.SIGINT)
        assert demo.wait(60) == 130
    for _ in range(100):
        try:
            os.killpg(demo.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail("processes of the demo are left")
