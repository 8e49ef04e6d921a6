"""Snapshots are copies in host memory, and are put back into the tensors of the run."""

import copy

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import autosym
from autosym.bayes.priors import Prior
from autosym.training import guarding
from autosym.training.fitting import prepare
from autosym.training.schedule import Schedule
from autosym.training.snapshots import Snapshot
from models import OPTIMISERS, images, small

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_a_snapshot_is_put_back_in_place(optimiser):
    """Into the same memory, which a recorded CUDA graph reads: parameters, precisions, noise and the optimiser's state."""
    run = prepare(small(), images(), "categorical", Schedule(epochs=5, optimiser=optimiser), nu=4.0)
    x, y = (part[:8] for part in images())
    run.weights.lr.fill_(0.01)
    run.step(x, y)
    run.prior.set_scales(run.prior.names[0], torch.rand(1, 2), 3)
    scales = copy.deepcopy(run.prior.scales)
    snapshot, tensors = run.state.snapshot(1, -2.0), run.state._changing()
    assert {part.split("/")[0] for part in tensors} >= {"model", "prior", "first", "steps"}
    places = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    assert not set(places.values()) & {tensor.data_ptr() for tensor in snapshot.tensors.values()}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor.data.add_(1)
    run.prior.scales = {}
    run.state.put_back(snapshot)
    after = run.state._changing()
    assert {name: tensor.data_ptr() for name, tensor in after.items()} == places
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())
    assert run.prior.scales.keys() == scales.keys()
    assert all(torch.equal(run.prior.scales[name], tensor) for name, tensor in scales.items())


def test_a_snapshot_of_a_model_on_a_gpu_is_in_host_memory():
    """By tensors without data, which need no GPU."""
    with FakeTensorMode():
        prior = Prior(["weight"])
        prior.scales = {"weight": torch.empty(1, 3, device="cuda")}
        snapshot = Snapshot.of({"model/weight": torch.empty(3, 4, device="cuda")}, prior, 1, -2.0, 0.5)
        assert [tensor.device.type for tensor in snapshot.tensors.values()] == ["cpu", "cpu"]
        prior.scales = {}
        snapshot.put_back({}, prior, torch.device("cuda:0"))
        assert prior.scales["weight"].device.type == "cuda"


@gpu
@pytest.mark.parametrize("nu", [float("inf"), 4.0])
def test_a_recovered_run_on_a_gpu_goes_on_with_its_recorded_steps(nu, monkeypatch, tmp_path):
    """It is the run whose steps are not recorded, and the run that is resumed from a checkpoint, bit for bit."""
    real = guarding.lost

    def lost(run, loss):
        assert all(t.device.type == "cpu" for s in run.progress.snapshots.values() for t in s.tensors.values())
        return "it was told so" if len(run.progress.lines) == 5 else real(run, loss)

    class Stop(Exception):
        pass

    def stopping(line):
        if line["epoch"] == 5:
            raise Stop

    def fit(**options):
        torch.manual_seed(0)
        fixed = {"epochs": 9, "burn_in": 1, "every": 1, "batch_size": 8, "nu": nu, "lr": 0.01, "deterministic": True}
        x, y = images()
        return autosym.fit(small().cuda(), (x.cuda(), y.cuda()), checkpoint_seconds=0, **fixed, **options)

    monkeypatch.setattr("autosym.training.fitting.lost", lost)
    recorded, eager = fit(), fit(capture=False)
    with pytest.raises(Stop):
        fit(checkpoint=tmp_path / "c", log=stopping)
    resumed = fit(checkpoint=tmp_path / "c", resume=True)
    assert recorded.recoveries == 1
    for other in (eager, resumed):
        assert (other.recoveries, other.epoch) == (recorded.recoveries, recorded.epoch)
        assert all(torch.equal(a, b) for a, b in zip(recorded.model.parameters(), other.model.parameters(), strict=True))
