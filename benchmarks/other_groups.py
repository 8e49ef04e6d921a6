"""Groups beyond the paper's: half turns, mirror images, and quarter turns with mirror images, beside quarter turns.

    python benchmarks/other_groups.py [--jobs 14] [--seeds 3]   writes benchmarks/results/other_groups.json

8x8 digits, shifted at random, upright or moved by random elements of a group. The network has a free path, a convolution and a group
convolution in every block. Asked is whether the group's path holds more of the layers where the data have its symmetry. Networks over all
groups have twelve channels in the first block, or sixteen (D4).
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import autosym
import pool
from autosym.evidence.predictive import scores
from autosym.linear.groups import GROUPS
from autosym.nn import nets
from autosym.papers import datasets
from autosym.runtime.provenance import provenance
from priors import arguments

OUT = Path(__file__).parent / "results" / "other_groups.json"
WIDTHS = {"c2": 6, "flip-horizontal": 6, "c4": 3, "d4": 2}
TEST = 360


@dataclass(frozen=True)
class Case:
    """One fit of a network over a group, to digits that were moved by its elements or are upright."""

    group: str
    moved: bool
    seed: int


def moved(x: Tensor, group: str, seed: int) -> Tensor:
    """Every image (N, 1, H, H) moved by a random element."""
    element = torch.randint(len(GROUPS[group]), (len(x),), generator=torch.Generator().manual_seed(seed))
    return torch.stack([GROUPS[group].act(int(g), image) for g, image in zip(element, x, strict=True)])


def tensors(case: Case) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Training and test pairs, shifted and moved anew for each part, normalised by the training images."""
    images, labels = datasets.digits()
    parts = []
    for part, rows in enumerate(datasets.split(len(images), TEST, case.seed)):
        x = datasets.shifted(images[rows], 2 * case.seed + part)[:, None]
        parts.append((moved(x, case.group, 1000 + 2 * case.seed + part) if case.moved else x, labels[rows]))
    (x, y), (x_test, y_test) = parts
    return ((x - x.mean()) / x.std(), y), ((x_test - x.mean()) / x.std(), y_test)


def fitted(case: Case, epochs: int) -> dict:
    """The mean share over blocks of every path, accuracy and evidence."""
    train, (x, y) = tensors(case)
    torch.manual_seed(case.seed)
    name = f"f-fc+conv+gconv:{case.group}"
    net = nets.build(name, (1, 8, 8), 10, WIDTHS[case.group], (1, 2, 4), (2, 2, 2), hidden=8)
    fit = autosym.fit(net, train, epochs=epochs, seed=case.seed)
    with torch.no_grad():
        accuracy = 100 * scores(net(x), y).accuracy
    shares: dict[str, list[float]] = {}
    for path in fit.symmetry():
        shares.setdefault(path.path, []).append(path.share)
    return {"shares": shares, "accuracy": accuracy, "log_evidence": float(fit.evidence.log_evidence)}


def group_share(entry: dict) -> float:
    """The mean over blocks of the share of the group's path."""
    shares = entry["shares"][f"gconv:{entry['group']}"]
    return sum(shares) / len(shares)


def show(entry: dict) -> str:
    name = f"{entry['group']}, {'moved' if entry['moved'] else 'upright'}, seed {entry['seed']}"
    return f"{name}: share {group_share(entry):.0%}, accuracy {entry['accuracy']:.1f}, {entry['seconds']:.0f} s"


def compared(found: list[dict]) -> list[dict]:
    """Of every group, by seed: the share of its path on moved and on upright digits."""
    lines = []
    for group in dict.fromkeys(entry["group"] for entry in found):
        share = {(entry["moved"], entry["seed"]): group_share(entry) for entry in found if entry["group"] == group}
        seeds = sorted({seed for _, seed in share})
        pairs = [(share[True, seed], share[False, seed]) for seed in seeds]
        accuracy = {
            where: [e["accuracy"] for e in found if e["group"] == group and e["moved"] == where] for where in (True, False)
        }
        lines.append(
            {
                "group": group,
                "moved": [pair[0] for pair in pairs],
                "upright": [pair[1] for pair in pairs],
                "larger_on_moved": sum(a > b for a, b in pairs),
                "seeds": len(pairs),
                "accuracy_moved": sum(accuracy[True]) / len(pairs),
                "accuracy_upright": sum(accuracy[False]) / len(pairs),
            }
        )
    return lines


def main() -> None:
    options = arguments(__doc__, OUT)
    cases = [Case(g, m, s) for s in range(1, options.seeds + 1) for g in WIDTHS for m in (True, False)]
    settings = {"epochs": options.epochs}
    found = pool.answers(fitted, cases, options.jobs, options.out.with_suffix(".jsonl"), settings, show=show)
    result = {"table": compared(found), "settings": settings, "provenance": provenance(), "cases": found}
    for line in result["table"]:
        where = [" ".join(f"{share:4.0%}" for share in line[key]) for key in ("moved", "upright")]
        print(f"{line['group']:16s} share on moved digits {where[0]}, on upright ones {where[1]}")
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
