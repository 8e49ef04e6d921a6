"""Do steps in bfloat16 change what is learned? Digits in quadrants, a relaxed CNN of six layers, trained before, two seeds, CPU.

    python benchmarks/bf16.py [--quick]        writes benchmarks/results/bf16.json

Two questions (the digit; the digit and whether it is left or right), fits of the same seeds with and without ``bf16``, and in float32 with
the samples in another order: that is how much such runs differ by chance. Log evidence at the
end, the free part of the network, and accuracy on digits that were not trained on. What it saves is measured by
``python benchmarks/gpu.py modes``: a CPU is slower in bfloat16.
"""

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import autosym
from autosym.papers import datasets
from autosym.runtime.provenance import provenance
from autosym.runtime.tables import table
from real_networks import CNN

OUT = Path(__file__).parent / "results" / "bf16.json"
TRAIN = 600


def trained(x: Tensor, y: Tensor, epochs: int) -> CNN:
    """A plain network, as users bring it."""
    net = CNN(x.shape[1], 10, 8)
    optimiser = torch.optim.Adam(net.parameters(), 3e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(64):
            optimiser.zero_grad()
            F.cross_entropy(net(x[rows]), y[rows]).backward()
            optimiser.step()
    return net.eval()


WAYS = ("float32", "float32, another order", "bfloat16")


def cell(question: str, seed: int, way: str, epochs: int) -> dict:
    """What one fit ends with."""
    images, labels = datasets.digits()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    x, quadrant = datasets.in_quadrants(images[order], 0, seed)
    y = labels[order] if question == "digit" else labels[order] % 5 + 5 * (quadrant % 2)
    x = (x - x[:TRAIN].mean()) / x[:TRAIN].std()
    torch.manual_seed(seed)
    net = autosym.relax(trained(x[:TRAIN], y[:TRAIN], epochs), x[:2])
    order_seed = seed + 100 * ("another" in way)
    fit = autosym.fit(
        net, (x[:TRAIN], y[:TRAIN]), epochs=epochs, seed=order_seed, curvature="kronecker", bf16=way == "bfloat16"
    )
    with torch.no_grad():
        accuracy = float((net(x[TRAIN:]).argmax(1) == y[TRAIN:]).double().mean())
    return {
        "question": question,
        "seed": seed,
        "way": way,
        "evidence": float(fit.evidence.log_evidence),
        "free": fit.symmetry().network_share(),
        "accuracy": 100 * accuracy,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two epochs and one seed, printed only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cells, rows = [], [("question", "seed", "steps in", "log evidence", "free", "accuracy")]
    for question in ("digit", "digit and side"):
        for seed in (0,) if options.quick else (0, 1):
            for way in WAYS:
                found = cell(question, seed, way, 2 if options.quick else 15)
                cells.append(found)
                figures = (f"{found['evidence']:.1f}", f"{found['free']:.1%}", f"{found['accuracy']:.1f} %")
                rows.append((question, str(seed), way, *figures))
                print(*rows[-1], flush=True)
    print(table(rows, "<<<>>>"))
    if not options.quick:
        OUT.write_text(json.dumps({"cells": cells, "provenance": provenance("cpu")}, indent=1) + "\n")


if __name__ == "__main__":
    main()
