"""Is the posterior predictive better than the point estimate? Six networks with held-out data, default fits of 60 epochs.

    python benchmarks/predictive.py [--seed 0] [--every]

For each: test negative log-likelihood and calibration error of the point estimate, and of the default with data, whose temperature and
scale leave-one-out chooses on the training data ("tuned"). With --every also of posteriors as they are: by Kronecker factors, by the whole
Gauss-Newton matrix as Laplace has it, and with curvature averaged over the posterior. Settings were chosen at seeds 10 to 18.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autosym
from autosym.evidence import posterior
from autosym.evidence.leave_one_out import Tuning
from autosym.evidence.predictive import calibration_error
from autosym.papers import datasets
from autosym.runtime.provenance import provenance
from autosym.runtime.tables import table
from real_networks import Sequence1d
from real_tasks import sequences

OUT = Path(__file__).parent / "results" / "predictive.json"
TRAIN, TEST = 300, 500


class Residual(nn.Module):
    """x + f(x), with two convolutions in f."""

    def __init__(self, width: int):
        super().__init__()
        first, second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.body = nn.Sequential(first, nn.BatchNorm2d(width), nn.ReLU(), second, nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.body(x))


def stem(width: int = 8) -> list[nn.Module]:
    return [nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]


def pooled_head(width: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)]


def resnet() -> nn.Module:
    down = [nn.Conv2d(8, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*stem(), Residual(8), *down, Residual(16), *pooled_head(16))


def flat() -> nn.Module:
    body = [*stem(), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*body, nn.Dropout(0.2), nn.Flatten(), nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 10))


def pooled() -> nn.Module:
    body = [nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*stem(), *body, *pooled_head(32))


def depthwise() -> nn.Module:
    def block(a: int, b: int, stride: int) -> list[nn.Module]:
        across, along = nn.Conv2d(a, a, 3, stride, 1, groups=a, bias=False), nn.Conv2d(a, b, 1, bias=False)
        return [across, nn.BatchNorm2d(a), nn.ReLU6(), along, nn.BatchNorm2d(b), nn.ReLU6()]

    return nn.Sequential(*stem(), *block(8, 16, 1), *block(16, 32, 2), *pooled_head(32))


def dense() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 10))


def digits(seed: int, size: int = 16, canvas: int = 0) -> list[Tensor]:
    """Training inputs and labels, then those of the test: digits in their place, or anywhere on a canvas."""
    x, y = datasets.digits()
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(x), generator=generator)[: TRAIN + TEST]
    x, y = F.interpolate(x[chosen][:, None], size=(size, size), mode="bilinear", align_corners=False), y[chosen]
    if canvas:
        placed = torch.zeros(len(x), 1, canvas, canvas)
        for image, one in zip(placed, x, strict=True):
            a, b = torch.randint(canvas - size + 1, (2,), generator=generator).tolist()
            image[:, a : a + size, b : b + size] = one
        x = placed
    x = (x - x[:TRAIN].mean()) / x[:TRAIN].std()
    return [x[:TRAIN], y[:TRAIN], x[TRAIN:], y[TRAIN:]]


def shapes(seed: int) -> list[Tensor]:
    """The same for bumps of three shapes in noise."""
    return [*sequences("shape", TRAIN, 2 * seed), *sequences("shape", TEST, 2 * seed + 1)]


PROBLEMS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], list[Tensor]]]] = {
    "resnet": (resnet, digits),
    "flat": (flat, digits),
    "pooled": (pooled, lambda seed: digits(seed, 8, 16)),
    "depthwise": (depthwise, digits),
    "dense": (dense, lambda seed: digits(seed, 8)),
    "shape": (lambda: Sequence1d(1, 3, 8), shapes),
}


def relaxed(name: str, seed: int, epochs: int) -> tuple[nn.Module, list[Tensor]]:
    """A network that was trained plainly for half as long, and relaxed; its training data, and those of the test."""
    build, load = PROBLEMS[name]
    x, y, *test = load(seed)
    torch.manual_seed(seed)
    net = build().train()
    optimiser = torch.optim.Adam(net.parameters(), 3e-3)
    for _ in range(epochs // 2):
        for rows in torch.randperm(len(x)).split(50):
            optimiser.zero_grad()
            F.cross_entropy(net(x[rows]), y[rows]).backward()
            optimiser.step()
    return autosym.relax(net.eval(), x[:8]), [x, y, *test]


def fitted(name: str, seed: int, epochs: int) -> tuple[autosym.Fit, list[Tensor]]:
    """The same, fitted by the defaults."""
    model, data = relaxed(name, seed, epochs)
    return autosym.fit(model, (data[0], data[1]), epochs=epochs, seed=seed), data


def predictions(
    fit: autosym.Fit, data: tuple[Tensor, Tensor], x: Tensor, every: bool
) -> Iterator[tuple[str, Tensor, dict[str, float]]]:
    """Every kind of prediction: its probabilities at ``x``, and figures of its own."""
    with torch.no_grad():
        yield "point", fit.model(x).double().softmax(1), {}
    at = (fit.model, data, fit.laplace, fit.prior)
    begun = time.perf_counter()
    tuned = posterior.tuned(*at)
    own = {"temperature": tuned.tuning.temperature, "scale": tuned.tuning.scale, "seconds": time.perf_counter() - begun}
    yield "tuned probit", tuned.predictive(x).probabilities, own
    if not every:
        return
    yield "kronecker probit", fit.predictive(x, scale=1.0).probabilities, {}
    yield "laplace probit", replace(tuned, tuning=Tuning(scale=1.0)).predictive(x).probabilities, {}
    begun = time.perf_counter()
    averaged = posterior.at(*at)
    own = {"seconds": time.perf_counter() - begun}
    yield "averaged probit", averaged.predictive(x).probabilities, own
    yield "averaged monte-carlo", averaged.predictive(x, "monte-carlo").probabilities, own


def measure(name: str, seed: int, epochs: int = 60, every: bool = False) -> dict[str, dict[str, float]]:
    """Scores of every prediction: negative log-likelihood, its excess over the point's with a standard error, and so on."""
    fit, (x, y, x_test, y_test) = fitted(name, seed, epochs)
    scored: dict[str, dict[str, float]] = {}
    points = torch.zeros(())
    for kind, p, own in predictions(fit, (x, y), x_test, every):
        losses = -p.gather(1, y_test[:, None])[:, 0].log()
        points = losses if kind == "point" else points
        excess = losses - points
        scored[kind] = {
            "nll": float(losses.mean()),
            "excess": float(excess.mean()),
            "standard_error": float(excess.std() / len(excess) ** 0.5),
            "accuracy": float((p.argmax(1) == y_test).double().mean()),
            "calibration_error": calibration_error(p, y_test),
            **own,
        }
    return scored


def keep(name: str, seed: int, found: dict[str, dict[str, float]]) -> None:
    """Add what was measured to the file, beside other kinds of the same fit: its point estimate has to be the same."""
    seeds = json.loads(OUT.read_text())["seeds"] if OUT.exists() else {}
    stored = seeds.setdefault(str(seed), {}).get(name, {})
    same = not stored or stored["point"] == found["point"]
    seeds[str(seed)][name] = {**(stored if same else {}), **found}
    OUT.write_text(json.dumps({"seeds": seeds, "provenance": provenance("cpu")}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", action="store_true", help="every kind, not the point estimate and the default alone")
    parser.add_argument("--only", nargs="+", default=list(PROBLEMS), choices=list(PROBLEMS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    for name in options.only:
        results[name] = measure(name, options.seed, every=options.every)
        print(f"{name}: " + ", ".join(f"{kind} {found['nll']:.3f}" for kind, found in results[name].items()), flush=True)
        keep(name, options.seed, results[name])
    kinds = list(next(iter(results.values())))
    rows = [("NLL / calibration error", *kinds)]
    for name, found in results.items():
        rows.append((name, *(f"{found[k]['nll']:.3f} / {found[k]['calibration_error']:.3f}" for k in kinds)))
    print(table(rows, "<" + ">" * len(kinds)))


if __name__ == "__main__":
    main()
