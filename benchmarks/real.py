"""What happens to a trained network? Plainly trained networks, then relax, fit, simplify and harden as they come, at real size.

    python benchmarks/real.py --data DIR                            every run without a result, in benchmarks/results/real
    python benchmarks/real.py --data DIR --only 'cnn-*' --seconds 500   some of them; starts no new run after 500 seconds
    python benchmarks/real.py --data DIR --paths where              with other free paths than F-FC
    python benchmarks/real.py --list                                the runs, the expert's answers, and which are done
    python benchmarks/real.py --table                               what happened, by cell: means over seeds
    python benchmarks/real.py --small                               a check in under a minute on a CPU, without DIR (needs scikit-learn)

DIR holds MNIST and CIFAR-10 in their official layouts (``papers.datasets``). Only torch, numpy and safetensors are needed. Without a
checkout, set AUTOSYM_COMMIT to the commit.

A run trains a network by Adam and OneCycle, and measures it on the test set: as it is, after relax and fit, after simplify, and after
harden. The evidence before is of the plain network, its batch normalisation frozen, with precisions learned by closed-form steps. A
relaxed network computes the same function, so a fit that ends below that evidence has lost something.

A killed run goes on in the next call from what it left in --work, its plain network and the checkpoint of its fit; simplify and harden
are begun again. Several copies may share a GPU: each takes runs that no other is at. Delete --work before you change the library.
"""

import argparse
import copy
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load, save
from torch import Tensor, nn

import autosym
from autosym.bayes.priors import Prior
from autosym.evidence import laplace
from autosym.evidence.predictive import scores
from autosym.papers import measuring
from autosym.runtime import files
from autosym.runtime.provenance import provenance
from real_networks import build
from real_table import STAGES, print_table, row
from real_tasks import TASKS, Cell, Pair, tensors
from resumable import run_each, stored

OUT = Path(__file__).parent / "results" / "real"
STEPS = 20  # closed-form steps of precisions
SUBSET = 2_000  # simplify takes its curvature from so many samples at most: it makes up to 43 passes (resnet20)
HARDENED_ON = 5_000  # samples of the training set that show harden how outputs change

# Six cells tell most, so they have three seeds and all images. The CNN was ruined on digit by defaults, and needs its free paths on place.
# A ResNet has shortcuts and zero padding, which breaks shifts a little on digit; augmented CIFAR-10 is what it is used for. Depthwise
# layers have few weights beside their free paths: place shows whether those are found. In rotated another symmetry is in the way.
FULL = ("cnn digit", "cnn place", "resnet20 digit", "resnet20 cifar10-augmented", "depthwise place", "cnn rotated")
IMAGE_TASKS = ("digit", "place", "cifar10-augmented", "cifar10", "rotated", "translated", "mnist")
CELLS = [
    *(Cell(network, task, 10_000) for task in IMAGE_TASKS for network in ("cnn", "resnet20", "depthwise")),
    *(Cell("sequence", task, 10_000) for task in ("shape", "shape-place")),
    *(Cell(*cell.split(), 50_000 if "cifar10" in cell else 60_000, seed) for seed in range(3) for cell in FULL),
]
SMALL = [
    Cell("cnn", "embedded-digit", 400, width=6),
    Cell("sequence", "shape", 400, width=4),
    Cell("sequence", "shape-place", 400, width=4),
]


# ---- one run


def run(cell: Cell, data: Path | None, work: Path, epochs: int) -> dict[str, Any]:
    """Train plainly, relax, fit, simplify, harden; what was measured at each stage."""
    device, task = "cuda" if torch.cuda.is_available() else "cpu", TASKS[cell.task]
    (x, y), test = tensors(cell, data)
    train = x.to(device), y.to(device)
    torch.manual_seed(cell.seed)
    net = build(cell.network, task.channels, task.classes, cell.width).to(device)
    before = plainly_trained(net, cell, train, test, work)
    fit, after = fitted(net, cell, train, test, work, epochs)
    simple, simplified = simplest(fit, train, test)
    hardened: dict[str, Any] = {}
    with watched(hardened):
        plain = autosym.harden(simple, (train[0][:HARDENED_ON], train[1][:HARDENED_ON]))
    hardened |= measured(plain, test) | {"layers": plain.hardening.layers}
    config = asdict(cell) | {"epochs": epochs, "plain_epochs": cell.plain_epochs, "batch_size": cell.batch_size}
    stages = dict(zip(STAGES, (before, after, simplified, hardened), strict=True))
    return {"config": config, "expert": task.symmetric, **stages, "provenance": provenance(device)}


def plainly_trained(net: nn.Module, cell: Cell, train: Pair, test: Pair, work: Path) -> dict[str, Any]:
    """Train ``net`` in place, or read what an earlier call trained; its scores, and its evidence with learned precisions."""
    weights, record = work / "plain.safetensors", work / "plain.json"
    if record.exists():
        net.load_state_dict(load(weights.read_bytes()))
        before = json.loads(record.read_text())
    else:
        before = {}
        with watched(before):
            train_plainly(net, *train, cell)
    net.eval()
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.requires_grad_(False)  # a point estimate outside the evidence, as relax makes it
    if not record.exists():
        before |= measured(net, test) | {"log_evidence": log_evidence(net, train)}
        files.write(weights, save(net.state_dict()))
        measuring.write(before, record)
    return before


def train_plainly(net: nn.Module, x: Tensor, y: Tensor, cell: Cell) -> None:
    """Adam with OneCycle on whole batches."""
    noise = torch.Generator(x.device).manual_seed(cell.seed)
    batches = len(x) // cell.batch_size
    optimiser = torch.optim.Adam(net.parameters(), 2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 5e-3, cell.plain_epochs * batches)
    net.train()
    for _ in range(cell.plain_epochs):
        for rows in torch.randperm(len(x), device=x.device).split(cell.batch_size)[:batches]:
            inputs = x[rows] if cell.augment is None else cell.augment(x[rows], noise)
            optimiser.zero_grad()
            F.cross_entropy(net(inputs), y[rows]).backward()
            optimiser.step()
            schedule.step()


def fitted(net: nn.Module, cell: Cell, train: Pair, test: Pair, work: Path, epochs: int) -> tuple[autosym.Fit, dict[str, Any]]:
    """relax with the cell's free paths and fit by its defaults, from the checkpoint if there is one."""
    after: dict[str, Any] = {}
    seen = [time.perf_counter()]  # when the last epoch ended

    def told(line: dict[str, Any]) -> None:
        seen.append(time.perf_counter())
        said = {key: line[key] for key in ("epoch", "loss", "log_evidence", "seconds") if key in line}
        print(cell.name, *(f"{key} {value:.6g}" for key, value in said.items()), file=sys.stderr, flush=True)

    torch.manual_seed(cell.seed)
    with watched(after):
        fit = autosym.fit(
            autosym.relax(net, train[0][:8], paths=cell.paths),
            train,
            epochs=epochs,
            batch_size=cell.batch_size,
            augment=cell.augment,
            seed=cell.seed,
            log=told,
            checkpoint=work / measuring.CHECKPOINT,
            checkpoint_seconds=20,
            resume=True,
        )
    after["seconds"] = fit.history[-1]["seconds"] + time.perf_counter() - seen[-1]  # of earlier calls too
    after |= measured(fit.model, test) | shares(fit.symmetry())
    return fit, after | {
        "log_evidence": float(fit.evidence.log_evidence),
        "recoveries": fit.recoveries,
        "chosen_by": fit.chosen_by,
    }


def simplest(fit: autosym.Fit, train: Pair, test: Pair) -> tuple[autosym.Fit, dict[str, Any]]:
    """simplify with other weights as they are, on a subset of many samples; if it refuses a dead network, the fit and the reason."""
    found: dict[str, Any] = {}
    try:
        with watched(found):
            simple = autosym.simplify(fit, train, refit=0, **({"subset": SUBSET} if len(train[0]) > SUBSET else {}))
    except ValueError as error:
        return fit, found | {"refused": str(error)}
    found |= measured(simple.model, test) | shares(simple.symmetry())
    found["left_out"] = sum(path.left_out for path in simple.model.simplification.paths)
    return simple, found | {"log_evidence": log_evidence(simple.model, train, simple.prior)}


def log_evidence(model: nn.Module, data: Pair, prior: Prior | None = None) -> float:
    """Laplace evidence by exact curvature of all data, with precisions learned from those of ``prior`` on, or from 1."""
    at = laplace.at(model, data)
    prior = Prior(at.names) if prior is None else copy.deepcopy(prior)
    for _ in range(STEPS):
        at.mackay(prior)
    return float(at(prior).log_evidence.detach())


def measured(model: nn.Module, test: Pair) -> dict[str, Any]:
    """Scores on the test set, in percent where they are parts, and the number of parameters."""
    found = measuring.in_percent(scores(measuring.outputs_of(model, test[0]), test[1]))
    return {key: known(value) for key, value in found.items()} | {"parameters": sum(p.numel() for p in model.parameters())}


def shares(found: autosym.Symmetry) -> dict[str, Any]:
    """Free shares by layer and of the network, and which cautions there are."""
    return {
        "free_share": {layer: known(share) for layer, share in found.free_share().items()},
        "network_share": known(found.network_share()),
        "cautions": [type(caution).__name__ for caution in found.cautions],
    }


def known(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


@contextmanager
def watched(stage: dict[str, Any]) -> Iterator[None]:
    """Adds seconds, and on a GPU the peak of its memory, to a stage."""
    on_gpu, begun = torch.cuda.is_available(), time.perf_counter()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    try:
        yield
    finally:
        if on_gpu:
            torch.cuda.synchronize()
        stage["seconds"] = time.perf_counter() - begun
        stage["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None


# ---- all runs


def run_all(cells: Sequence[Cell], data: Path | None, results: Path, work: Path, epochs: int | None, seconds: float) -> int:
    """Run what has no result and no other copy is at; returns how many failed."""

    def measured_run(cell: Cell, own: Path) -> dict[str, Any]:
        torch.cuda.empty_cache()
        return run(cell, data, own, epochs or (20 if cell.images <= 10_000 else 12))

    return run_each(cells, measured_run, lambda result: "  ".join(row([result])), results, work, seconds)


def small() -> int:
    """The small version; 1 if a network collapsed or ended below its start."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results"
        failed = run_all(SMALL, None, results, Path(folder) / "work", 8, math.inf)
        counts = print_table(stored(results))
    return int(failed + counts["collapse"] + counts["less evidence"] > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder of MNIST and CIFAR-10")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="runs whose names match, as in 'cnn-*-10000-0'")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no new run after so many")
    parser.add_argument("--paths", default="f-fc", help="the free paths that relax adds")
    parser.add_argument("--epochs", type=int, help="of fit: by default 20 with 10,000 samples or less, 12 with more")
    parser.add_argument("--images", type=int, help="no more training samples than these: to try it out")
    parser.add_argument("--results", type=Path, default=OUT, help="the folder of results")
    parser.add_argument("--work", type=Path, default=Path("runs/real"), help="the folder of runs that are not done")
    for name, what in (("list", "name the runs"), ("table", "print the table"), ("small", "a check on a CPU")):
        parser.add_argument(f"--{name}", action="store_true", help=what)
    options = parser.parse_args()
    most = options.images or max(cell.images for cell in CELLS)
    cells = dict.fromkeys(replace(cell, images=min(cell.images, most), paths=options.paths) for cell in CELLS)
    cells = [cell for cell in cells if fnmatch(cell.name, options.only)]
    if options.small:
        return small()
    if options.table:
        print_table(stored(options.results))
    elif options.list:
        for cell in cells:
            done = "done" if (options.results / f"{cell.name}.json").exists() else ""
            print(f"{cell.name:36s} shifts keep the label: {'yes' if TASKS[cell.task].symmetric else 'no':3s}  {done}")
    elif not cells or options.data is None:
        parser.error("--data DIR is missing" if cells else f"no run is called {options.only}")
    else:
        return int(run_all(cells, options.data, options.results, options.work, options.epochs, options.seconds) > 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
