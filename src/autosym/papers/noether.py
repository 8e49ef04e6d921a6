"""Noether's razor: a Hamiltonian network learns oscillators and bodies, with no symmetry, a learned one or a given one.

The loss is NLL / N + KL / N of one-step predictions. H is averaged over flows; the weights of F have a matrix normal posterior.
"""

import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from autosym.evidence.variational import Posterior
from autosym.linear.products import fast_products
from autosym.noether.candidates import begin
from autosym.noether.conserved import Measure, Quadratic, even, recordable_exponential, shifted
from autosym.noether.dynamics import Field, euler, midpoint
from autosym.noether.found import STANDS_OUT
from autosym.noether.hamiltonian import Moves, field, network
from autosym.noether.regression import stacked
from autosym.noether.systems import System, oscillators, planar_bodies
from autosym.papers.measuring import CHECKPOINT, write
from autosym.report import run_files
from autosym.report.drawing import print_table
from autosym.runtime import files
from autosym.runtime.graphs import Captured
from autosym.runtime.provenance import provenance

RESULTS = Path("results")
SYSTEMS = {"oscillator": oscillators(1), "three-oscillators": oscillators(3), "three-bodies": planar_bodies(3)}
INTEGRATORS: dict[str, Callable[["Run", Field, Tensor], Tensor]] = {
    "euler": lambda run, velocity, x: euler(velocity, x, run.dt, run.substeps),
    "midpoint": lambda run, velocity, x: midpoint(velocity, x, run.dt, run.substeps, run.iterations),
}
BEGINS = ("noise", "least-drift")


@dataclass(frozen=True)
class Run:
    """One cell of the table. Data and networks are the paper's; steps, rates and samples are ours (see docs/noether-tables.md)."""

    system: str
    model: str  # hnn, learned or oracle
    quantities: int = 1
    trajectories: int = 7
    steps: int = 4
    dt: float = 0.2
    substeps: int = 1
    batch: int = 7  # trajectories
    epochs: int = 5000
    warmup: int = 0  # epochs without symmetry
    momenta: int = 0  # epochs after the warm-up in which b is learned, and A is not
    begin: str = "noise"  # where quantities start: noise, or least-drift (the directions that change least along training data)
    taus: int = 32
    weights: int = 10  # samples of the weights
    layers: int = 3
    width: int = 200
    measure: Measure = "cube"
    integrator: str = "midpoint"
    iterations: int = 2  # per step of the midpoint rule
    variance: float = 0.001
    lr: float = 3e-3
    quantities_lr: float = 1e-2
    start: float = 0.1  # initial size of A, and of b in units of ``size``
    size: float = 1.0  # about the root mean square of the states
    std: float = 0.01  # initial standard deviation of every weight under q
    starts: int = 1
    seed: int = 0

    @property
    def name(self) -> str:
        """Its name on the command line."""
        return f"noether/{self.system}/{self.model}"

    @property
    def file(self) -> Path:
        """Path of its result, without suffix; settings other than the table's go to another file."""
        usual = RUNS.get(self.name)
        kept = "" if usual is None or replace(self, seed=usual.seed) == usual else "-changed"
        return Path("noether") / f"{self.system}_{self.model}{kept}-seed{self.seed}"


STARTS = 3  # one learned quantity may end at a shear or a squeeze; with thirty quantities, one start is enough
SE2 = ("momentum x", "momentum y", "angular momentum")
MANY = {"trajectories": 200, "steps": 50, "measure": "ball"}
THREE = {"quantities": 30, "batch": 10, "epochs": 400, "taus": 48, "weights": 2, "quantities_lr": 2e-2, **MANY}
BODIES = {
    "quantities": 10,
    "dt": 1.0,
    "substeps": 3,
    "iterations": 1,
    "batch": 10,
    "epochs": 1500,
    "warmup": 400,
    "taus": 32,
    "weights": 1,
    "layers": 4,
    "width": 250,
    "start": 5e-4,
    "size": 6.0,
    "lr": 1e-3,
    "quantities_lr": 4e-3,  # at a higher rate, flows scramble what the network has learned before they help
    **MANY,
}
ONE = {"std": 0.1}  # with so few data the posterior stays wide: from 0.01 the KL takes many times as long to fall
SETTINGS: dict[str, dict[str, Any]] = {"oscillator": ONE, "three-oscillators": THREE, "three-bodies": BODIES}
MODELS = ("hnn", "learned", "oracle")
RUNS: dict[str, Run] = {}
RUNS |= {run.name: run for run in (Run(system, model, **SETTINGS[system]) for system in SYSTEMS for model in MODELS)}
RUNS["noether/oscillator/learned"] = replace(RUNS["noether/oscillator/learned"], starts=STARTS)
# From small noise translations are not found: they change next to nothing until the network knows the bodies.
LEAST_DRIFT: dict[str, Any] = {"begin": "least-drift", "start": 2.9, "quantities_lr": 5e-4, "warmup": 0, "epochs": 1000}
RUNS["noether/three-bodies/learned"] = replace(RUNS["noether/three-bodies/learned"], **LEAST_DRIFT)

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


def quantities_of(run: Run, system: System) -> Quadratic | None:
    """None (hnn), small random ones to learn, or the generators of the oracle's group: U(n), or SE(2) for bodies."""
    if run.model == "hnn":
        return None
    if run.model == "learned":
        return Quadratic(system.dimension, run.quantities, run.start, run.size)
    true = [known for known in system.conserved if system.space == 1 or known.name in SE2]
    made = Quadratic.of(torch.stack([k.A for k in true]).float(), torch.stack([k.b for k in true]).float())
    return made.requires_grad_(False)


def predict(run: Run, weights: Mapping[str, Tensor], moves: Moves | None, x: Tensor) -> Tensor:
    """The next states (W, B, M) after one step, for W sets of weights."""
    sets = len(next(iter(weights.values())))
    return INTEGRATORS[run.integrator](run, field(weights, moves), x.expand(sets, *x.shape))


def data(run: Run, device: str) -> dict[str, Tensor]:
    """Training and test trajectories; only training targets are noisy, with ``run.variance``. "moved" is q + 1, "wider" is 3 x."""
    system, generator = SYSTEMS[run.system], torch.Generator().manual_seed(run.seed)
    train = system.trajectories(system.starts(run.trajectories, generator), run.dt, run.steps)
    noise = math.sqrt(run.variance) * torch.randn(train[:, 1:].shape, generator=generator, dtype=train.dtype)
    starts = system.starts(100, generator, 0.2)
    shift = torch.tensor([1.0, 0.0], dtype=starts.dtype).repeat_interleave(system.dimension // 2)
    tests = system.trajectories(torch.cat([starts, starts + shift, 3 * starts]), run.dt, 20).chunk(3)
    parts = dict(zip(("test", "moved", "wider"), tests, strict=True))
    return {key: t.float().to(device) for key, t in {"inputs": train[:, :-1], "targets": train[:, 1:] + noise, **parts}.items()}


class Learner(nn.Module):
    """All that is learned (q over the weights of F, and the conserved quantities), and its optimiser.

    On a GPU a step is replayed as a CUDA graph. So its tensors keep their addresses, and it never waits for the device.
    """

    def __init__(self, run: Run, device: str):
        super().__init__()
        system = SYSTEMS[run.system]
        self.run = run
        self.posterior = Posterior(network(system.dimension, run.layers, run.width), run.std)
        self.conserved = quantities_of(run, system)
        self.to(device)
        groups = [{"params": list(self.posterior.parameters()), "lr": torch.tensor(run.lr, device=device)}]
        if run.model == "learned" and self.conserved is not None:
            for part in (self.conserved.raw, self.conserved.shift):
                groups.append({"params": [part], "lr": torch.tensor(run.quantities_lr, device=device)})
        self.optimiser = torch.optim.Adam(groups, fused=True, capturable=device == "cuda")
        self.times = self.uniform(run.taus)
        self.loss = torch.zeros((), dtype=torch.float64, device=device)  # summed until ``take_loss``
        self.steps = {symmetric: Captured(partial(self.step, symmetric)) for symmetric in (False, True)}

    def uniform(self, taus: int) -> Tensor:
        """Uniform numbers from which ``moves`` makes ``taus`` times."""
        quantities = 0 if self.conserved is None else len(self.conserved.b)
        return even(taus, quantities, next(self.posterior.parameters()))

    def moves(self, uniform: Tensor, exponential: Callable[[Tensor], Tensor] = torch.matrix_exp) -> Moves | None:
        """One set of flows for a whole batch and all steps of its integration; every call draws new times."""
        return None if self.conserved is None else self.conserved.affine(shifted(self.run.measure, uniform), exponential)

    def negative_elbo(self, x: Tensor, y: Tensor, weights: int, moves: Moves | None) -> tuple[Tensor, Tensor]:
        """-ELBO / N on points (B, M), and their mean squared error; N counts all training points."""
        run = self.run
        predicted = predict(run, self.posterior.sample(weights), moves, x)
        errors = (predicted - y).square().sum(-1).mean()
        nll = 0.5 * (errors / run.variance + y.shape[1] * math.log(2 * math.pi * run.variance))
        return nll + self.posterior.kl().sum() / (run.trajectories * run.steps), errors / y.shape[1]

    def step(self, symmetric: bool, x: Tensor, y: Tensor) -> None:
        """One step of all parameters, and of the precisions, on points (B, M)."""
        moves = self.moves(self.times, recordable_exponential) if symmetric else None
        loss, _ = self.negative_elbo(x, y, self.run.weights, moves)
        learned = [p for group in self.optimiser.param_groups for p in group["params"]]
        slopes = torch.autograd.grad(loss, learned, allow_unused=True)
        for p, slope in zip(learned, slopes, strict=True):  # fused Adam wants slopes with the strides of p
            p.grad = None if slope is None else slope.contiguous()
        self.optimiser.step()
        self.posterior.update_precisions(0.05)
        self.loss += loss.detach()

    def epoch(self, epoch: int, held: Mapping[str, Tensor]) -> None:
        """All batches once, in a new random order; learned quantities do not change during the warm-up."""
        run = self.run
        rate = 0.5 * (1 + math.cos(math.pi * epoch / run.epochs))
        of_A = run.quantities_lr if epoch >= run.warmup + run.momenta else 0.0
        for group, lr in zip(self.optimiser.param_groups, (run.lr, of_A, run.quantities_lr), strict=False):
            group["lr"].fill_(lr * rate)
        step = self.steps[epoch >= run.warmup or run.model != "learned"]
        for rows in torch.randperm(run.trajectories, device=held["inputs"].device).split(run.batch):
            step(*(held[key][rows].flatten(0, 1) for key in ("inputs", "targets")))

    def take_loss(self, epochs: int) -> float:
        """The mean loss of the last ``epochs``."""
        mean = float(self.loss) / (epochs * math.ceil(self.run.trajectories / self.run.batch))
        self.loss.zero_()
        if not math.isfinite(mean):
            raise ValueError(f"{self.run.name}: the loss is not finite; take a smaller lr or more substeps")
        return mean


def execute(
    run: Run, progress: bool = False, out: Path | None = None, resume: bool = False, results: Path = RESULTS
) -> dict[str, Any]:
    """Train and measure one cell, on a GPU if there is one; ``resume`` continues a stopped run from ``out``.

    If there are several starts, the one with the best bound on the training data is kept.
    """
    if run.integrator not in INTEGRATORS:
        raise ValueError(f"no integrator is called {run.integrator!r}: use {', '.join(INTEGRATORS)}")
    if run.begin not in BEGINS:
        raise ValueError(f"quantities cannot begin at {run.begin!r}: use {', '.join(BEGINS)}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    held = data(run, device)
    found = [_one_start(run, number, held, device, progress, out, resume) for number in range(run.starts)]
    row = min(found, key=lambda row: row["negative_elbo"])
    spent = {"seconds": sum(one["seconds"] for one in found), "starts": [one["negative_elbo"] for one in found]}
    result = {"row": row | spent, "config": asdict(run), "provenance": provenance(device)}
    write(result, results / f"{run.file}.json")
    return result


def _one_start(
    run: Run, number: int, held: Mapping[str, Tensor], device: str, progress: bool, out: Path | None, resume: bool
) -> dict[str, Any]:
    """The row of one start; ``resume`` continues from its own folder, even if it has already ended."""
    folder = out / f"start{number}" if out is not None and run.starts > 1 else out
    torch.manual_seed(1_000 * run.seed + number)
    learner = Learner(run, device)
    if run.begin == "least-drift" and run.model == "learned" and learner.conserved is not None:
        begin(learner.conserved, held["targets"], run.start)
    first, seconds = _load(learner, folder) if resume and folder is not None else (0, 0.0)
    start = time.perf_counter()
    with fast_products():
        train(learner, held, first, progress, partial(_save, learner, folder) if folder is not None else None, seconds)
    torch.manual_seed(run.seed)  # so that a resumed run measures the same
    return measure(learner, held) | {"seconds": seconds + time.perf_counter() - start}


def train(
    learner: Learner,
    held: Mapping[str, Tensor],
    first: int,
    progress: bool,
    save: Callable[[int, float], None] | None,
    seconds: float,
) -> None:
    """All epochs from ``first`` on. Checks the loss and saves the state twenty times, and in between every 20 seconds."""
    run, start, seen = learner.run, time.perf_counter(), first
    saved = start
    for epoch in range(first, run.epochs):
        torch.manual_seed(1_000_003 * run.seed + epoch)  # so that a resumed run draws the same
        learner.epoch(epoch, held)
        due = (epoch + 1) % max(1, run.epochs // 20) == 0 or epoch == run.epochs - 1
        if not due and time.perf_counter() - saved < 20:
            continue
        loss, seen = learner.take_loss(epoch + 1 - seen), epoch + 1
        saved = time.perf_counter()
        if save is not None:
            save(seen, seconds + saved - start)
        if progress:
            recorded = ", replayed" if any(step.graphs for step in learner.steps.values()) else ""
            print(
                f"{run.name}: epoch {seen} of {run.epochs}, -ELBO/N {loss:.3f}, {saved - start:.0f} s{recorded}",
                file=sys.stderr,
                flush=True,
            )


def measure(learner: Learner, held: Mapping[str, Tensor]) -> dict[str, Any]:
    """The bound with more samples, one-step errors of the mean prediction under q, and the learned quantities.

    Predictions are averaged over sampled weights: mean weights miss what a wide q holds in its variance (for one oscillator, all).
    """
    run = learner.run
    with torch.no_grad():
        x, y = (held[key].flatten(0, 1)[:2000] for key in ("inputs", "targets"))
        draws = [learner.negative_elbo(x, y, 4, learner.moves(learner.uniform(4 * run.taus))) for _ in range(8)]
        bound, train = (float(torch.stack(part).mean()) for part in zip(*draws, strict=True))
        sets = [learner.posterior.sample(4) for _ in range(8)]
        moves = learner.moves(learner.uniform(4 * run.taus))
        errors = {}
        for key in ("test", "moved", "wider"):
            x, y = held[key][:, :-1].flatten(0, 1), held[key][:, 1:].flatten(0, 1)
            mean = sum(predict(run, weights, moves, x).mean(0) for weights in sets) / len(sets)
            errors[f"{key}_mse"] = float((mean - y).square().mean())
    kl = float(learner.posterior.kl().sum().detach()) / (run.trajectories * run.steps)
    return {"negative_elbo": bound, "kl": kl, "nll": bound - kl, "train_mse": train, **errors, **_symmetry(learner)}


def _symmetry(learner: Learner) -> dict[str, Any]:
    if learner.run.model != "learned" or learner.conserved is None:
        return dict.fromkeys(("found", "found_in_as_many", "singular_values", "parallelness", "least_parallelness"))
    system = SYSTEMS[learner.run.system]
    values, vectors = torch.linalg.svd(stacked(learner.conserved).double().cpu(), full_matrices=False)[1:]
    true = torch.stack([known.vector(learner.run.size) for known in system.conserved])
    basis = torch.linalg.qr(true.mT)[0]
    parallelness = (vectors @ basis).norm(dim=1).tolist()
    standing = int((values >= STANDS_OUT * values.max()).sum())

    def within(leading: int) -> dict[str, float]:  # 1: it lies entirely in the ``leading`` directions
        return {k.name: float((vectors[:leading] @ v).norm()) for k, v in zip(system.conserved, true, strict=True)}

    return {
        "found": within(standing),
        "found_in_as_many": within(len(true)),
        "singular_values": values.tolist(),
        "parallelness": parallelness,
        "least_parallelness": min(parallelness[: len(true)]),
    }


def _state(learner: Learner) -> dict[str, Tensor]:
    """All that a resumed run needs, as named tensors: parameters, and Adam's two moments and step count."""
    moments = {
        f"adam.{index}.{key}": value
        for index, state in learner.optimiser.state_dict()["state"].items()
        for key, value in state.items()
    }
    return {key: t.contiguous() for key, t in {**learner.state_dict(), **moments}.items()}


def _save(learner: Learner, out: Path, epoch: int, seconds: float) -> None:
    kept = json.dumps({"epoch": epoch, "seconds": seconds, "config": asdict(learner.run)})
    files.write(out / CHECKPOINT, safetensors.torch.save(_state(learner), {"state": kept}))


def _load(learner: Learner, out: Path) -> tuple[int, float]:
    path = out / CHECKPOINT
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
    """One row for every cell: the first seed that was run, and the paper's numbers; None if missing."""
    return [_row(run, results) for run in RUNS.values()]


def _row(run: Run, results: Path) -> dict[str, Any]:
    keys = ("negative_elbo", "test_mse", "moved_mse", "least_parallelness", "found_in_as_many", "singular_values", "seconds")
    stem = run.file.name.rpartition("-seed")[0]
    found = sorted((results / "noether").glob(f"{stem}-seed*.json"))
    held = run_files.read(found[0]) if found else {"row": {}, "config": {}}
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


def show(found: Sequence[Mapping[str, Any]]) -> None:
    """Our numbers beside the paper's; a dash if not run."""
    columns = {  # title, format
        "negative_elbo": ("-ELBO/N", ".4g"),
        "paper_negative_elbo": ("paper", ".4g"),
        "test_mse": ("test MSE", ".3g"),
        "paper_test_mse": ("paper ", ".3g"),
        "moved_mse": ("moved MSE", ".3g"),
        "paper_moved_mse": ("paper  ", ".3g"),
        "least_parallelness": ("parallel", ".4g"),
        "epochs": ("epochs", "d"),
        "seconds": ("s", ".0f"),
    }
    numbers = [["-" if row[key] is None else format(row[key], kind) for key, (_, kind) in columns.items()] for row in found]
    lines = [[f"{row['system']}: {row['model']}", *own] for row, own in zip(found, numbers, strict=True)]
    titles = ["run", *(title for title, _ in columns.values())]
    print_table("Noether's razor: ours and the paper's (- is not run, or not published)", titles, lines)
