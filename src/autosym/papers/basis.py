"""The talk's toy: basis functions with exact evidence. Which frequency, and is the function even?

    f(x) = w . phi_lambda(x),      phi_lambda(x) = (1 - lambda/2) phi(x) + (lambda/2) phi(-x),      w ~ N(0, v I)

At lambda = 1 every function of the model is even; at 0 it is free. The training error chooses the most flexible model. The evidence
chooses the symmetric one. Here it has a closed form: the example shows the idea alone, without network or estimator.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from autosym.evidence import exact
from autosym.papers.measuring import write
from autosym.report.drawing import new_figure, open_frame, print_table, save_figure
from autosym.runtime.arithmetic import one_thread
from autosym.runtime.provenance import provenance

Family = Literal["fourier", "rbf"]
Criterion = Literal["evidence", "training loss"]


@dataclass(frozen=True)
class Model:
    """A family of basis functions, their frequency (for bumps, the inverse width) and how even they are."""

    label: str
    frequency: float
    symmetry: float = 0.0
    family: Family = "fourier"


@dataclass(frozen=True)
class Run:
    """Four models, each with ``features`` basis functions, are compared on twenty noisy values of an even function."""

    seed: int = 0
    samples: int = 20
    features: int = 300
    variance: float = 4.0  # of the weights; ``basis`` divides by the number of features
    noise: float = 0.05  # variance of the noise
    steps: int = 80  # of gradient ascent for lambda


ERRORS = ("train_error", "test_error")
MODELS = (
    Model("low frequency", 0.3),
    Model("symmetric", 1.5, 1.0),
    Model("not symmetric", 1.5),
    Model("high frequency", 8.0),
)
LEARNED = (Model("fourier", 1.5), Model("rbf", 1.5, family="rbf"))


def target(x: Tensor) -> Tensor:
    """An even function."""
    return torch.cos(2 * x) * torch.exp(-0.1 * x.square()) + 0.3 * x.square() - 1


def samples(run: Run) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Training and test pairs: x (N,) is uniform on [-3, 3] for training and a grid for testing; float64."""
    draw = torch.Generator().manual_seed(run.seed)
    x = 6 * torch.rand(run.samples, generator=draw, dtype=torch.float64) - 3
    noise = math.sqrt(run.noise) * torch.randn(run.samples, generator=draw, dtype=torch.float64)
    grid = torch.linspace(-3, 3, 301, dtype=torch.float64)
    return (x, target(x) + noise), (grid, target(grid))


def basis(model: Model, run: Run, x: Tensor) -> Tensor:
    """phi(x) of shape (N, M), with unit mean square norm: random Fourier features, or bumps on a grid."""
    if model.family == "rbf":
        centres = torch.linspace(-4, 4, run.features, dtype=x.dtype)
        bumps = torch.exp(-0.5 * (model.frequency * (x[:, None] - centres)).square())
        return bumps * math.sqrt(8 * model.frequency / (math.sqrt(math.pi) * run.features))
    draw = torch.Generator().manual_seed(1000 + run.seed)
    omega = model.frequency * torch.randn(run.features, generator=draw, dtype=x.dtype)
    phase = 2 * math.pi * torch.rand(run.features, generator=draw, dtype=x.dtype)
    return math.sqrt(2 / run.features) * torch.cos(x[:, None] * omega + phase)


def symmetric(model: Model, run: Run, x: Tensor, symmetry: Tensor | float) -> Tensor:
    """phi_lambda(x) = (1 - lambda/2) phi(x) + (lambda/2) phi(-x)."""
    return (1 - symmetry / 2) * basis(model, run, x) + symmetry / 2 * basis(model, run, -x)


def judge(model: Model, run: Run) -> dict[str, Any]:
    """Log evidence of one model, and training and test error of its posterior mean."""
    (x, y), (grid, truth) = samples(run)
    phi, phi_test = (symmetric(model, run, t, model.symmetry) for t in (x, grid))
    weights = _mean(phi, y, run)
    return {
        "model": model.label,
        "frequency": model.frequency,
        "lambda": model.symmetry,
        "train_error": float((phi @ weights - y).square().mean()),
        "test_error": float((phi_test @ weights - truth).square().mean()),
        "log_evidence": float(exact.at(phi, y, 1 / run.variance, run.noise).log_evidence),
        "prediction": (phi_test @ weights).tolist(),
    }


def learn(model: Model, run: Run, criterion: Criterion) -> list[float]:
    """lambda = sigmoid(r) at every step, from 1/2, as r maximises the evidence or minimises the posterior mean's training loss."""
    (x, y), _ = samples(run)
    phi, mirrored = basis(model, run, x), basis(model, run, -x)
    raw = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.Adam([raw], 0.2)
    path = []
    for _ in range(run.steps):
        share = raw.sigmoid()
        path.append(float(share.detach()))
        features = (1 - share / 2) * phi + share / 2 * mirrored
        if criterion == "evidence":
            loss = -exact.at(features, y, 1 / run.variance, run.noise).log_evidence
        else:
            loss = len(y) * (features @ _mean(features, y, run) - y).square().mean() / (2 * run.noise)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return [*path, float(raw.detach().sigmoid())]


def _mean(phi: Tensor, y: Tensor, run: Run) -> Tensor:
    precision = torch.full((phi.shape[1],), 1 / run.variance, dtype=phi.dtype)
    return exact.posterior(phi, y[:, None], precision, torch.tensor(run.noise, dtype=phi.dtype))[0][:, 0]


def execute(run: Run) -> dict[str, Any]:
    """All models judged, and lambda learned by both criteria."""
    start = time.perf_counter()
    with one_thread():
        rows = [judge(model, run) for model in MODELS]
        criteria: tuple[Criterion, ...] = ("evidence", "training loss")
        learned = [{"family": m.family, "by": c, "path": learn(m, run, c)} for m in LEARNED for c in criteria]
    (x, y), _ = samples(run)
    return {
        "rows": rows,
        "chosen_by_training_error": min(rows, key=lambda row: row["train_error"])["model"],
        "chosen_by_evidence": max(rows, key=lambda row: row["log_evidence"])["model"],
        "learned": [row | {"lambda": row["path"][-1]} for row in learned],
        "data": {"x": x.tolist(), "y": y.tolist()},
        "config": asdict(run),
        "seconds": time.perf_counter() - start,
        "provenance": provenance(),
    }


def demo(out: Path, seed: int = 0) -> dict[str, Any]:
    """Run the demo; write result.json and basis.png to ``out``."""
    result = execute(Run(seed))
    write(result, out / "result.json")
    figure(result, out / "basis.png")
    return result


def show(result: Mapping[str, Any]) -> None:
    """Print the table, and what each criterion chooses."""
    rows = [
        (
            r["model"],
            *(f"{r[k]:g}" for k in ("frequency", "lambda")),
            *(f"{r[k]:.3f}" for k in ERRORS),
            f"{r['log_evidence']:.1f}",
        )
        for r in result["rows"]
    ]
    columns = ("model", "frequency", "lambda", "training error", "test error", "log evidence (nats)")
    print_table("Basis functions for an even function, from 20 noisy points", columns, rows)
    print(
        f"The training error chooses: {result['chosen_by_training_error']}. "
        f"The evidence chooses: {result['chosen_by_evidence']}."
    )
    for row in result["learned"]:
        print(f"lambda learned by {row['by']} from 0.5 ({row['family']} features): {row['lambda']:.2f}")


def figure(result: Mapping[str, Any], path: Path) -> None:
    """Every model's prediction, errors and evidence, and lambda over the steps by each criterion."""
    grid = torch.linspace(-3, 3, 301, dtype=torch.float64)
    fig = new_figure(17, 3.4)
    axes = fig.subplots(1, 5)
    chosen = {result["chosen_by_training_error"]: "training error", result["chosen_by_evidence"]: "evidence"}
    for axis, row in zip(axes, result["rows"], strict=False):
        by = chosen.get(row["model"])
        axis.plot(grid, target(grid), color="#999999", linestyle="--", linewidth=1, label="truth")
        axis.plot(grid, row["prediction"], color={"evidence": "#009E73", "training error": "#D55E00"}.get(by or "", "#0072B2"))
        axis.plot(result["data"]["x"], result["data"]["y"], "k.", markersize=5)
        axis.set_ylim(-2.2, 2.8)
        axis.set_title(f"{row['model']}{f' (chosen by {by})' if by else ''}", fontsize=10)
        axis.set_xlabel(f"train {row['train_error']:.3f}, test {row['test_error']:.3f}, evidence {row['log_evidence']:.1f}")
    for row in result["learned"]:
        style = "-" if row["family"] == "fourier" else ":"
        colour = "#009E73" if row["by"] == "evidence" else "#D55E00"
        axes[-1].plot(row["path"], style, color=colour, label=f"{row['by']}, {row['family']}")
    axes[-1].set_ylim(0, 1)
    axes[-1].set_title("lambda: 1 is symmetric", fontsize=10)
    axes[-1].set_xlabel("step")
    axes[-1].legend(frameon=False, fontsize=8)
    for axis in axes:
        open_frame(axis)
    save_figure(fig, path, 110)
