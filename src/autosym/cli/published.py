"""The commands about published experiments and demos: ``autosym demo``, ``run NAME``, ``table NAME``."""

import json as json_format
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro

from autosym.cli.asked import ALL, MaybeInt, MaybeName, MaybePath, Name, Print, Printing, refuse_overwriting
from autosym.evidence.record import per_sample
from autosym.papers import basis as basis_functions
from autosym.papers import (
    group_digits,
    images,
    invariance,
    noether,
    quadrant_answers,
    quadrant_digits,
    rotated_digits,
    table1,
    table2,
    table3,
)
from autosym.papers.images import mean_shares
from autosym.papers.measuring import check_results, write
from autosym.report import run_files
from autosym.report.drawing import show_symmetry
from autosym.report.writing import try_write_run
from autosym.runtime import processes
from autosym.runtime.workers import at_a_time

EXPERIMENTS: dict[str, Any] = {
    "quadrant-digits": quadrant_digits,
    "group-digits": group_digits,
    "rotated-digits": rotated_digits,
}
TABLES: dict[str, Any] = {"1": table1, "2": table2, "3": table3}


def demo(
    out: MaybePath = None,
    fits: bool = False,
    groups: bool = False,
    basis: bool = False,
    jobs: MaybeInt = None,
    epochs: MaybeInt = None,
    force: bool = False,
    printing: Print = ALL,
) -> None:
    """Which digit is it? And in which quadrant? Watch discover find out which of these questions has a symmetry, in two minutes.

    Args:
        out: where result.json and reports or pictures are written (runs/demo; with --fits runs/fits, and so on).
        fits: instead, Table 1 in miniature: eight networks, fixed and learned, on the same two questions, and a picture.
        groups: instead, learn which group suits upright digits and which suits rotated digits.
        basis: instead, basis functions with exact evidence, in seconds: is a function even?
        jobs: how many questions, or networks, to work on at the same time (all cores by default).
        epochs: train for another number of epochs.
        force: replace what an earlier run wrote to the output folder.
        printing: how much to print.

    Examples:
        autosym demo
        autosym demo --fits --out r --force
    """
    out = out or Path("runs") / ("fits" if fits else "groups" if groups else "basis" if basis else "demo")
    if fits:
        return _demo_fits(out, epochs, jobs, force, printing)
    if groups:
        return _demo_groups(out, epochs, force, printing)
    if basis:
        return _demo_basis(out, force, printing)
    _demo_discover(out, epochs, jobs, force, printing)


def _demo_basis(out: Path, force: bool, printing: Printing) -> None:
    refuse_overwriting([out], force)
    found = basis_functions.demo(out)
    print(json_format.dumps(found)) if printing.json else basis_functions.show(found)
    printing.say(f"Written: {out / 'result.json'} and {out / 'basis.png'}")


def _demo_fits(out: Path, epochs: int | None, jobs: int | None, force: bool, printing: Printing) -> None:
    refuse_overwriting([out], force)
    runs = [quadrant_digits.RUNS[f"quadrant-digits/{task}/{model}/{method}"] for task, model, method in quadrant_digits.DEMO]
    if epochs is not None:
        runs = [replace(run, epochs=epochs) for run in runs]
    jobs = min(len(runs), os.cpu_count() or 1) if jobs is None else jobs
    summary = quadrant_digits.summarise(_demo_results(runs, jobs, printing))
    write(summary, out / "result.json")
    quadrant_digits.figure(summary, out / "demo.png")
    print(json_format.dumps(summary)) if printing.json else quadrant_digits.show(summary)
    printing.say(f"Written: {out / 'result.json'} and {out / 'demo.png'}")


def _demo_results(runs: list[quadrant_digits.Run], jobs: int, printing: Printing) -> list[dict[str, Any]]:
    """The results of all runs; tells of each as it finishes."""
    printing.tell(f"Training {len(runs)} small networks on digits placed in one of four quadrants, {jobs} at a time.")
    results = []
    for result in quadrant_digits.execute_all(runs, jobs):
        results.append(result)
        row = result["row"]
        cell = f"{row['task']}: {row['model']} by {row['method']}"
        printing.tell(f"  {len(results):2d}/{len(runs)}  {cell:42s} {row['accuracy']:5.1f} %  {row['seconds']:4.0f} s")
    return results


def _demo_discover(out: Path, epochs: int | None, jobs: int | None, force: bool, printing: Printing) -> None:
    runs = [quadrant_answers.Run(task, **({} if epochs is None else {"epochs": epochs})) for task in quadrant_answers.TRUTH]
    refuse_overwriting([out, *(out / run.task for run in runs)], force)
    jobs = min(len(runs), os.cpu_count() or 1) if jobs is None else jobs
    about = "about two minutes on two cores"
    printing.tell(f"Asking discover two questions about 500 digits in quadrants, {jobs} at a time: {about}.")
    found = quadrant_answers.execute_all(runs, out, jobs)
    write(found, out / "result.json")
    print(json_format.dumps(found)) if printing.json else quadrant_answers.show(found)
    printing.say(f"Written to {out}: result.json, and the answer and report.html of each task")


def _demo_groups(out: Path, epochs: int | None, force: bool, printing: Printing) -> None:
    folders = {name: out / name.replace("/", "-") for name in group_digits.RUNS}
    refuse_overwriting(folders.values(), force)
    results = {}
    for name, config in group_digits.RUNS.items():
        results[config.task] = group_digits.execute(replace(config, epochs=epochs or config.epochs), printing.progress)
        write(results[config.task], folders[name] / "result.json")
    shares = {task: mean_shares(result["symmetry"]) for task, result in results.items()}
    if printing.json:
        print(json_format.dumps({"rows": [result["row"] for result in results.values()], "mean_shares": shares}))
        return
    group_digits.show(results, shares)


@dataclass(frozen=True)
class Changes:
    """Settings that replace those of the experiment."""

    epochs: MaybeInt = None
    """replaces the experiment's number of epochs."""
    seed: MaybeInt = None
    """replaces the experiment's seed."""
    samples: MaybeInt = None
    """train on so many samples (tables 1 to 3 only)."""
    integrator: MaybeName = None
    """midpoint, or euler as published (noether only)."""
    substeps: MaybeInt = None
    """steps of the integrator in one step of the data (noether only)."""

    def given(self) -> dict[str, Any]:
        """The settings that were given."""
        return {key: value for key, value in asdict(self).items() if value is not None}

    def applied(self, name: str, config: Any) -> Any:
        """A run with these settings; settings that its experiment does not have are refused."""
        unknown = sorted(set(self.given()) - {field.name for field in fields(config)})
        if unknown:
            raise ValueError(
                f"{name} has no {', '.join(unknown)} to choose: samples are for tables 1 to 3, integrator and substeps for noether"
            )
        return replace(config, **self.given())


def run(
    name: Name,
    all: bool = False,
    seeds: int = 1,
    changes: Annotated[Changes, tyro.conf.arg(name="")] = Changes(),  # noqa: B008 (frozen)
    out: MaybePath = None,
    results: Path = images.RESULTS,
    data_dir: MaybePath = None,
    resume: bool = False,
    force: bool = False,
    jobs: int = 1,
    printing: Print = ALL,
) -> None:
    """Train one named run of an experiment, e.g. quadrant-digits, rotated-digits (all three variants), or table1/digit/f-fc+conv/evidence.

    Args:
        name: the run, or the beginning of the names of several with --all; an unknown name lists them all.
        all: train every run whose name begins with NAME.
        seeds: how many seeds to train for each run, starting at its own seed.
        changes: settings that replace those of the experiment.
        out: where result.json, history.jsonl, checkpoint.safetensors and report.html are written (runs/NAME by default).
        results: where results of tables 1 to 3 are kept, beside the predicted labels.
        data_dir: the folder of MNIST or CIFAR-10 ($AUTOSYM_DATA by default; downloaded if it is missing).
        resume: continue from the checkpoint in the output folder, as if the run had never stopped.
        force: replace an earlier run in the output folder.
        jobs: with --all, how many runs at the same time, each in its own process; a run that fails does not stop the others.
        printing: how much to print.

    Examples:
        autosym run quadrant-digits --epochs 10 --out r
        autosym run table1/digit/f-fc+conv/evidence --data-dir data --resume
    """
    if name == "rotated-digits":
        if all or resume or seeds != 1 or not set(changes.given()) <= {"epochs", "seed"}:
            raise ValueError(f"{name} trains all three variants; for other options name one variant, e.g. {name}/full")
        return _run_rotated_digits(out or Path("runs") / name, changes, force, printing)
    if seeds < 1:
        raise ValueError(f"--seeds counts seeds from 1, got {seeds}")
    named = _named()
    chosen = _chosen(name, all, named)
    todo: list[tuple] = []
    for key in chosen:
        config = changes.applied(key, named[key][1])
        for seed in range(config.seed, config.seed + seeds):
            folder = f"{key}/seed{seed}" if len(chosen) * seeds > 1 else "" if out else key
            where = ((out or Path("runs")) / folder, results, data_dir)
            todo.append((key, replace(config, seed=seed), *where, resume, printing, printing.progress and jobs == 1))
    refuse_overwriting([folder for _, config, folder, *_ in todo for folder in _written(config, folder)], force, resume)
    if jobs > 1:
        return at_a_time(_run, todo, jobs)
    for arguments in todo:
        _run(*arguments)


def _written(config: Any, folder: Path) -> list[Path]:
    """The folders that a run writes to: its own, and one for each of several starts."""
    starts = getattr(config, "starts", 1)
    return [folder, *(folder / f"start{number}" for number in range(starts if starts > 1 else 0))]


def _run_rotated_digits(out: Path, changes: Changes, force: bool, printing: Printing) -> None:
    refuse_overwriting([out, *(out / run.task for run in rotated_digits.RUNS.values())], force)
    found = rotated_digits.run_all(out, changes.epochs, changes.seed, progress=printing.progress)
    print(json_format.dumps(found)) if printing.json else rotated_digits.show(found)
    printing.say(f"Written: {out / 'result.json'}, and the files of each variant beside it")


def _named() -> dict[str, tuple[Any, Any]]:
    """Every run by name, with the module that executes it."""
    named = {key: (module, value) for module in EXPERIMENTS.values() for key, value in module.RUNS.items()}
    named |= {key: (images, value) for table in TABLES.values() for key, value in table.RUNS.items()}
    return named | {key: (module, value) for module in (invariance, noether) for key, value in module.RUNS.items()}


def _chosen(name: str, all: bool, named: Mapping[str, Any]) -> list[str]:
    """The run with this name, or with ``all`` every run whose name begins with it."""
    chosen = (
        [key for key in named if key.startswith(name) and key not in EXPERIMENTS]
        if all
        else [key for key in (name, f"{name}/evidence") if key in named][:1]
    )
    if not chosen:
        near = [key for key in named if key.startswith(name)] or list(named)
        more = "" if len(near) == len(named) else ", or take all of them by --all"
        raise ValueError("\n  ".join(["runs are:", *near]) + f"\nno run is called {name!r}: name one of these{more}")
    return chosen


def _run(
    name: str,
    config: Any,
    out: Path,
    results: Path,
    data_dir: Path | None,
    resume: bool,
    printing: Printing,
    progress: bool,
) -> None:
    module = _named()[name][0]
    more: dict[str, Any] = {"results": results} if hasattr(config, "file") else {}
    more |= {"data_dir": data_dir} if module in (images, invariance) else {}
    result = module.execute(config, progress=progress, out=out, resume=resume, **more)
    write(result, out / "result.json")
    if not processes.first():
        return
    page = "" if module is noether else try_write_run(out)
    if printing.json:
        print(json_format.dumps(result))
        return
    print(f"{name}: {_words(result['row'])}")
    if result.get("symmetry"):
        show_symmetry(result["row"]["task"], result["symmetry"])
    for caution in result.get("cautions", ()):
        print(f"Caution: {caution}")
    for found in result.get("ranges", ()):
        print(f"Averaged over {found['text']}")
    history = "" if module is noether else f" and {out / 'history.jsonl'}"
    kept = f", and {results / config.file}.json" if more else ""
    printing.say(f"Written: {out / 'result.json'}{history}{kept}")
    if page:
        printing.say(page)
    sys.stdout.flush()


def _words(row: Mapping[str, Any]) -> str:
    """A row of a result as one line of text."""
    if "negative_elbo" in row:
        return f"-ELBO/N {row['negative_elbo']:.3f}, test MSE {row['test_mse']:.3g}, {row['seconds']:.0f} s"
    evidence = "" if row["evidence"] is None else f"log evidence {per_sample(row['evidence'])} nats per sample, "
    return f"test accuracy {row['accuracy']:.2f} +- {row['standard_error']:.2f} %, {evidence}{row['seconds']:.0f} s"


def table(name: Name, results: MaybePath = None, figure: MaybePath = None, printing: Print = ALL) -> None:
    """Print a table from results: the papers' numbers beside ours, or quadrant-digits after autosym demo --fits.

    Args:
        name: 1, 2, 3, invariance-1, invariance-2, invariance-3, noether or quadrant-digits.
        results: the folder with the results of these tables (by default results, as in a checkout), or the file that the demo wrote.
        figure: also draw what the networks of a published table learned, and save it as this file.
        printing: how much to print.

    Examples:
        autosym table 1
        autosym table invariance-2 --results results --figure ranges.png
    """
    if name == "quadrant-digits":
        return _table_of_demo(results or Path("runs/fits/result.json"), printing.json)
    folder, number = results or images.RESULTS, name.removeprefix("table")
    show: Callable[..., None]
    draw: Callable[[Path, Path], None] | None = None
    if number in TABLES:
        name = f"table{number}"
        found = images.rows(name, TABLES[number].RUNS, TABLES[number].PAPER, folder)
        draw, show = partial(images.figure, name, TABLES[number].RUNS), partial(images.show, number)
    elif name in invariance.TABLES:
        found = invariance.rows(name, folder)
        draw, show = partial(invariance.figure, name), partial(invariance.show, name)
    elif name == "noether":
        found, show = noether.rows(folder), noether.show
    else:
        tables = ("1", "2", "3", *invariance.TABLES, "noether", "quadrant-digits")
        raise ValueError(f"no table is called {name!r}; there are: {', '.join(tables)}")
    check_results(found, folder, name)
    if figure is not None:
        if draw is None:
            raise ValueError(f"the table {name} has no figure: leave out --figure")
        draw(figure, folder)
    print(json_format.dumps({"rows": found})) if printing.json else show(found)
    if figure is not None:
        printing.say(f"Written: {figure}")


def _table_of_demo(file: Path, json: bool) -> None:
    if not file.exists():
        raise FileNotFoundError(f"{file} does not exist: run `autosym demo --fits` first, or name another file by --results")
    summary = run_files.read(file)
    with run_files.of_this_version(file):
        if json:
            print(json_format.dumps({"rows": summary["rows"]}))
        else:
            quadrant_digits.show(summary)
