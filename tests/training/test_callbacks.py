"""Lines of a history as scalars of TensorBoard."""

import json
import sys

import pytest
import torch

import autosym
from autosym.training import callbacks
from models import draw, images, mlp, small


def test_scalars_are_per_sample_and_leave_out_what_is_not_known():
    line = {"epoch": 2, "loss": 0.5, "log_evidence": -30.0, "log_likelihood": -20.0, "occam": -10.0, "seconds": 1.0}
    line |= {"precision": {"a": 2.0}, "effective_parameters": {"a": 3.0}, "free_share": {"l": None, "m": 0.25}}
    assert callbacks.scalars(line, 10) == {
        "loss": 0.5,
        "log_evidence_per_sample": -3.0,
        "log_likelihood_per_sample": -2.0,
        "occam_per_sample": -1.0,
        "precision/a": 2.0,
        "effective_parameters/a": 3.0,
        "free_share/m": 0.25,
    }
    assert callbacks.scalars({"epoch": 1, "loss": 0.5, "seconds": 1.0}, 10) == {"loss": 0.5}


def events(folder):
    """By tag, the (step, value) pairs in a folder of event files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_tensorboard_reads_what_fit_wrote(tmp_path):
    pytest.importorskip("tensorboard")
    fit = autosym.fit(small(), images("gaussian"), "gaussian", epochs=4, burn_in=1, every=1, tensorboard=tmp_path / "events")
    read = events(tmp_path / "events")
    assert [step for step, _ in read["loss"]] == [1, 2, 3, 4]
    steps = [line for line in fit.history if "log_evidence" in line]
    expected = {
        tag: [(line["epoch"], callbacks.scalars(line, 24)[tag]) for line in steps] for tag in callbacks.scalars(steps[-1], 24)
    }
    assert {f"precision/{name}" for name in fit.prior.names} <= set(read)
    for tag, pairs in expected.items():
        if tag != "loss":
            assert read[tag] == [(step, pytest.approx(value, rel=1e-5)) for step, value in pairs]


def test_a_resumed_run_goes_on_in_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    data = draw("categorical", 12)

    def stop(line):
        if line["epoch"] == 3:
            raise KeyboardInterrupt

    options = {"epochs": 5, "checkpoint": tmp_path / "c", "checkpoint_seconds": 0.0, "tensorboard": tmp_path / "events"}
    with pytest.raises(KeyboardInterrupt):
        autosym.fit(mlp(5, 4, 3), data, log=stop, **options)
    torch.manual_seed(0)
    fit = autosym.fit(mlp(5, 4, 3), data, resume=True, **options)
    assert events(tmp_path / "events")["loss"] == [(line["epoch"], pytest.approx(line["loss"])) for line in fit.history]


def test_without_tensorboard_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match="pip install tensorboard"):
        autosym.fit(mlp(5, 4, 3), draw("categorical", 12), epochs=1, tensorboard=tmp_path)


def test_callbacks_are_told_every_line_after_those_by_name(tmp_path):
    model, told = mlp(5, 3), []
    data = draw("categorical", 24)
    options = {"history": tmp_path / "h.jsonl", "log": lambda line: told.append(("log", line["epoch"]))}
    first, second = (lambda line, name=name: told.append((name, line["epoch"])) for name in ("first", "second"))
    fit = autosym.fit(model, data, epochs=2, burn_in=0, callbacks=[first, second], **options)
    assert told == [(name, epoch) for epoch in (1, 2) for name in ("log", "first", "second")]
    assert [json.loads(line) for line in (tmp_path / "h.jsonl").read_text().splitlines()] == fit.history


def test_a_callback_that_raises_ends_the_run():
    def stop(line):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        autosym.fit(mlp(5, 3), draw("categorical", 24), epochs=2, callbacks=[stop])
