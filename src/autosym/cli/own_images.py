"""What the command line does with a user's own files: ``train`` a network on images, ``audit`` a saved network.

Nothing is chosen by hand or by held-out data. The rules in ``working_size``, ``network_for`` and ``schedule_for`` choose the size, the
network and the length of training from the images and their number. The notes of the result say what was done.
"""

import math
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autosym.answer import discovering
from autosym.answer.equivariance import SHIFTS, EquivarianceError, equivariance_error
from autosym.answer.hypotheses import sized
from autosym.cli import exported, pictures, tries
from autosym.evidence.predictive import Scores, scores
from autosym.nn import nets
from autosym.nn.rebuilding import rebuilt
from autosym.papers import datasets
from autosym.papers.measuring import CHECKPOINT, METHODS, cell_of, in_percent, outputs_of, write
from autosym.report import answered, findings, run_files, words
from autosym.runtime.provenance import provenance
from autosym.training import checkpoint
from autosym.training.fitted import FILE, Fit, load
from autosym.training.schedule import Schedule

WEIGHT_STEPS = 1500  # least number of training steps
RATE = 0.05  # of ``train``. At 0.1, the rate of ``fit`` for so few steps, most units of the last layers died on a few hundred images
LARGEST = 32  # pixels of a side, if --size is not given
LARGEST_SIDE = 4096  # pixels that a result.json can ask for

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Run:
    """The options of a run; the rules decide on those that are None."""

    task: str  # the data
    model: str = "f-fc+conv"
    method: str = "evidence"
    epochs: int | None = None
    seed: int = 0
    size: tuple[int, int] | None = None
    classes: int | None = None
    test: float = 0.0
    lr: float | None = None
    tries: int = tries.TRIES  # runs at most, if nothing is learned
    simplify: bool = True  # leave out paths that the data do not support


def working_size(height: int, width: int) -> tuple[int, int]:
    """Sides that are multiples of 4, so that maps can be halved twice. The larger side is at most LARGEST; proportions are kept."""
    scale = min(1.0, LARGEST / max(height, width))
    rows, columns = (max(4, 4 * round(scale * side / 4)) for side in (height, width))
    return rows, columns


def network_for(run: Run, in_shape: Sequence[int], classes: int, samples: int) -> dict[str, Any]:
    """Arguments of ``nets.build`` that follow from the images and their number."""
    return {"name": run.model, "in_shape": tuple(in_shape), "classes": classes, **sized(in_shape, samples)}


def schedule_for(run: Run, samples: int) -> Schedule:
    """The defaults of ``fit``, long enough for WEIGHT_STEPS steps, with at most about a hundred evidence steps."""
    batch_size = min(64, max(8, samples // 8))
    epochs = max(60, math.ceil(WEIGHT_STEPS * batch_size / samples)) if run.epochs is None else run.epochs
    return Schedule(epochs=epochs, batch_size=batch_size, step=METHODS[run.method], lr=run.lr)


def train(run: Run, out: Path, progress: bool = False, resume: bool = False) -> dict[str, Any]:
    """Learn the symmetry of images and write result.json, report.json, history.jsonl, fit.safetensors and a checkpoint to ``out``."""
    _check(run)
    found = pictures.read(Path(run.task), run.size, run.classes)
    training, test, preprocessing, notes = _prepared(found, run)
    network = network_for(run, training[0].shape[1:], len(found.classes), len(training[0]))
    schedule = replace(schedule_for(run, len(training[0])), lr=RATE if run.lr is None else run.lr)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    start = time.perf_counter()

    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nets.build(**network).to(device)

    runs = tries.Tries(out, build, training, schedule, run.seed, run.tries, run.simplify, resume, progress)
    fitted = runs.best()
    held = len(test[0]) > 1
    kind, measured = ("held out", test) if held else ("training", training)
    shown = findings.contents(fitted, measured, title=Path(run.task).name, measured_on=kind)
    row = cell_of(run) | (_measured(fitted.model, test) if held else dict.fromkeys(field.name for field in fields(Scores)))
    row |= _row(fitted, training) | {"tested": len(test[0])}
    fitted.save(out)
    row["seconds"] = runs.before + time.perf_counter() - start
    result = _said(shown) | {
        "row": row,
        "config": asdict(run),
        "symmetry": shown["symmetry"],
        "simplification": shown["simplification"],
        "tries": runs.made,
        "network": network,
        "preprocessing": preprocessing,
        "classes": found.classes,
        "notes": [*notes, *runs.notes()],
        "schedule": findings.settings(fitted.schedule),
        "provenance": provenance(device),
    }
    write(result, out / "result.json")
    options = {"model": run.model, "seed": run.seed, "epochs": run.epochs, "classes": run.classes, "test": run.test or None}
    options |= {"lr": run.lr, "tries": None if run.tries == tries.TRIES else run.tries}
    asked = ["fit", run.task, *([] if run.simplify else ["--no-simplify"])]
    write(shown | {"command": _command(run, asked, options)}, out / "report.json", indent=None)
    return result


def _said(shown: Mapping[str, Any]) -> dict[str, Any]:
    """The sentences of a result."""
    decided = findings.decided(shown)
    return {"headline": words.headline(decided, shown["ranges"]), "cautions": words.cautions(decided)}


def _row(fitted: Fit, training: Pair) -> dict[str, Any]:
    """The numbers of a fit and of the images that it was trained on."""
    value = fitted.evidence.log_evidence.item()
    return {
        "train_accuracy": _measured(fitted.model, training)["accuracy"],
        "log_evidence": value,
        "evidence": value / len(training[0]),
        "samples": len(training[0]),
        "parameters": sum(p.numel() for p in fitted.model.parameters()),
    }


def discover(
    run: Run,
    out: Path,
    symmetries: Sequence[str],
    minutes: float | None = None,
    budget: float | None = None,
    seeds: int = 3,
    progress: bool = False,
) -> dict[str, Any]:
    """Find the symmetries of images; write result.json, the answer with its fit, and report.html if jinja2 is there, to ``out``."""
    _check(run)
    found = pictures.read(Path(run.task), run.size, run.classes)
    training, test, preprocessing, notes = _prepared(found, run)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    training, test = ((x.to(device), y.to(device)) for x, y in (training, test))
    held = len(test[0]) > 1
    answer = discovering.discover(
        run.model,
        training,
        symmetries,
        budget=budget,
        minutes=minutes,
        seeds=seeds,
        held_out=test if held else None,
        resume=out / "runs",
        progress=progress,
        network={"classes": len(found.classes)},
        schedule=schedule_for(run, len(training[0])),
    )
    answer.save(out)
    options = {"minutes": minutes, "budget": budget, "seeds": seeds, "model": run.model, "test": run.test or None, "out": out}
    options["classes"] = run.classes
    command = _command(run, ["discover", run.task, "--symmetries", *symmetries], options)
    result = answer.as_dict() | {
        "headline": answered.headline(answer.as_dict()["verdicts"]),
        "text": str(answer),
        "notes": [*notes, *answer.notes],
        "accuracy": _measured(answer.fit.model, test)["accuracy"] if held else None,
        "preprocessing": preprocessing,
        "classes": found.classes,
        "command": command,
        "provenance": provenance(device),
    }
    try:
        page = answered.write(answer, out / "report.html", Path(run.task).name, command, result["provenance"])
        result["page"] = f"Report: {page}"
    except ImportError as error:
        result["page"] = f"No report: {error}"
    write(result, out / "result.json")
    return result


def _command(run: Run, words: Sequence[str], options: Mapping[str, Any]) -> str:
    """The command that repeats a run: its ``words``, then ``options`` that are not None."""
    size = run.size and f"{run.size[0]}x{run.size[1]}"
    given = [f"--{key}={value}" for key, value in (*options.items(), ("size", size)) if value is not None]
    return shlex.join(["autosym", *words, *given])


def _check(run: Run) -> None:
    if not 0 <= run.test < 1:
        raise ValueError(f"--test is the fraction of images to hold out, from 0 to below 1, got {run.test}")
    if run.tries < 1:
        raise ValueError(f"--tries must be at least 1, got {run.tries}")
    if run.size is not None and any(side < 4 or side % 4 for side in run.size):
        raise ValueError(f"--size {run.size[0]}x{run.size[1]}: both sides must be multiples of 4, so that maps can be halved")


def _prepared(found: pictures.Pictures, run: Run) -> tuple[Pair, Pair, dict[str, Any], list[str]]:
    """Training and test pairs, resized, and normalised by the training images; the preprocessing; notes."""
    images, notes = found.images, list(found.notes)
    height, width = images.shape[2:]
    size = run.size or working_size(height, width)
    if size != (height, width):
        notes.append(f"images of {height}x{width} were resized to {size[0]}x{size[1]} (--size HxW for another)")
        images = pictures.resized(images, size)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(run.seed))
    held = round(run.test * len(images))
    test, rest = order[:held].sort().values, order[held:].sort().values
    missing = set(found.labels.tolist()) - set(found.labels[rest].tolist())
    if missing:
        raise ValueError(
            f"no image of {found.classes[min(missing)]} is left to train on: hold out less by --test, or add images"
        )
    mean, std = images[rest].mean((0, 2, 3)), images[rest].std((0, 2, 3))
    if not (std > 0).all():
        raise ValueError(f"channel {int((std == 0).nonzero()[0])} of all images is constant: drop it")
    preprocessing = {"size": size, "mean": mean.tolist(), "std": std.tolist()}
    images = datasets.normalised(images, mean.tolist(), std.tolist())
    return (images[rest], found.labels[rest]), (images[test], found.labels[test]), preprocessing, notes


def _measured(model: nn.Module, pair: Pair) -> dict[str, float]:
    return in_percent(scores(outputs_of(model, pair[0]), pair[1]))


def audit(
    model: Path,
    data: Path,
    groups: Sequence[str] = (),
    size: tuple[int, int] | None = None,
    mean: Sequence[float] = (),
    std: Sequence[float] = (),
    samples: int = 64,
) -> EquivarianceError:
    """Measured equivariance of a saved network: an exported program (.pt2), or the folder of a run of ``autosym fit``.

    The default ``groups`` are shifts and every exact group that acts on images of this shape. ``size``, ``mean`` and ``std``
    (one, or one for each channel) prepare the images for an exported program; a run knows its own.
    """
    if model.is_dir():
        if size or mean or std:
            raise ValueError(f"{model} is a run and knows the size, mean and std of its images: leave these options out")
        network, preprocessing = _read_run(model)
        size, mean, std = preprocessing["size"], preprocessing["mean"], preprocessing["std"]
    elif model.exists():
        network = exported.load(model)
    else:
        raise FileNotFoundError(
            f"{model} does not exist: name an exported program (.pt2), or the folder of a run of autosym fit"
        )
    images = pictures.read(data, size).images
    if model.is_dir() and images.shape[1] != len(mean):
        raise ValueError(
            f"the run had images with {len(mean)} channels, but the images of {data} have {images.shape[1]}: give other images"
        )
    images = images[torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[:samples]]
    if mean or std:
        images = datasets.normalised(images, _channels(mean, images, 0.0), _channels(std, images, 1.0))
    chosen = list(groups) or [SHIFTS, "flip-horizontal", "flip-vertical", "c2"]
    if not groups and images.shape[2] == images.shape[3]:
        chosen += ["c4", "d4"]
    return equivariance_error(network, chosen, (images, torch.zeros(len(images))), samples=samples)


def _channels(values: Sequence[float], images: Tensor, default: float) -> list[float]:
    given = torch.tensor(list(values) or [default])
    if not torch.isfinite(given).all() or (default and not (given > 0).all()):
        raise ValueError(
            f"--{'std' if default else 'mean'} {' '.join(map(str, values))}: must be finite{', and positive' * bool(default)}"
        )
    if len(given) not in (1, images.shape[1]):
        raise ValueError(f"{len(given)} values for the {images.shape[1]} channels of the images: give one, or one for each")
    return given.tolist()


def _read_run(folder: Path) -> tuple[nn.Module, dict[str, Any]]:
    """The network of a finished run, and how its images were prepared."""
    path = folder / "result.json"
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: {folder} is not a finished run of autosym fit")
    result = run_files.read(path)
    if not isinstance(result, dict) or not {"network", "preprocessing", "schedule"} <= set(result):
        raise ValueError(f"{path} does not say how its network was built: audit reads runs of autosym fit")
    with run_files.of_this_version(path):
        epochs = result["schedule"]["epochs"]
        height, width = map(int, result["preprocessing"]["size"])
        mean, std = (list(map(float, result["preprocessing"][key])) for key in ("mean", "std"))
        if not (1 <= height <= LARGEST_SIDE and 1 <= width <= LARGEST_SIDE):
            raise ValueError(f"images cannot be resized to {height}x{width}")
    network = load(folder).model if (folder / FILE).exists() else _at_checkpoint(folder, result["network"], epochs)
    return network, {"size": (height, width), "mean": mean, "std": std}


def _at_checkpoint(folder: Path, network: Mapping[str, Any], epochs: int) -> nn.Module:
    """The network of a run of version 0.1.0, which has its weights in the checkpoint."""
    path, kept = folder / "result.json", folder / CHECKPOINT
    if not kept.exists():
        raise FileNotFoundError(f"{folder / FILE} does not exist: audit needs the weights of the run; run it again")
    tensors, state = checkpoint.read(kept)
    own = {name.removeprefix("model/"): tensor for name, tensor in tensors.items() if name.startswith("model/")}
    with run_files.of_this_version(path):
        made = rebuilt(network, own)
    with run_files.of_this_version(kept):
        done = len(state["lines"])
    if done != epochs:
        raise ValueError(f"{kept} is after {done} of {epochs} epochs: go on by autosym fit --resume, or run it again")
    checkpoint.load_into(made.state_dict(), own, kept)
    return made
