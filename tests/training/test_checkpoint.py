"""Checkpoints are whole or absent, refuse what they are not, and a resumed run is the run."""

import errno
import json
import math
import os
import pickle
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from autosym.bayes.likelihoods import Gaussian
from autosym.bayes.priors import Prior
from autosym.nn import layers, nets
from autosym.runtime.batching import Stream
from autosym.training import checkpoint
from autosym.training.fitting import fit
from autosym.training.snapshots import Progress, Start
from autosym.training.steps import Weights


class Stop(Exception):
    pass


def network():
    torch.manual_seed(3)
    layer = layers.Relaxed(
        {"conv": layers.conv((1, 4, 4), (2, 2, 2))}, {"f-fc": layers.Factored((1, 4, 4), (2, 2, 2))}, stride=2
    )
    return nn.Sequential(layer, nn.ReLU(), layers.fc((2, 2, 2), (3,)))


def classification():
    draw = torch.Generator().manual_seed(0)
    return torch.randn(30, 1, 4, 4, generator=draw), torch.randint(3, (30,), generator=draw)


def regression():
    x, _ = classification()
    return x, x.flatten(1)[:, :3].clone()


def untimed(lines):
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def stopped_after(epoch):
    def log(line):
        if line["epoch"] == epoch + 1:  # that epoch's work is lost: its checkpoint is not yet written
            raise Stop

    return log


def jitter(x, noise):
    return x + torch.randn(x.shape, generator=noise)


CASES = {
    "adam": ("categorical", {}),
    "sgd": ("categorical", {"optimiser": "sgd", "lr": 0.05}),
    "gradient steps": ("categorical", {"step": "gradient"}),
    "map": ("categorical", {"step": "none"}),
    "noise": ("gaussian", {}),
    "student-t": ("categorical", {"nu": 4.0}),
    "augmented": ("categorical", {"augment": jitter}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("epoch", [1, 4])
def test_a_resumed_run_is_the_uninterrupted_one(case, epoch, tmp_path):
    likelihood, options = CASES[case]
    data = regression() if likelihood == "gaussian" else classification()
    options = {"epochs": 6, "batch_size": 8, "checkpoint_seconds": 0, **options}
    whole = fit(network(), data, likelihood, checkpoint=tmp_path / "whole", **options)
    with pytest.raises(Stop):
        fit(network(), data, likelihood, checkpoint=tmp_path / "parts", log=stopped_after(epoch), **options)
    history = tmp_path / "history.jsonl"
    resumed = fit(network(), data, likelihood, checkpoint=tmp_path / "parts", resume=True, history=history, **options)
    a, b = load_file(tmp_path / "whole"), load_file(tmp_path / "parts")
    assert set(a) == set(b)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert untimed(whole.history) == untimed(resumed.history)
    assert untimed(map(json.loads, history.read_text().splitlines())) == untimed(whole.history)
    assert torch.equal(whole.evidence.log_evidence, resumed.evidence.log_evidence)
    assert [line["epoch"] for line in resumed.history] == list(range(1, 7))


def test_a_resumed_run_moves_in_the_coordinates_it_began_in(tmp_path, monkeypatch):
    """Of sparse paths; eigenvectors, which another library may give other signs, are those of the file."""

    def sparse_network():
        torch.manual_seed(3)
        return nets.build("s-fc+s-conv", (1, 4, 4), 3, 2, channels=(1,), strides=(2,), hidden=2)

    options = {"epochs": 4, "batch_size": 8, "checkpoint_seconds": 0}
    whole = fit(sparse_network(), classification(), **options)
    with pytest.raises(Stop):
        fit(sparse_network(), classification(), checkpoint=tmp_path / "c", log=stopped_after(2), **options)
    ours = torch.linalg.eigh

    def with_other_signs(matrix):
        values, vectors = ours(matrix)
        return values, -vectors

    monkeypatch.setattr("autosym.linear.frames.torch.linalg.eigh", with_other_signs)
    resumed = fit(sparse_network(), classification(), checkpoint=tmp_path / "c", resume=True, **options)
    assert untimed(whole.history) == untimed(resumed.history)


@pytest.mark.parametrize("name", ["f-fc+conv", "s-conv"])
def test_a_resumed_run_keeps_the_rates_it_began_with(name, tmp_path):
    """They are in units of the weights as they were made, which those of the model that goes on need not be."""

    def made(seed):
        torch.manual_seed(seed)
        return nets.build(name, (1, 4, 4), 3, 2, channels=(1,), strides=(2,), hidden=2, start=0.1 * (1 + seed))

    options = {"epochs": 4, "batch_size": 8, "checkpoint_seconds": 0}
    whole = fit(made(3), classification(), **options)
    with pytest.raises(Stop):
        fit(made(3), classification(), checkpoint=tmp_path / "c", log=stopped_after(2), **options)
    resumed = fit(made(4), classification(), checkpoint=tmp_path / "c", resume=True, **options)
    assert untimed(whole.history) == untimed(resumed.history)
    other = fit(made(4), classification(), **options)
    assert untimed(whole.history) != untimed(other.history), "the test would be empty"


def test_all_of_a_state_comes_back(tmp_path):
    """What no run shows at once too: scales of a Student-t prior, and the draws of torch that follow."""

    def made(seed):
        torch.manual_seed(seed)
        model = nn.Linear(4, 3)
        prior = Prior(["weight", "bias"], seed, nu=4.0)
        prior.scales, prior.mixture_bound = {"weight": torch.rand(1, 3)}, -float(seed)
        weights = Weights(dict(model.named_parameters()), 10, "adam", sizes={"weight": float(seed), "bias": 0.5})
        stream = Stream((torch.randn(10, 4), torch.arange(10) % 3), 5, model, lambda y: None, seed)
        progress = Progress([{"epoch": seed}], Start(1.0, 2.0, 0.1, 0.2, -3.0), 1 / 3, seed, 0.5)
        state = checkpoint.State(model, prior, Gaussian(seed), weights, stream, {}, progress, {"more": torch.tensor(seed)})
        for epoch, log_evidence in ((0, -3.0), (4, -1.0), (8, -2.0)):
            progress.keep(state.snapshot(epoch, log_evidence))
        return state

    one, two = made(1), made(2)
    one.write(tmp_path / "c")
    drawn = torch.rand(3)
    two.read(tmp_path / "c")
    assert two.progress.state() == one.progress.state()
    assert (two.progress.lines, two.progress.recoveries, two.progress.good, two.progress.best) == ([{"epoch": 1}], 1, 8, 4)
    for name, tensor in one.progress.tensors().items():
        assert torch.equal(two.progress.tensors()[name], tensor), name
    assert torch.equal(torch.rand(3), drawn)
    assert two.prior.mixture_bound == -1
    assert torch.equal(two.prior.scales["weight"], one.prior.scales["weight"])
    assert torch.equal(two.weights.rates, one.weights.rates)
    assert float(two.likelihood.log_variance.detach()) == float(two.prior.log_precision[0].detach()) == 0
    assert two.more["more"] == 1
    for name in ("shuffle", "noise"):
        assert torch.equal(*(getattr(state.stream, name).get_state() for state in (one, two)))
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True))


def test_a_resumed_run_takes_up_the_loaders_shuffling(tmp_path):
    def loader():
        return DataLoader(TensorDataset(*classification()), 8, shuffle=True, generator=torch.Generator().manual_seed(5))

    options = {"epochs": 4, "checkpoint_seconds": 0, "evidence_data": classification()}
    whole = fit(network(), loader(), **options)
    with pytest.raises(Stop):
        fit(network(), loader(), checkpoint=tmp_path / "c", log=stopped_after(2), **options)
    resumed = fit(network(), loader(), checkpoint=tmp_path / "c", resume=True, **options)
    assert untimed(whole.history) == untimed(resumed.history)


def test_a_resumed_run_takes_up_the_noise_of_augmentation(tmp_path):
    """Batch by batch, where the data are no tensors; another state of the generator is another run."""
    options = {"epochs": 4, "batch_size": 8, "checkpoint_seconds": 0, "augment": jitter, "evidence_data": classification()}
    batches = list(zip(*(t.split(8) for t in classification()), strict=True))
    whole = fit(network(), batches, **options)
    with pytest.raises(Stop):
        fit(network(), batches, checkpoint=tmp_path / "c", log=stopped_after(2), **options)
    tensors, state = checkpoint.read(tmp_path / "c")
    resumed = fit(network(), batches, checkpoint=tmp_path / "c", resume=True, **options)
    assert untimed(whole.history) == untimed(resumed.history)
    tensors["generator/noise"] = torch.Generator().manual_seed(0).get_state()
    checkpoint.write(tmp_path / "other", tensors, state)
    other = fit(network(), batches, checkpoint=tmp_path / "other", resume=True, **options)
    assert untimed(whole.history)[:2] == untimed(other.history)[:2]
    assert untimed(whole.history)[2:] != untimed(other.history)[2:]


def test_without_resume_a_run_starts_anew(tmp_path):
    first = fit(network(), classification(), epochs=3, checkpoint=tmp_path / "c")
    again = fit(network(), classification(), epochs=3, checkpoint=tmp_path / "c")
    assert untimed(first.history) == untimed(again.history)


def test_a_run_interrupted_in_its_first_epoch_goes_on(tmp_path):
    """Also where an earlier run left a checkpoint: that one is not gone on from."""
    path, data = tmp_path / "c.safetensors", classification()

    def run(**options):
        return fit(network(), data, epochs=3, seed=5, checkpoint=path, **options)

    whole = run()

    def interrupt(x, generator):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(augment=interrupt)
    assert checkpoint.read(path)[1]["lines"] == []
    resumed = run(resume=True)
    assert [line["loss"] for line in resumed.history] == [line["loss"] for line in whole.history]


def test_other_settings_are_refused(tmp_path):
    fit(network(), classification(), epochs=2, checkpoint=tmp_path / "c")
    with pytest.raises(ValueError, match="other settings"):
        fit(network(), classification(), epochs=3, checkpoint=tmp_path / "c", resume=True)


@pytest.mark.parametrize("kind", [tuple, TensorDataset], ids=["pair", "dataset"])
def test_other_data_of_the_same_size_are_refused(tmp_path, kind):
    """In another order too: what was drawn from them so far would be drawn again."""
    x, y = classification()
    make = tuple if kind is tuple else (lambda pair: TensorDataset(*pair))
    fit(network(), make((x, y)), epochs=1, checkpoint=tmp_path / "c")
    for other in ((x.flip(-1), y), (x, (y + 1) % 3), (x.flip(0), y.flip(0))):
        with pytest.raises(ValueError, match=r"other settings, .'checksum of the data'"):
            fit(network(), make(other), epochs=1, checkpoint=tmp_path / "c", resume=True)
    fit(network(), make((x.clone(), y.clone())), epochs=1, checkpoint=tmp_path / "c", resume=True)


def written(path, version=checkpoint.VERSION, kind=checkpoint.FORMAT):
    save_file({"a": torch.ones(2)}, path, {"format": kind, "version": str(version), "state": "{}"})


def pickled(path):
    path.write_bytes(pickle.dumps({"a": 1}))


BAD = {
    "truncated": (lambda p: (written(p), p.write_bytes(p.read_bytes()[:-3])), "truncated or not a checkpoint"),
    "empty": (lambda p: p.write_bytes(b""), "truncated or not a checkpoint"),
    "noise": (lambda p: p.write_bytes(bytes(range(1, 200))), "truncated or not a checkpoint"),
    "foreign": (lambda p: written(p, kind="other"), "not an autosym checkpoint"),
    "newer": (lambda p: written(p, checkpoint.VERSION + 1), "newer than this autosym reads"),
    "older": (lambda p: written(p, checkpoint.VERSION - 1), r"by an older autosym \(version 4, this is 5\): start anew"),
    "pickle": (pickled, "holds a pickle"),
    "torch.save": (lambda p: torch.save({"a": torch.ones(2)}, p), "holds a pickle"),
}


@pytest.mark.fault(23)
@pytest.mark.parametrize("kind", BAD)
def test_other_files_are_refused_by_what_they_are(kind, tmp_path):
    make, message = BAD[kind]
    make(tmp_path / "c")
    with pytest.raises(ValueError, match=message):
        checkpoint.read(tmp_path / "c")


@pytest.mark.fault(23)
def test_a_run_does_not_resume_from_a_checkpoint_of_version_1(tmp_path):
    """As it was written: without the rates and the noise of version 2, and with the number of steps in the header."""
    fit(network(), classification(), epochs=2, checkpoint=tmp_path / "c")
    tensors, state = checkpoint.read(tmp_path / "c")
    new = ("steps/weights", "weights/rates", "generator/noise")
    old = {name: tensor for name, tensor in tensors.items() if name not in new}
    assert len(old) == len(tensors) - len(new)
    header = {"format": checkpoint.FORMAT, "version": "1", "state": json.dumps(state | {"steps": 2})}
    save_file(old, tmp_path / "c", header)
    with pytest.raises(ValueError, match="by an older autosym"):
        fit(network(), classification(), epochs=2, checkpoint=tmp_path / "c", resume=True)


@pytest.mark.fault(23)
def test_a_checkpoint_of_another_model_changes_nothing(tmp_path):
    fit(network(), classification(), epochs=2, checkpoint=tmp_path / "c")
    torch.manual_seed(0)
    other = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    before = [p.clone() for p in other.parameters()]
    with pytest.raises(ValueError, match="of another model"):
        fit(other, classification(), epochs=2, checkpoint=tmp_path / "c", resume=True)
    assert all(torch.equal(a, b) for a, b in zip(before, other.parameters(), strict=True))
    target = {"a": torch.zeros(3)}
    with pytest.raises(ValueError, match="a is"):
        checkpoint.load_into(target, {"a": torch.ones(4)}, tmp_path / "c")
    assert torch.equal(target["a"], torch.zeros(3))


@pytest.mark.fault(22)
def test_a_full_disk_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    checkpoint.write(tmp_path / "c", {"a": torch.ones(2)}, {"n": 1})

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"could not be written .*No space left"):
        checkpoint.write(tmp_path / "c", {"a": torch.zeros(2)}, {"n": 2})
    monkeypatch.undo()
    tensors, state = checkpoint.read(tmp_path / "c")
    assert state == {"n": 1}
    assert torch.equal(tensors["a"], torch.ones(2))
    assert [f.name for f in tmp_path.iterdir()] == ["c"]


def test_numbers_that_json_lacks_are_refused(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        checkpoint.write(tmp_path / "c", {}, {"a": math.nan})


WRITER = """
import sys, torch
from pathlib import Path
from autosym.training import checkpoint
n = 0
while True:
    n += 1
    checkpoint.write(Path(sys.argv[1]), {"a": torch.full((1 << 20,), float(n))}, {"n": n})
"""


@pytest.mark.fault(22)
def test_a_process_killed_while_it_writes_leaves_a_whole_checkpoint(tmp_path):
    path = tmp_path / "c"
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)])
    for _ in range(600):
        if path.exists():
            break
        time.sleep(0.1)
    time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    tensors, state = checkpoint.read(path)
    assert torch.equal(tensors["a"], torch.full((1 << 20,), float(state["n"])))


@pytest.mark.slow
@pytest.mark.fault(22)
@pytest.mark.parametrize("lines", [1, 3])
def test_a_run_killed_by_the_command_line_is_resumed(lines, tmp_path):
    pytest.importorskip("sklearn")
    command = [sys.executable, "-m", "autosym", "run", "quadrant-digits", "--epochs", "4", "--json", "--out"]
    subprocess.run([*command, str(tmp_path / "a")], check=True, stdout=subprocess.DEVNULL)
    process = subprocess.Popen([*command, str(tmp_path / "b")], stdout=subprocess.DEVNULL)
    history = tmp_path / "b" / "history.jsonl"
    while not history.exists() or len(history.read_text().splitlines()) < lines:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    subprocess.run([*command, str(tmp_path / "b"), "--resume"], check=True, stdout=subprocess.DEVNULL)
    a, b = (load_file(tmp_path / name / "checkpoint.safetensors") for name in "ab")
    assert all(torch.equal(a[name], b[name]) for name in a)
    a, b = (untimed(map(json.loads, (tmp_path / name / "history.jsonl").read_text().splitlines())) for name in "ab")
    assert a == b
