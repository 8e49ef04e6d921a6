"""Normalisation frozen, folded, or learned inside the evidence: what does it change? And does the evidence see a layer's scale?

    python benchmarks/normalisation.py [--seeds 8] [--epochs 60]        about fifteen minutes of one core

First a plain ResNet-20 on 400 digits, in float64: its evidence, and its evidence after one layer, and after all layers that batch
normalisation follows, are multiplied by 10 together with the running statistics. The function stays the same. Then default fits of a
relaxed small ResNet on 600 digits.
"""

import argparse
import copy
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autosym
from autosym.bayes.priors import Prior
from autosym.evidence import laplace
from autosym.papers import datasets
from autosym.runtime.provenance import provenance
from autosym.runtime.tables import table
from real import train_plainly
from real_networks import Block, build
from real_tasks import Cell, Pair, tensors

OUT = Path(__file__).parent / "results" / "normalisation.json"
CHOICES = {"frozen": {}, "folded": {"fold": True}, "learned": {"learn_normalisation": True}}
STEPS = 2000  # closed-form steps of precisions: to the end
FACTOR = 10.0


def pairs(net: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """Convolutions and the batch normalisation that follows each, as networks of this folder define them."""
    layers = [m for m in net.modules() if isinstance(m, (nn.Conv2d, nn.BatchNorm2d))]
    return list(zip(layers[::2], layers[1::2], strict=True))


@torch.no_grad()
def rescaled(net: nn.Module, which: slice) -> nn.Module:
    """The same function, with larger weights in some of the normalised layers."""
    net = copy.deepcopy(net)
    for conv, norm in pairs(net)[which]:
        assert isinstance(norm, nn.BatchNorm2d)
        conv.weight *= FACTOR
        norm.running_mean *= FACTOR
        norm.running_var *= FACTOR**2
    return net


def log_evidence(model: nn.Module, data: Pair, steps: int) -> float:
    """At precisions of one, after so many closed-form steps."""
    at = laplace.at(model, data)
    prior = Prior(at.names)
    for _ in range(steps):
        at.mackay(prior)
    return float(at(prior).log_evidence.detach())


def resnet20(width: int, images: int) -> tuple[nn.Module, Pair]:
    """Trained plainly, and what it was trained on."""
    cell = Cell("resnet20", "embedded-digit", images, width=width)
    train, _ = tensors(cell, None)
    torch.manual_seed(0)
    net = build("resnet20", 1, 10, width)
    train_plainly(net, *train, cell)
    return net, train


def of_plain(net: nn.Module, x: Tensor, y: Tensor) -> list[dict]:
    """The evidence of a network by what becomes of its normalisation, as it is and rescaled."""
    net, x, rows = net.double().eval(), x.double(), []
    for name, options in CHOICES.items():
        for steps in (STEPS, 0):
            row = {"normalisation": name, "precisions": "learned" if steps else "one"}
            for scale, which in {"as it is": slice(0), "one layer": slice(7, 8), "all layers": slice(None)}.items():
                model = autosym.relax(rescaled(net, which), x[:4], paths={}, **options)
                row[scale] = log_evidence(model, (x, y), steps)
            print(row, flush=True)
            rows.append(row)
    return rows


def small_resnet(width: int = 8) -> nn.Module:
    stem = [nn.Conv2d(1, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)]
    blocks = [Block(width, width, 1), Block(width, 2 * width, 2)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10))


def digits(seed: int, images: int) -> tuple[Pair, Pair]:
    """Digits of 16x16, in another order for every seed."""
    x, y = datasets.digits()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    x = F.interpolate(x[order, None], size=(16, 16), mode="bilinear", align_corners=False)
    x, y = (x - x.mean()) / x.std(), y[order]
    return (x[:images], y[:images]), (x[images : images + 500], y[images : images + 500])


def train_briefly(net: nn.Module, x: Tensor, y: Tensor) -> None:
    """20 epochs of Adam, as a newcomer would: a fit can still gain."""
    optimiser = torch.optim.Adam(net.parameters(), 3e-3)
    for _ in range(20):
        for rows in torch.randperm(len(x)).split(64):
            optimiser.zero_grad()
            F.cross_entropy(net(x[rows]), y[rows]).backward()
            optimiser.step()


def of_fits(seed: int, images: int, epochs: int) -> list[dict]:
    """Default fits of a small ResNet that was trained plainly, by what becomes of its normalisation."""
    train, test = digits(seed, images)
    torch.manual_seed(seed)
    net, rows = small_resnet(), []
    train_briefly(net, *train)
    for name, options in CHOICES.items():
        torch.manual_seed(seed)  # free paths that start alike
        fit = autosym.fit(autosym.relax(net.eval(), train[0][:8], **options), train, epochs=epochs, seed=seed)
        row = {"seed": seed, "normalisation": name, "before": fit.start.log_evidence, "after": float(fit.evidence.log_evidence)}
        row |= {
            "free": fit.symmetry().network_share(),
            "seconds": fit.history[-1]["seconds"],
            "accuracy before": scores(net, *test)[0],
        }
        row["accuracy"], row["loss"] = scores(fit.model, *test)
        print(row, flush=True)
        rows.append(row)
    return rows


@torch.no_grad()
def scores(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    """Accuracy in percent, and the mean negative log-likelihood."""
    f = model(x)
    return 100 * float((f.argmax(1) == y).double().mean()), float(F.cross_entropy(f, y))


def shown(rows: list[dict]) -> str:
    """The rows as a table of text."""
    cells = [[f"{value:.4f}" if isinstance(value, float) else str(value) for value in row.values()] for row in rows]
    return table([tuple(rows[0]), *map(tuple, cells)], ">" * len(rows[0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(1)
    net, train = resnet20(16, 400)
    plain = of_plain(net, *train)
    fits = [row for seed in range(options.seeds) for row in of_fits(seed, 600, options.epochs)]
    print(shown(plain), shown(fits), sep="\n")
    OUT.write_text(json.dumps({"plain": plain, "fits": fits, "provenance": provenance("cpu")}, indent=1) + "\n")


if __name__ == "__main__":
    main()
