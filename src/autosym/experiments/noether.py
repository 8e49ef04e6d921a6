"""Noether's razor: oscillators and bodies, learned by a Hamiltonian network without, with learned and with given symmetry.

One-step prediction, H averaged over flows, a matrix normal posterior over the weights of F; the loss is NLL / N + KL / N.
"""

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from autosym.evidence.variational import Posterior
from autosym.experiments.running import write
from autosym.noether.conserved import Measure, Quadratic, draw
from autosym.noether.dynamics import apply_j, euler, midpoint
from autosym.noether.regression import stacked
from autosym.noether.systems import System, oscillators, planar_bodies
from autosym.paths import Bias, Dense
from autosym.provenance import provenance

RESULTS = Path("results")
SYSTEMS = {"oscillator": oscillators(1), "three-oscillators": oscillators(3), "three-bodies": planar_bodies(3)}
INTEGRATORS: dict[str, Callable[..., Tensor]] = {"euler": euler, "midpoint": midpoint}


@dataclass(frozen=True)
class Run:
    """One cell of the table; the settings are the paper's."""

    system: str
    model: str  # hnn, learned or oracle
    quantities: int = 1
    trajectories: int = 7
    steps: int = 4
    dt: float = 0.2
    substeps: int = 20
    batch: int = 7  # trajectories
    epochs: int = 5000
    warmup: int = 0  # epochs without symmetry
    taus: int = 200
    weights: int = 20  # samples of them
    layers: int = 3
    width: int = 200
    measure: Measure = "cube"
    integrator: str = "euler"
    variance: float = 0.001
    lr: float = 1e-3
    quantities_lr: float = 1e-2
    seed: int = 0

    @property
    def name(self) -> str:
        """Its name on the command line."""
        return f"noether/{self.system}/{self.model}"

    @property
    def file(self) -> Path:
        """Where its result is kept, without suffix; other settings than the paper's are another file."""
        usual = RUNS.get(self.name)
        kept = "" if usual is None or replace(self, seed=usual.seed) == usual else "-changed"
        return Path("noether") / f"{self.system}_{self.model}{kept}-seed{self.seed}"


SE2 = ("momentum x", "momentum y", "angular momentum")
MANY = {"trajectories": 200, "steps": 50, "measure": "ball", "taus": 100}
THREE = {"quantities": 30, "batch": 10, "epochs": 2000, "weights": 5, **MANY}
BODIES = {
    "quantities": 10,
    "dt": 1.0,
    "substeps": 10,
    "batch": 20,
    "epochs": 1000,
    "warmup": 100,
    "weights": 2,
    "layers": 4,
    "width": 250,
    **MANY,
}
SETTINGS: dict[str, dict[str, Any]] = {"oscillator": {}, "three-oscillators": THREE, "three-bodies": BODIES}
MODELS = ("hnn", "learned", "oracle")
RUNS: dict[str, Run] = {}
RUNS |= {run.name: run for run in (Run(system, model, **SETTINGS[system]) for system in SYSTEMS for model in MODELS)}

# -ELBO / N, test MSE, and test MSE on moved data, as published.
PAPER: dict[tuple[str, str], tuple[float, float, float | None]] = {
    ("oscillator", "hnn"): (3314.7, 0.005, None),
    ("oscillator", "learned"): (3302.1, 0.002, None),
    ("oscillator", "oracle"): (3295.1, 0.002, None),
    ("three-oscillators", "hnn"): (-6.77, 2.14e-5, None),
    ("three-oscillators", "learned"): (-9.63, 9.94e-6, None),
    ("three-oscillators", "oracle"): (-9.94, 8.98e-6, None),
    ("three-bodies", "hnn"): (-0.53, 0.0016, 0.0035),
    ("three-bodies", "learned"): (-12.81, 0.0006, 0.0004),
    ("three-bodies", "oracle"): (-11.32, 0.0006, 0.0006),
}


class Layer(nn.Module):
    """y = W x + b, as two paths: each has a prior."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.linear, self.bias = Dense((inputs,), (outputs,)), Bias((outputs,))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.bias(x)


def network(dimension: int, layers: int, width: int) -> nn.Sequential:
    """F: an MLP with ELU to one number, without bias there (a constant moves nothing)."""
    widths = (dimension, *(width,) * (layers - 1))
    parts = [part for i, o in pairwise(widths) for part in (Layer(i, o), nn.ELU())]
    return nn.Sequential(*parts, Dense((width,), (1,)))


def quantities_of(run: Run, system: System) -> Quadratic | None:
    """None, learned ones at small noise, or the generators of the oracle's group: U(n), or SE(2) for bodies."""
    if run.model == "hnn":
        return None
    if run.model == "learned":
        return Quadratic(system.dimension, run.quantities)
    true = [known for known in system.conserved if system.space == 1 or known.name in SE2]
    made = Quadratic.of(torch.stack([k.A for k in true]).float(), torch.stack([k.b for k in true]).float())
    return made.requires_grad_(False)


def field(net: nn.Module, weights: Mapping[str, Tensor], moves: tuple[Tensor, Tensor] | None) -> Callable[[Tensor], Tensor]:
    """x' = J grad H for all sets of weights at once, (W, B, M) to (W, B, M): grad H = mean_s R_s^T grad F(R_s x + t_s)."""

    def slope(w: Mapping[str, Tensor], points: Tensor) -> Tensor:
        return torch.func.grad(lambda y: torch.func.functional_call(net, dict(w), (y,)).sum())(points)

    def velocity(x: Tensor) -> Tensor:
        if moves is None:
            return apply_j(torch.func.vmap(slope)(dict(weights), x))
        matrices, shifts = moves
        points = torch.einsum("sij,wbj->wsbi", matrices, x) + shifts[:, None]
        slopes = torch.func.vmap(slope)(dict(weights), points.flatten(1, 2)).reshape(points.shape)
        return apply_j(torch.einsum("sij,wsbi->wbj", matrices, slopes) / len(matrices))

    return velocity


def predict(run: Run, net: nn.Module, weights: Mapping[str, Tensor], moves: Any, x: Tensor) -> Tensor:
    """The next states (W, B, M) after one step, for W sets of weights."""
    sets = len(next(iter(weights.values())))
    return INTEGRATORS[run.integrator](field(net, weights, moves), x.expand(sets, *x.shape), run.dt, run.substeps)


def data(run: Run, device: str) -> dict[str, Tensor]:
    """Training and test trajectories, noise of the likelihood's variance on the training targets; "moved" is q + 1, "wider" is 3 x."""
    system, generator = SYSTEMS[run.system], torch.Generator().manual_seed(run.seed)
    train = system.trajectories(system.starts(run.trajectories, generator), run.dt, run.steps)
    noise = math.sqrt(run.variance) * torch.randn(train[:, 1:].shape, generator=generator, dtype=train.dtype)
    starts = system.starts(100, generator, 0.2)
    shift = torch.tensor([1.0, 0.0], dtype=starts.dtype).repeat_interleave(system.dimension // 2)
    tests = system.trajectories(torch.cat([starts, starts + shift, 3 * starts]), run.dt, 20).chunk(3)
    parts = dict(zip(("test", "moved", "wider"), tests, strict=True))
    return {key: t.float().to(device) for key, t in {"inputs": train[:, :-1], "targets": train[:, 1:] + noise, **parts}.items()}


class Learner(nn.Module):
    """q over the weights of F, and the conserved quantities: all that is learned, and its optimiser."""

    def __init__(self, run: Run, device: str):
        super().__init__()
        system = SYSTEMS[run.system]
        self.run = run
        self.net = network(system.dimension, run.layers, run.width)
        self.posterior = Posterior(self.net)
        self.conserved = quantities_of(run, system)
        self.net.requires_grad_(False)
        self.to(device)
        groups = [{"params": list(self.posterior.parameters()), "lr": run.lr}]
        if run.model == "learned" and self.conserved is not None:
            groups.append({"params": list(self.conserved.parameters()), "lr": run.quantities_lr})
        self.optimiser = torch.optim.Adam(groups)

    def moves(self, epoch: int, taus: int) -> tuple[Tensor, Tensor] | None:
        """One set of flows for a whole batch and all steps of its integration; none in the warm-up."""
        if self.conserved is None or (epoch < self.run.warmup and self.run.model == "learned"):
            return None
        count = len(self.conserved.b)
        return self.conserved.affine(draw(self.run.measure, taus, count, self.conserved.b))

    def negative_elbo(self, x: Tensor, y: Tensor, epoch: int, weights: int, taus: int) -> tuple[Tensor, Tensor]:
        """-ELBO / N on points (B, M), and their mean squared error; N counts all training points."""
        run = self.run
        predicted = predict(run, self.net, self.posterior.sample(weights), self.moves(epoch, taus), x)
        errors = (predicted - y).square().sum(-1).mean()
        nll = 0.5 * (errors / run.variance + y.shape[1] * math.log(2 * math.pi * run.variance))
        return nll + self.posterior.kl().sum() / (run.trajectories * run.steps), errors / y.shape[1]

    def epoch(self, epoch: int, held: Mapping[str, Tensor]) -> float:
        run, total = self.run, 0.0
        rate = 0.5 * (1 + math.cos(math.pi * epoch / run.epochs))
        for group, lr in zip(self.optimiser.param_groups, (run.lr, run.quantities_lr), strict=False):
            group["lr"] = lr * rate
        parts = torch.randperm(run.trajectories, device=held["inputs"].device).split(run.batch)
        for rows in parts:
            x, y = (held[key][rows].flatten(0, 1) for key in ("inputs", "targets"))
            loss, _ = self.negative_elbo(x, y, epoch, run.weights, run.taus)
            self.optimiser.zero_grad()
            loss.backward()
            self.optimiser.step()
            self.posterior.update_precisions(0.05)
            total += float(loss.detach()) / len(parts)
        if not math.isfinite(total):
            raise ValueError(f"{run.name}: the loss is not finite in epoch {epoch}; take a smaller lr or more substeps")
        return total


def execute(
    run: Run, progress: bool = False, out: Path | None = None, resume: bool = False, results: Path = RESULTS
) -> dict[str, Any]:
    """Train and measure one cell, on a GPU where there is one; goes on from ``out`` where a run was stopped, with ``resume``."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(run.seed)
    held, learner = data(run, device), Learner(run, device)
    first, seconds = _load(learner, out) if resume and out is not None else (0, 0.0)
    start = saved = time.perf_counter()
    history = []
    for epoch in range(first, run.epochs):
        torch.manual_seed(1_000_003 * run.seed + epoch)  # the same draws, stopped or not
        history.append(learner.epoch(epoch, held))
        now = time.perf_counter()
        if out is not None and (now - saved > 20 or epoch == run.epochs - 1):
            _save(learner, out, epoch + 1, seconds + now - start)
            saved = now
        if progress and (epoch + 1) % max(1, run.epochs // 20) == 0:
            print(f"{run.name}: epoch {epoch + 1} of {run.epochs}, -ELBO/N {history[-1]:.3f}, {now - start:.0f} s", flush=True)
    result = {
        "row": measure(learner, held) | {"seconds": seconds + time.perf_counter() - start},
        "config": asdict(run),
        "provenance": provenance(device),
    }
    write(result, results / f"{run.file}.json")
    return result


def measure(learner: Learner, held: Mapping[str, Tensor]) -> dict[str, Any]:
    """The bound with more samples, errors of the mean network one step ahead, and what the quantities became."""
    run = learner.run
    with torch.no_grad():
        x, y = (held[key].flatten(0, 1)[:2000] for key in ("inputs", "targets"))
        draws = [learner.negative_elbo(x, y, run.epochs, 4, run.taus) for _ in range(8)]
        bound, train = (float(torch.stack(part).mean()) for part in zip(*draws, strict=True))
        means = {name: t[None] for name, t in learner.posterior.means().items()}
        moves = learner.moves(run.epochs, 4 * run.taus)
        errors = {}
        for key in ("test", "moved", "wider"):
            x, y = held[key][:, :-1].flatten(0, 1), held[key][:, 1:].flatten(0, 1)
            errors[f"{key}_mse"] = float((predict(run, learner.net, means, moves, x)[0] - y).square().mean())
    kl = float(learner.posterior.kl().sum().detach()) / (run.trajectories * run.steps)
    return {"negative_elbo": bound, "kl": kl, "nll": bound - kl, "train_mse": train, **errors, **_symmetry(learner)}


def _symmetry(learner: Learner) -> dict[str, Any]:
    if learner.run.model != "learned" or learner.conserved is None:
        return {"singular_values": None, "parallelness": None, "least_parallelness": None}
    system = SYSTEMS[learner.run.system]
    values, vectors = torch.linalg.svd(stacked(learner.conserved).double().cpu(), full_matrices=False)[1:]
    basis = torch.linalg.qr(torch.stack([known.vector() for known in system.conserved]).mT)[0]
    parallelness = (vectors @ basis).norm(dim=1).tolist()
    return {
        "singular_values": values.tolist(),
        "parallelness": parallelness,
        "least_parallelness": min(parallelness[: len(system.conserved)]),
    }


def _state(learner: Learner) -> dict[str, Tensor]:
    """Everything that a run goes on from, as named tensors: parameters, and the two moments of Adam with its count."""
    moments = {
        f"adam.{index}.{key}": value
        for index, state in learner.optimiser.state_dict()["state"].items()
        for key, value in state.items()
    }
    return {key: t.contiguous() for key, t in {**learner.state_dict(), **moments}.items()}


def _save(learner: Learner, out: Path, epoch: int, seconds: float) -> None:
    out.mkdir(parents=True, exist_ok=True)
    kept = json.dumps({"epoch": epoch, "seconds": seconds, "config": asdict(learner.run)})
    safetensors.torch.save_file(_state(learner), out / "checkpoint.tmp", {"state": kept})
    (out / "checkpoint.tmp").replace(out / "checkpoint.safetensors")


def _load(learner: Learner, out: Path) -> tuple[int, float]:
    path = out / "checkpoint.safetensors"
    if not path.exists():
        return 0, 0.0
    with safetensors.safe_open(path, "pt") as file:
        state = json.loads(file.metadata()["state"])
        held = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    if state["config"] != asdict(learner.run):
        raise ValueError(f"{path} is of a run with other settings: choose another --out, or leave out --resume")
    learner.load_state_dict({key: t for key, t in held.items() if not key.startswith("adam.")})
    whole = learner.optimiser.state_dict()
    for key, t in held.items():
        if key.startswith("adam."):
            _, index, name = key.split(".")
            whole["state"].setdefault(int(index), {})[name] = t
    learner.optimiser.load_state_dict(whole)
    return state["epoch"], state["seconds"]


def rows(results: Path = RESULTS) -> list[dict[str, Any]]:
    """One row for every cell: the first seed that was run, the paper's numbers, None where there is none."""
    return [_row(run, results) for run in RUNS.values()]


def _row(run: Run, results: Path) -> dict[str, Any]:
    keys = ("negative_elbo", "test_mse", "moved_mse", "least_parallelness", "singular_values", "seconds")
    stem = run.file.name.rpartition("-seed")[0]
    found = sorted((results / "noether").glob(f"{stem}-seed*.json"))
    held = json.loads(found[0].read_text()) if found else {"row": {}, "config": {}}
    paper = PAPER[run.system, run.model]
    published = dict(zip(("paper_negative_elbo", "paper_test_mse", "paper_moved_mse"), paper, strict=True))
    own = {key: held["row"].get(key) for key in keys}
    return {
        "name": run.name,
        "system": run.system,
        "model": run.model,
        **own,
        **published,
        "epochs": held["config"].get("epochs"),
    }
