"""The command line: ``autosym fit DATA``, ``audit MODEL DATA``, ``report RUN``, ``noether DATA``, ``demo``, ``run NAME``, ``table NAME``.

It ends with 0, with 1 where something is wrong with the data or a file, with 2 where it was called wrongly, and with 130 where it was
interrupted (Ctrl-C). Results go to stdout, everything else to stderr.
"""

import json as json_format
import math
import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import tyro
from tyro.conf import Positional

from autosym.cli import own_images, own_trajectories
from autosym.papers import basis as basis_functions
from autosym.papers import group_digits, images, invariance, quadrant_digits, rotated_digits, table1, table2, table3
from autosym.papers.images import mean_shares
from autosym.papers.measuring import check_results, write
from autosym.report import run_files
from autosym.report.drawing import show_symmetry
from autosym.report.writing import write_run
from autosym.runtime import processes
from autosym.runtime.provenance import VERSION
from autosym.runtime.workers import at_a_time

EXPERIMENTS: dict[str, Any] = {
    "quadrant-digits": quadrant_digits,
    "group-digits": group_digits,
    "rotated-digits": rotated_digits,
}
TABLES: dict[str, Any] = {"1": table1, "2": table2, "3": table3}


def main(arguments: Sequence[str] | None = None) -> int:
    """Learn which symmetry each layer of a network should have, from training data alone."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments == ["--version"]:
        print(f"autosym {VERSION}")
        return 0
    description = f"{main.__doc__}\n\n--version prints the version ({VERSION})."
    commands = {command.__name__: command for command in (fit, audit, report, own_trajectories.noether, demo, run, table)}
    try:
        tyro.extras.subcommand_cli_from_dict(commands, prog="autosym", description=description, args=arguments or ["--help"])
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print(f"\nautosym: interrupted{_how_to_go_on(arguments)}", file=sys.stderr)
        return 130
    except (ValueError, OSError, ImportError, processes.Lost) as error:
        print(f"autosym: {error}", file=sys.stderr)
        return 1
    except MemoryError as error:
        print(f"autosym: there is not enough memory ({error}): take fewer or smaller images", file=sys.stderr)
        return 1
    return 0


def _how_to_go_on(arguments: list[str]) -> str:
    """The command that goes on from the checkpoint of a run, where there is one."""
    if arguments[:1] not in (["fit"], ["run"]):
        return ""
    return f"; go on by: {shlex.join(['autosym', *(a for a in arguments if a != '--resume'), '--resume'])}"


def fit(
    data: Positional[Path],
    out: Path = Path("runs/fit"),
    model: str = "f-fc+conv",
    epochs: int | None = None,
    seed: int = 0,
    size: str | None = None,
    classes: int | None = None,
    test: float = 0.0,
    resume: bool = False,
    json: bool = False,
) -> None:
    """Learn the symmetry of your own images: train a network with a symmetric and a free path in every layer.

    Args:
        data: an .npz file of images (or x, X) and labels (or y, Y), or a folder with a folder of images for every class.
        out: where result.json, history.jsonl, checkpoint.safetensors and report.html are written.
        model: the paths of every layer, e.g. f-fc+conv, conv, or f-fc+conv+gconv:c4.
        epochs: how long to train; by default as long as so many images need.
        seed: of the initial weights and of the order of the images.
        size: HEIGHTxWIDTH that images are resized to; by default they keep theirs, up to 32 pixels.
        classes: how many classes there are, if integer labels do not hold all of them.
        test: the part of the images to hold out for an accuracy; nothing is chosen by it.
        resume: go on from the checkpoint there, as if the run had never stopped.
        json: print the result as JSON and nothing else.
    """
    asked = own_images.Run(str(data), model, "evidence", epochs, seed, _size(size), classes, test)
    result = own_images.train(asked, out, progress=not json, resume=resume)
    page = _page(out)
    if json:
        print(json_format.dumps(result))
        return
    for note in result["notes"]:
        print(f"Note: {note}.")
    print(result["headline"])
    for caution in result["cautions"]:
        print(f"Caution: {caution}")
    show_symmetry(Path(data).stem, result["symmetry"])
    row = result["row"]
    held_out = "" if row["accuracy"] is None else f", test accuracy {row['accuracy']:.1f} ± {row['standard_error']:.1f} %"
    print(f"Log evidence per sample {row['evidence']:.3f} nats, training accuracy {row['train_accuracy']:.1f} %{held_out}.")
    print(f"Written to {out}: result.json, history.jsonl, checkpoint.safetensors. {page}")


def audit(
    model: Positional[Path],
    data: Positional[Path],
    groups: tuple[str, ...] = (),
    size: str | None = None,
    mean: tuple[float, ...] = (),
    std: tuple[float, ...] = (),
    samples: int = 64,
    json: bool = False,
) -> None:
    """Measure the equivariance of a saved network: |f(g x) - g f(x)| / |f(x)| for every group.

    Args:
        model: a network saved by torch.export.save (.pt2), or the folder of a run of autosym fit.
        data: images, as for autosym fit; bytes are read as 0 to 1.
        groups: translations, c2, c4, d4, flip-horizontal, flip-vertical, c8; by default all exact ones that act on the images.
        size: HEIGHTxWIDTH that images are resized to, if the network takes another than theirs.
        mean: of the images, taken off before the network sees them: one, or one for each channel.
        std: of the images, which they are divided by.
        samples: how many images to measure on.
        json: print the errors as JSON and nothing else.
    """
    found = own_images.audit(model, data, groups, _size(size), mean, std, samples)
    if json:
        rows = [asdict(row) | {"error": None if math.isnan(row.error) else row.error} for row in found]
        print(json_format.dumps({"output": found.output(), "rows": rows}, allow_nan=False))
        return
    print(found)
    print("\n0 is exact, 1 is an error as large as the output itself; 1e-5 and less is rounding.")


def _size(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    found = re.fullmatch(r"(\d+)x(\d+)", text)
    if not found:
        raise ValueError(f"--size {text!r} is not HEIGHTxWIDTH in pixels, e.g. 32x32")
    return int(found[1]), int(found[2])


def demo(
    out: Path | None = None,
    groups: bool = False,
    basis: bool = False,
    jobs: int | None = None,
    epochs: int | None = None,
    json: bool = False,
) -> None:
    """Watch a network find out whether it should be convolutional: Table 1 in miniature, on embedded data, in minutes.

    Args:
        out: where result.json and the picture are written (runs/demo, with --groups runs/groups, with --basis runs/basis).
        groups: instead, compare which group digits ask for when they are upright and when they are turned.
        basis: instead, basis functions with exact evidence, in seconds: is a function even?
        jobs: how many networks to train at a time (all cores by default).
        epochs: train for fewer or more epochs than the demo's.
        json: print the result as JSON and nothing else.
    """
    out = out or Path("runs") / ("groups" if groups else "basis" if basis else "demo")
    if groups:
        return _demo_groups(out, epochs, json)
    if basis:
        found = basis_functions.demo(out)
        print(json_format.dumps(found)) if json else basis_functions.show(found, out)
        return
    runs = [quadrant_digits.RUNS[f"quadrant-digits/{task}/{model}/{method}"] for task, model, method in quadrant_digits.DEMO]
    if epochs is not None:
        runs = [replace(run, epochs=epochs) for run in runs]
    jobs = min(len(runs), os.cpu_count() or 1) if jobs is None else jobs
    if not json:
        print(f"Training {len(runs)} small networks on digits placed in one of four quadrants, {jobs} at a time.", flush=True)
    results = []
    for result in quadrant_digits.execute_all(runs, jobs):
        results.append(result)
        row = result["row"]
        if not json:
            cell = f"{row['task']}: {row['model']} by {row['method']}"
            print(
                f"  {len(results):2d}/{len(runs)}  {cell:42s} {row['accuracy']:5.1f} %  {row['seconds']:4.0f} s",
                flush=True,
            )
    summary = quadrant_digits.summarise(results)
    write(summary, out / "result.json")
    quadrant_digits.figure(summary, out / "demo.png")
    if json:
        print(json_format.dumps(summary))
        return
    quadrant_digits.show(summary)
    print(f"Written: {out / 'result.json'} and {out / 'demo.png'}")


def _demo_groups(out: Path, epochs: int | None, json: bool) -> None:
    results = {}
    for name, config in group_digits.RUNS.items():
        results[config.task] = group_digits.execute(replace(config, epochs=epochs or config.epochs))
        write(results[config.task], out / name.replace("/", "-") / "result.json")
    shares = {task: mean_shares(result["symmetry"]) for task, result in results.items()}
    if json:
        print(json_format.dumps({"rows": [result["row"] for result in results.values()], "mean_shares": shares}))
        return
    group_digits.show(results, shares)


def run(
    name: Positional[str],
    all: bool = False,
    seeds: int = 1,
    epochs: int | None = None,
    seed: int | None = None,
    samples: int | None = None,
    integrator: str | None = None,
    substeps: int | None = None,
    out: Path | None = None,
    results: Path = images.RESULTS,
    data_dir: Path | None = None,
    resume: bool = False,
    jobs: int = 1,
    json: bool = False,
) -> None:
    """Train one named run of an experiment, e.g. quadrant-digits, rotated-digits (all three variants), or table1/digit/f-fc+conv/evidence.

    Args:
        name: the run, or the beginning of the names of several with --all; an unknown name lists them all.
        all: every run whose name begins so.
        seeds: how many seeds of each, counted from its first.
        epochs: other than the experiment's.
        seed: other than the experiment's.
        samples: train on fewer (of tables 1 to 3).
        integrator: midpoint, or euler as published (of noether).
        substeps: of the integrator in one step of the data (of noether).
        out: where result.json, history.jsonl, checkpoint.safetensors and report.html are written (runs/NAME by default).
        results: where results of tables 1 to 3 are kept, beside the predicted labels.
        data_dir: the folder of MNIST or CIFAR-10 ($AUTOSYM_DATA by default; downloaded where it is absent).
        resume: go on from the checkpoint there, as if the run had never stopped.
        jobs: with --all, how many runs at a time, each in a process of its own; one that fails does not end the others.
        json: print the result as JSON and nothing else.
    """
    if name == "rotated-digits":
        if all or resume or seeds != 1 or (samples, integrator, substeps) != (None, None, None):
            raise ValueError(f"{name} trains its three variants at a time; for other options name one, e.g. {name}/full")
        found = rotated_digits.run_all(out or Path("runs") / name, epochs, seed, progress=not json)
        if json:
            print(json_format.dumps(found))
            return
        rotated_digits.show(found)
        print(f"Written: {(out or Path('runs') / name) / 'result.json'}, and the files of each variant beside it")
        return
    named = _named()
    chosen = (
        [key for key in named if key.startswith(name) and key not in EXPERIMENTS]
        if all
        else [key for key in (name, f"{name}/evidence") if key in named][:1]
    )
    if not chosen:
        near = [key for key in named if key.startswith(name)] or list(named)
        more = "" if len(near) == len(named) else ", or take all of them by --all"
        raise ValueError("\n  ".join(["runs are:", *near]) + f"\nno run is called {name!r}: name one of these{more}")
    if seeds < 1:
        raise ValueError(f"--seeds counts seeds from 1, got {seeds}")
    asked = {"epochs": epochs, "seed": seed, "samples": samples, "integrator": integrator, "substeps": substeps}
    changes = {key: value for key, value in asked.items() if value is not None}
    todo: list[tuple] = []
    for key in chosen:
        config = named[key][1]
        for offset in range(seeds):
            try:
                varied = replace(config, **{"seed": config.seed, **changes})
            except TypeError as error:
                known = {field.name for field in fields(config)}
                raise ValueError(
                    f"{key} has no {', '.join(sorted(set(changes) - known))} to choose: samples are for tables 1 to 3, integrator and "
                    "substeps for noether"
                ) from error
            varied = replace(varied, seed=varied.seed + offset)
            many = len(chosen) * seeds > 1
            folder = (out or Path("runs")) / (f"{key}/seed{varied.seed}" if many else "" if out else key)
            todo.append((key, varied, folder, results, data_dir, resume, json, jobs == 1))
    if jobs > 1:
        return at_a_time(_run, todo, jobs)
    for arguments in todo:
        _run(*arguments)


def _named() -> dict[str, tuple[Any, Any]]:
    """Every run by name, with the module that executes it."""
    named = {key: (module, value) for module in EXPERIMENTS.values() for key, value in module.RUNS.items()}
    named |= {key: (images, value) for table in TABLES.values() for key, value in table.RUNS.items()}
    named |= {key: (invariance, value) for key, value in invariance.RUNS.items()}
    return named | {key: (own_trajectories, value) for key, value in own_trajectories.experiment.RUNS.items()}


def _run(
    name: str,
    config: Any,
    out: Path,
    results: Path,
    data_dir: Path | None,
    resume: bool,
    json: bool,
    progress: bool,
) -> None:
    module = _named()[name][0]
    if module is own_trajectories:
        return own_trajectories.run(config, out, results, resume, json)
    more = {"results": results, "data_dir": data_dir} if module in (images, invariance) else {}
    result = module.execute(config, progress=progress and not json, out=out, resume=resume, **more)
    write(result, out / "result.json")
    if not processes.first():
        return
    page = _page(out)
    if json:
        print(json_format.dumps(result))
        return
    row = result["row"]
    evidence = "" if row["evidence"] is None else f"log evidence per sample {row['evidence']:.3f} nats, "
    print(f"{name}: test accuracy {row['accuracy']:.2f} +- {row['standard_error']:.2f} %, {evidence}{row['seconds']:.0f} s")
    if result["symmetry"]:
        show_symmetry(row["task"], result["symmetry"])
    for caution in result.get("cautions", ()):
        print(f"Caution: {caution}")
    for found in result["ranges"]:
        print(f"Averaged over {found['text']}")
    kept = f", and {results / config.file}.json" if more else ""
    print(f"Written: {out / 'result.json'} and {out / 'history.jsonl'}{kept}")
    print(page, flush=True)


def _page(run: Path) -> str:
    """Write report.html beside a result if jinja2 is there; says what became of it."""
    try:
        return f"Report: {write_run(run)}"
    except ImportError as error:
        return f"No report: {error}; then `autosym report {run}`"


def report(run: Positional[Path], out: Path | None = None, compare: tuple[Path, ...] = ()) -> None:
    """Write the report of a run as one HTML file that opens anywhere, from the files of the run.

    Args:
        run: the folder of a run, or its result.json.
        out: the file to write, or its folder (report.html beside the result by default).
        compare: other runs on the same data, whose evidence is shown beside this one's.
    """
    print(f"Written: {write_run(run, out, compare)}")


def table(name: Positional[str], results: Path | None = None, figure: Path | None = None, json: bool = False) -> None:
    """Print a table from results: 1, 2, 3 or noether of the papers beside ours, or quadrant-digits after autosym demo.

    Args:
        name: 1, 2, 3, invariance-1, invariance-2, invariance-3, noether or quadrant-digits.
        results: the folder of results of these tables (results, which a checkout has), or the file that the demo wrote.
        figure: also draw what the networks of a published table learned, to this file.
        json: print the rows as JSON and nothing else.
    """
    folder, number = results or images.RESULTS, name.removeprefix("table")
    if name == "noether":
        return own_trajectories.table(folder, json)
    if name in invariance.TABLES or number in TABLES:
        if number in TABLES:
            found = images.rows(f"table{number}", TABLES[number].RUNS, TABLES[number].PAPER, folder)
            draw, show = partial(images.figure, f"table{number}", TABLES[number].RUNS), partial(images.show, number)
        else:
            found = invariance.rows(name, folder)
            draw, show = partial(invariance.figure, name), partial(invariance.show, name)
        check_results(found, folder, f"table{number}" if number in TABLES else name)
        if figure is not None:
            draw(figure, folder)
        print(json_format.dumps({"rows": found})) if json else show(found)
        if figure is not None and not json:
            print(f"Written: {figure}")
        return
    if name != "quadrant-digits":
        tables = ("1", "2", "3", *invariance.TABLES, "noether", "quadrant-digits")
        raise ValueError(f"no table is called {name!r}; there are: {', '.join(tables)}")
    results = results or Path("runs/demo/result.json")
    if not results.exists():
        raise FileNotFoundError(f"{results} does not exist: run `autosym demo` first, or name another file by --results")
    summary = run_files.read(results)
    with run_files.of_this_version(results):
        if json:
            print(json_format.dumps({"rows": summary["rows"]}))
        else:
            quadrant_digits.show(summary)
