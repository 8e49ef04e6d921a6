"""Does it help to do what a caution says? Default fits of small trained networks; where one is cautioned, the advice is followed.

    python benchmarks/cautions.py [--seeds 10] [--epochs 20 40]        about five minutes on two cores

A caution is worth its place if following it gives more evidence in at least 8 of 10 cases.
"""

import argparse
import copy
import json
from collections import defaultdict
from pathlib import Path

import torch

import autosym
from autosym.evidence.cautions import Caution, Dead, Failed, Guessing, Little, OneStep, Rising
from autosym.runtime.provenance import provenance
from autosym.runtime.tables import table
from real import SMALL, train_plainly
from real_networks import build
from real_tasks import TASKS, Cell, tensors

OUT = Path(__file__).parent / "results" / "cautions.json"
LONGER, SLOWER = (OneStep, Rising, Little, Guessing), (Dead, Failed)


def advised(caution: Caution, epochs: int, lr: float) -> dict | None:
    """The settings that a caution asks for; None if it asks for nothing."""
    if isinstance(caution, SLOWER):
        return {"epochs": epochs, "lr": lr / 3}
    return {"epochs": 2 * epochs} if isinstance(caution, LONGER) else None


def cases(seeds: int):
    """Trained networks, relaxed: (name, model, data)."""
    for cell in SMALL:
        for seed in range(seeds):
            one = Cell(cell.network, cell.task, cell.images, seed, cell.width)
            data, _ = tensors(one, None)
            torch.manual_seed(seed)
            net = build(one.network, TASKS[one.task].channels, TASKS[one.task].classes, one.width)
            train_plainly(net, *data, one)
            yield one.name, autosym.relax(net.eval(), data[0][:8]), data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--epochs", type=int, nargs="+", default=[20, 40])
    options = parser.parse_args()
    torch.set_num_threads(1)
    fits, gains = 0, defaultdict(dict)
    for name, model, data in cases(options.seeds):
        for epochs in options.epochs:
            fit = autosym.fit(copy.deepcopy(model), data, epochs=epochs, seed=100)
            fits += 1
            for caution in fit.symmetry().cautions:
                advice = advised(caution, epochs, fit.start.lr)
                if advice is not None:
                    again = autosym.fit(copy.deepcopy(model), data, seed=100, **advice)
                    gain = float(again.evidence.log_evidence - fit.evidence.log_evidence)
                    gains[type(caution).__name__][f"{name}, {epochs} epochs"] = gain
                    print(f"{name}, {epochs} epochs: {type(caution).__name__}, then {gain:+.1f} nats", flush=True)
    rows = [("caution", "cases", "helped", "least", "median", "most")]
    for kind, found in gains.items():
        values = sorted(found.values())
        numbers = [f"{v:+.0f}" for v in (values[0], values[len(values) // 2], values[-1])]
        rows.append((kind, str(len(values)), str(sum(v > 0 for v in values)), *numbers))
    print(table(rows, "<>>>>>"))
    print(f"{fits} fits, {sum(map(len, gains.values()))} cautions with an advice")
    OUT.write_text(json.dumps({"fits": fits, "gains": gains, "provenance": provenance("cpu")}, indent=1) + "\n")


if __name__ == "__main__":
    main()
