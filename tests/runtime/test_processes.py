"""Several processes on one machine give the numbers of one, and end together."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import autosym
import workers
from autosym.runtime import processes
from autosym.runtime.batching import Numbered

pytestmark = pytest.mark.distributed


def close(found, expected, tolerance=1e-6):
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            close(found[key], expected[key], tolerance)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            close(one, other, tolerance)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=tolerance, abs=1e-9)
    else:
        assert found == expected


@pytest.mark.parametrize("parts", [2, 4])
def test_evidence_and_its_gradient_are_those_of_one_process(parts, tmp_path):
    expected = workers.evidence()
    assert expected["sampled"]["evidence"] != pytest.approx(expected["exact"]["evidence"], rel=1e-6)
    for found in workers.run("evidence", parts, tmp_path):
        close(found, expected)


def test_wrapped_models_and_padded_samplers_count_each_sample_once(tmp_path):
    expected = workers.wrapped()
    assert expected["samples"] == 37
    for found in workers.run("wrapped", 2, tmp_path):
        close(found, expected)


@pytest.mark.parametrize("parts", [2, 4])
def test_a_fit_is_that_of_one_process_at_the_same_global_batch(parts, tmp_path):
    results = workers.run("fitted", parts, tmp_path, str(tmp_path))
    for found in results:
        close(found, workers.fitted(), 1e-5)
    assert len((tmp_path / "history.jsonl").read_text().splitlines()) == 6, "one process writes"


@pytest.mark.slow
def test_processes_share_the_runs_of_a_search(tmp_path):
    expected = workers.discovered()
    for found in workers.run("discovered", 2, tmp_path, str(tmp_path / "runs")):
        close(found, json.loads(json.dumps(expected)), 1e-12)
    outcomes = [json.loads(file.read_text()) for file in (tmp_path / "runs").glob("*/outcome.json")]
    assert len(outcomes) > 20, "each made once, by one of them"


def test_a_loader_that_is_already_divided(tmp_path):
    for found in workers.run("sharded_fit", 2, tmp_path):
        close(found, workers.sharded_fit(), 1e-3)  # of the samples of a batch others are in it


@pytest.mark.fault(24)
def test_an_error_in_one_process_of_an_evidence_pass_is_one_in_all(tmp_path):
    other, own = workers.run("faulty_evidence", 2, tmp_path)
    assert "labels run from 0 to 7" in own["label"]
    assert "not finite (NaN or Inf) in rows [0]" in own["nan"]
    for kind in ("label", "nan"):
        assert other[kind] == own[kind].replace("ValueError: ", "ValueError: in process 1 of 2: ")
    assert "process 1 was shown 42 samples, all 2 together 78" in own["extra batch"]
    assert "process 0 was shown 36 samples, all 2 together 78" in other["extra batch"]
    assert own["mended"] is other["mended"] is None, "the processes are still together"


@pytest.mark.fault(24)
def test_an_extra_batch_in_one_process_ends_a_fit_at_the_end_of_the_epoch(tmp_path):
    """Without a word the steps of one epoch would go with those of the next, or the processes wait for each other for ever."""
    first, last = (result["error"] for result in workers.run("extra_batch", 2, tmp_path))
    assert (
        "process 0 has finished its epoch, but 1 others have a batch left: give all processes the same number of batches"
        in first
    )
    assert last.startswith("Lost: another process of this run has ended")


@pytest.mark.fault(24)
def test_a_nan_in_one_process_ends_a_fit_in_all(tmp_path):
    first, last = (result["error"] for result in workers.run("one_nan", 2, tmp_path))
    assert last.startswith("ValueError: the inputs of a batch of epoch 1 are not finite (NaN or Inf) in rows [2]")
    assert first.startswith("Lost: another process of this run has ended")
    assert "see its own message above" in first


@pytest.mark.fault(24)
def test_a_process_killed_in_an_evidence_pass_ends_it_with_a_word(tmp_path):
    first, last = workers.run("killed_in_evidence", 2, tmp_path)
    assert last is None
    assert first["error"].startswith("Lost: another process of this run has ended")


@pytest.mark.fault(24)
def test_a_killed_process_ends_the_run_with_a_word_and_a_checkpoint_to_resume_from(tmp_path):
    first, last = workers.run("killed", 2, tmp_path, str(tmp_path))
    assert last is None
    assert "another process of this run has ended" in first["error"]
    assert "resume" in first["error"]
    net, x, y = workers.problem()
    fit = autosym.fit(
        net, (x, y), epochs=50, batch_size=9, augment=lambda x, _: x, checkpoint=tmp_path / "run.safetensors", resume=True
    )
    assert len(fit.history) == 50


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]


@pytest.mark.slow
def test_torchrun_on_the_command_line_gives_the_numbers_of_one_process(tmp_path):
    """Evidence steps, precisions, shares, accuracy and every predicted label; in float32 rounding soon chose another polyphase grid."""
    pytest.importorskip("sklearn")
    command = ["-m", "autosym", "run", "quadrant-digits", "--epochs", "4", "--json", "--out"]
    results, histories = [], []
    for name, start in (("two", TORCHRUN), ("one", [sys.executable])):
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run([*start, *command, tmp_path / name], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        results.append(timeless(json.loads(done.stdout)))
        histories.append([timeless(json.loads(line)) for line in (tmp_path / name / "history.jsonl").read_text().splitlines()])
    assert [line["epoch"] for line in histories[1] if "log_evidence" in line] == [1, 2, 3, 4], "precisions were learned"
    close(*histories)
    close(*results)


def timeless(found):
    """A result without what differs between any two runs: seconds, and under which circumstances it came about."""
    if not isinstance(found, dict):
        return found
    return {key: timeless(value) for key, value in found.items() if key not in ("seconds", "evidence_seconds", "provenance")}


@pytest.mark.slow
def test_accelerate(tmp_path):
    """Which wraps the model, and divides the loader so that samples repeat."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    script = [Path(workers.__file__).with_name("accelerated.py"), tmp_path / "found.json"]
    done = subprocess.run([*TORCHRUN, *script], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found.pop("processes") == 2
    close(found, workers.wrapped())


# ---- in one process


def test_work_is_shared_out_by_cost(monkeypatch):
    monkeypatch.setattr(processes, "count", lambda: 3)
    costs = [1.0, 8.0, 2.0, 5.0, 3.0, 1.0]
    owners = processes.owners(costs)
    loads = [sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(3)]
    assert sorted(loads) == [6.0, 6.0, 8.0]


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
@pytest.mark.parametrize("as_batches", [False, True])
def test_every_sample_is_in_one_part_under_its_own_number(parts, as_batches):
    x, y = torch.arange(11.0)[:, None], torch.arange(11)
    data = [(x[i : i + 4], y[i : i + 4]) for i in range(0, 11, 4)] if as_batches else (x, y)
    each = [list(Numbered(data, 2, part, parts)) for part in range(parts)]
    for part, own in enumerate(each):  # as many, up to one, whatever the batches
        assert torch.cat([places for *_, places in own]).tolist() == list(range(part, 11, parts))
    shown = [batch for own in each for batch in own]
    assert sorted(torch.cat([places for *_, places in shown]).tolist()) == list(range(11))
    for inputs, targets, places in shown:
        assert inputs[:, 0].tolist() == targets.tolist() == places.tolist()


def test_a_single_process_needs_no_group():
    assert (processes.count(), processes.rank(), processes.first()) == (1, 0, True)
    t = torch.ones(3)
    processes.add(t)
    assert t.tolist() == [1, 1, 1]
    with pytest.raises(KeyError), processes.agreeing():
        raise KeyError("as it is")
