"""The published experiments in miniature, and the commands about dynamics."""

import json
import math
from dataclasses import asdict, replace
from functools import partial

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from autosym.cli import commands, own_trajectories
from autosym.noether import Search
from autosym.noether.dynamics import euler, symmetrised, velocity
from autosym.noether.hamiltonian import network, slope
from autosym.noether.systems import oscillators
from autosym.papers import noether
from autosym.runtime.graphs import Captured

SMALL = {
    "epochs": 4,
    "taus": 6,
    "weights": 2,
    "width": 8,
    "substeps": 2,
    "trajectories": 4,
    "steps": 3,
    "batch": 2,
    "warmup": 1,
    "starts": 1,
    "dt": 0.1,
}


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """Errors are measured on two of the hundred trajectories that are held out."""
    data, held_out = noether.data, ("test", "moved", "wider")
    monkeypatch.setattr(noether, "data", lambda *run: {key: t[:2] if key in held_out else t for key, t in data(*run).items()})


def small(name, **changes):
    return replace(noether.RUNS[f"noether/{name}"], **(SMALL | changes))


@pytest.mark.parametrize(
    "name", ["oscillator/hnn", "oscillator/learned", "three-oscillators/oracle", "three-bodies/oracle", "three-bodies/learned"]
)
def test_every_kind_of_run_has_a_result(name, tmp_path):
    drifts = (
        {"trajectories": 40, "steps": 4} if name == "three-bodies/learned" else {}
    )  # it starts at what changes least along them
    run = small(name, integrator="midpoint" if "learned" in name else "euler", **drifts)
    result = noether.execute(run, results=tmp_path)
    row = result["row"]
    assert all(
        math.isfinite(row[key]) for key in ("negative_elbo", "kl", "nll", "train_mse", "test_mse", "moved_mse", "wider_mse")
    )
    assert (row["parallelness"] is not None) == name.endswith("learned")
    held = json.loads((tmp_path / f"{run.file}.json").read_text())
    assert held["config"] == asdict(run)
    assert {"torch", "commit", "device"} <= held["provenance"].keys()


def test_the_oracles_have_their_groups():
    counts = {
        name: len(noether.quantities_of(noether.RUNS[f"noether/{name}/oracle"], noether.SYSTEMS[name]).b)
        for name in noether.SYSTEMS
    }
    assert counts == {"oscillator": 1, "three-oscillators": 9, "three-bodies": 3}


@pytest.mark.parametrize("size", [1.0, 6.0])
def test_quantities_that_are_the_true_ones_are_found(size):
    """All of them, in the units they are learned in; of one taken out, nothing."""
    learner = noether.Learner(small("three-bodies/learned", size=size), "cpu")
    true = noether.SYSTEMS["three-bodies"].conserved
    with torch.no_grad():
        learner.conserved.raw.zero_()
        learner.conserved.shift.zero_()
        for k, known in enumerate(true):
            learner.conserved.raw[k], learner.conserved.shift[k] = known.A, known.b / size
        found = noether._symmetry(learner)
        assert min(found["found_in_as_many"].values()) == pytest.approx(1, abs=1e-5)
        assert found["least_parallelness"] == pytest.approx(1, abs=1e-5)
        learner.conserved.shift[0] = 0
        assert noether._symmetry(learner)["found_in_as_many"]["momentum x"] < 1e-5


def test_the_batched_prediction_is_the_plain_one():
    run = small("oscillator/learned", integrator="euler")
    learner = noether.Learner(run, "cpu")
    x, tau = torch.randn(5, 2), torch.randn(6, 1)
    weights = learner.posterior.sample(2)
    net = network(2, run.layers, run.width)
    predicted = noether.predict(run, weights, learner.conserved.affine(tau), x)
    for i in range(2):
        w = {name: t[i] for name, t in weights.items()}
        F = lambda y: torch.func.functional_call(net, w, (y.reshape(-1, 2),)).reshape(y.shape[:-1])  # noqa: B023, E731
        plain = euler(lambda y: velocity(symmetrised(F, learner.conserved, tau), y), x, run.dt, run.substeps)  # noqa: B023
        assert_close(predicted[i], plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layers", [3, 4])
def test_the_gradient_by_products_is_that_of_autograd_and_so_is_its_own(layers):
    net = network(4, layers, 9).double()
    weights = {name: (p + 0.3 * torch.randn(2, *p.shape)).double() for name, p in net.named_parameters()}
    y, out = torch.randn(2, 7, 4, dtype=torch.float64, requires_grad=True), torch.randn(2, 7, 4, dtype=torch.float64)

    def plain(w, y):
        return torch.func.grad(lambda z: torch.func.functional_call(net, w, (z,)).sum())(y)

    held = {name: t.requires_grad_() for name, t in weights.items()}
    found, expected = slope(held, y), torch.func.vmap(plain)(held, y)
    assert_close(found, expected)
    first, second = (torch.autograd.grad((t * out).sum(), [y, *held.values()]) for t in (found, expected))
    for one, other in zip(first, second, strict=True):
        assert_close(one, other)


def test_the_bound_is_the_density_of_all_numbers_less_the_divergence():
    """Per training point: 4 trajectories of 3 steps, of which any part estimates it."""
    run = small("three-oscillators/hnn")
    learner, x, y = noether.Learner(run, "cpu"), torch.randn(5, 6), torch.randn(5, 6)
    torch.manual_seed(1)
    found, error = learner.negative_elbo(x, y, 2, None)
    torch.manual_seed(1)
    predicted = noether.predict(run, learner.posterior.sample(2), None, x)
    density = torch.distributions.Normal(predicted, math.sqrt(run.variance)).log_prob(y).sum(-1).mean()
    assert_close(found, learner.posterior.kl().sum() / 12 - density.double())
    assert_close(error, (predicted - y).square().mean())


def test_errors_are_those_of_the_mean_prediction_not_of_the_mean_weights(monkeypatch):
    """Sets of weights that err by +1 and -1 by turns err by nothing together."""

    def erring(run, weights, moves, x):
        sets = len(next(iter(weights.values())))
        return x + (-1.0) ** torch.arange(sets)[:, None, None]

    run = small("oscillator/hnn")
    learner, held = noether.Learner(run, "cpu"), noether.data(run, "cpu")
    monkeypatch.setattr(noether, "predict", erring)
    x, y = (held["test"][:, part].flatten(0, 1) for part in (slice(None, -1), slice(1, None)))
    assert noether.measure(learner, held)["test_mse"] == pytest.approx(float((x - y).square().mean()), rel=1e-5)


def test_every_group_of_the_optimiser_moves():
    learner = noether.Learner(small("oscillator/learned", warmup=0), "cpu")
    held = noether.data(learner.run, "cpu")
    before = [[p.detach().clone() for p in group["params"]] for group in learner.optimiser.param_groups]
    learner.epoch(0, held)
    assert len(before) == 3, "the network, A and b"
    for group, old in zip(learner.optimiser.param_groups, before, strict=True):
        assert all(not torch.equal(p, q) for p, q in zip(group["params"], old, strict=True) if p.numel() > 1)


def test_momenta_are_learned_before_the_rest():
    learner = noether.Learner(small("oscillator/learned", warmup=0, momenta=1), "cpu")
    held = noether.data(learner.run, "cpu")
    for epoch in range(2):
        before = [t.detach().clone() for t in (learner.conserved.raw, learner.conserved.shift)]
        learner.epoch(epoch, held)
        moved = [
            not torch.equal(t, old) for t, old in zip((learner.conserved.raw, learner.conserved.shift), before, strict=True)
        ]
        assert moved == [epoch == 1, True], "A only after the first epoch"


def test_a_run_begins_at_what_changes_least_along_its_training_data(monkeypatch, tmp_path):
    """Seven of ten quantities at full size, in units of the states; nothing is trained."""
    kept = {"trajectories": 40, "steps": 20, "dt": 0.5, "epochs": 0, "begin": "least-drift", "start": 2.9, "size": 2.5}
    monkeypatch.setattr(noether, "measure", lambda learner, held: {"negative_elbo": 0.0, **noether._symmetry(learner)})
    row = noether.execute(small("three-bodies/learned", **kept), results=tmp_path)["row"]
    assert row["singular_values"][:7] == pytest.approx([2.9] * 7, rel=1e-4)
    assert row["singular_values"][7:] == pytest.approx([2.9e-3] * 3, rel=1e-4)
    assert min(row["found"].values()) > 0.9
    with pytest.raises(ValueError, match="begin at 'zero'"):
        noether.execute(small("three-bodies/learned", begin="zero"), results=tmp_path)


def test_a_step_reads_and_writes_tensors_that_stay_where_they_are():
    learner = noether.Learner(small("three-oscillators/learned", warmup=0), "cpu")
    held = noether.data(learner.run, "cpu")
    learner.epoch(0, held)
    kept = {name: t.data_ptr() for name, t in noether._state(learner).items()}
    rates = [group["lr"].data_ptr() for group in learner.optimiser.param_groups]
    learner.epoch(1, held)
    assert {name: t.data_ptr() for name, t in noether._state(learner).items()} == kept
    assert [group["lr"].data_ptr() for group in learner.optimiser.param_groups] == rates
    assert learner.take_loss(2) != 0
    assert learner.loss == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_steps_are_replayed_and_do_what_they_do_without():
    learners = [noether.Learner(small("oscillator/learned", warmup=0, lr=1e-4), "cuda") for _ in range(2)]
    learners[1].load_state_dict(learners[0].state_dict())
    learners[1].steps = {symmetric: Captured(partial(learners[1].step, symmetric), False) for symmetric in (False, True)}
    held = noether.data(learners[0].run, "cuda")
    for learner in learners:
        for epoch in range(4):
            torch.manual_seed(epoch)
            learner.epoch(epoch, held)
    assert learners[0].steps[True].graphs
    assert not learners[1].steps[True].graphs
    for one, other in zip(learners[0].parameters(), learners[1].parameters(), strict=True):
        assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_of_several_starts_the_best_bound_is_kept_and_each_goes_on(tmp_path):
    run = small("oscillator/learned", starts=2)
    row = noether.execute(run, out=tmp_path / "out", results=tmp_path)["row"]
    assert row["negative_elbo"] == min(row["starts"])
    assert len(set(row["starts"])) == 2
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["start0", "start1"]
    again = noether.execute(run, out=tmp_path / "out", resume=True, results=tmp_path)["row"]
    assert again["singular_values"] == row["singular_values"]


def test_a_run_that_was_stopped_goes_on_as_if_it_had_not(tmp_path, monkeypatch):
    run = small("oscillator/learned")
    whole = noether.execute(run, results=tmp_path)["row"]
    epoch = noether.Learner.epoch

    def stops(self, number, held):
        noether._save(self, tmp_path / "out", number, 0.0)
        if number == 2:
            raise KeyboardInterrupt
        return epoch(self, number, held)

    monkeypatch.setattr(noether.Learner, "epoch", stops)
    with pytest.raises(KeyboardInterrupt):
        noether.execute(run, out=tmp_path / "out", results=tmp_path)
    monkeypatch.setattr(noether.Learner, "epoch", epoch)
    again = noether.execute(run, out=tmp_path / "out", resume=True, results=tmp_path)["row"]
    assert again["test_mse"] == whole["test_mse"]
    assert again["singular_values"] == whole["singular_values"]
    with pytest.raises(ValueError, match="other settings"):
        noether.execute(replace(run, lr=0.1), out=tmp_path / "out", resume=True, results=tmp_path)


def test_the_table_has_the_papers_numbers_and_says_what_is_missing(tmp_path, capsys):
    rows = noether.rows(tmp_path)
    assert len(rows) == 9
    assert all(row["negative_elbo"] is None for row in rows)
    assert next(row for row in rows if row["name"] == "noether/oscillator/learned")["paper_negative_elbo"] == 3302.1
    noether.execute(small("oscillator/hnn"), results=tmp_path)
    assert noether.rows(tmp_path)[0]["negative_elbo"] is None, "a run with other settings is no cell"
    held = {"row": {"negative_elbo": 3310.0}, "config": {"epochs": 5000}}
    (tmp_path / "noether" / "oscillator_hnn-seed0.json").write_text(json.dumps(held))
    assert noether.rows(tmp_path)[0]["negative_elbo"] == 3310.0
    assert commands.main(["table", "noether", "--results", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == noether.rows(tmp_path)
    assert commands.main(["table", "noether", "--results", str(tmp_path)]) == 0
    assert "3310" in capsys.readouterr().out
    assert commands.main(["table", "noether", "--results", str(tmp_path), "--figure", str(tmp_path / "a.png")]) == 1
    assert "the table noether has no figure" in capsys.readouterr().err


# ---- commands


def test_the_integrator_is_chosen_on_the_command_line(tmp_path, capsys):
    name = ["run", "noether/oscillator/hnn", "--epochs", "2", "--out", str(tmp_path), "--results", str(tmp_path / "results")]
    assert commands.main([*name, "--integrator", "euler", "--substeps", "3", "--json"]) == 0
    config = json.loads(capsys.readouterr().out)["config"]
    assert (config["integrator"], config["substeps"], config["epochs"]) == ("euler", 3, 2)
    assert commands.main([*name, "--force"]) == 0
    *_, said, written = capsys.readouterr().out.splitlines()
    assert said.startswith("noether/oscillator/hnn: -ELBO/N ")
    assert (
        written == f"Written: {tmp_path / 'result.json'}, and {tmp_path / 'results/noether/oscillator_hnn-changed-seed0'}.json"
    )
    assert commands.main([*name, "--force", "--integrator", "simpson"]) == 1
    assert "use euler, midpoint" in capsys.readouterr().err
    assert commands.main(["run", "quadrant-digits", "--substeps", "3"]) == 1
    assert "has no substeps to choose" in capsys.readouterr().err


def test_noether_of_a_file(tmp_path, capsys, monkeypatch):
    system = oscillators(1)
    x = system.trajectories(system.starts(8, torch.Generator().manual_seed(0)), 0.1, 12).numpy()
    np.savez(tmp_path / "data.npz", trajectories=x, t=0.1 * np.arange(13))
    monkeypatch.setattr(own_trajectories, "Search", partial(Search, starts=1, steps=20, features=16))
    assert (
        commands.main(
            ["noether", str(tmp_path / "data.npz"), "--points", "10", "--json", "--plot", str(tmp_path / "a" / "plot.png")]
        )
        == 0
    )
    held = json.loads(capsys.readouterr().out)
    assert {"parallelness", "singular_values", "generators"} <= held.keys()
    assert (tmp_path / "a" / "plot.png").exists()


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ([], "name either a file"),
        (["--demo", "lorenz"], "oscillator"),
        (["missing.npz"], "does not exist"),
        (["text.npz"], "not an .npz of arrays"),
        (["other.npz"], "it needs trajectories"),
        (["odd.npz"], "must be even"),
    ],
)
def test_what_noether_refuses(arguments, match, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.npz").write_text("no zip")
    np.savez(tmp_path / "other.npz", a=np.zeros(3))
    np.savez(tmp_path / "odd.npz", x=np.zeros((2, 9, 3)), dt=0.1)
    assert commands.main(["noether", *arguments]) == 1
    assert match in capsys.readouterr().err
