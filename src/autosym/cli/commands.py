"""The command line: ``autosym discover DATA``, ``fit DATA``, ``audit MODEL DATA``, ``report RUN``, ``noether DATA``, ``demo``,
``run NAME``, ``table NAME``, ``doctor`` and ``completion SHELL``.

Exit status: 0 if all is well, 1 if the data or a file are wrong, 2 if the call is wrong, 130 if interrupted (Ctrl-C). Results go to
stdout, everything else to stderr. The examples at the end of a docstring are the end of the command's help.
"""

import inspect
import json as json_format
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import tyro
from tyro.conf import Positional

from autosym.answer.deadline import TooShort
from autosym.answer.routes import OtherSearch
from autosym.cli import own_images, own_trajectories, published
from autosym.cli.asked import (
    ALL,
    SEARCH,
    DataFile,
    MaybeFloat,
    MaybeInt,
    MaybePath,
    MaybeRun,
    Misused,
    ModelFile,
    Print,
    RunFolder,
    Size,
    holds_run,
    refuse_overwriting,
    replacing,
    saying,
)
from autosym.cli.doctor import examined
from autosym.cli.tries import TRIES
from autosym.evidence.record import in_words
from autosym.papers.measuring import CHECKPOINT
from autosym.report.drawing import show_symmetry
from autosym.report.words import simplified
from autosym.report.writing import try_write_run, write_pair, write_run
from autosym.runtime import processes
from autosym.runtime.provenance import VERSION
from autosym.runtime.tables import table


def main(arguments: Sequence[str] | None = None) -> int:
    """Learn which symmetry each layer of a network should have, from training data alone."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments == ["--version"]:
        print(f"autosym {VERSION}")
        return 0
    try:
        _called(arguments or ["--help"])
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of a pipe closed it, e.g. `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print(f"\nautosym: interrupted{_how_to_go_on(arguments)}", file=sys.stderr)
        return 130
    except Misused as error:
        print(f"autosym: {error}", file=sys.stderr)
        return 2
    except (ValueError, OSError, ImportError, processes.Lost) as error:
        print(f"autosym: {error}", file=sys.stderr)
        return 1
    except MemoryError as error:
        print(f"autosym: there is not enough memory ({error}): take fewer or smaller images", file=sys.stderr)
        return 1
    return 0


def _called(arguments: list[str]) -> None:
    """Run the command that ``arguments`` name. Raises SystemExit after help, a completion script, or a word that it cannot read."""
    listed = (discover, fit, audit, report, own_trajectories.noether, published.demo, published.run, published.table)
    commands: dict[str, Callable] = {command.__name__: command for command in (*listed, doctor, completion)}
    description = f"{main.__doc__}\n\n--version prints the version ({VERSION})."
    try:
        tyro.extras.subcommand_cli_from_dict(commands, prog="autosym", description=description, args=arguments)
    except SystemExit:
        if arguments[0] in commands and {"-h", "--help"} & set(arguments):
            print(f"examples:\n{examples(commands[arguments[0]])}")
        raise


def examples(command: Callable) -> str:
    """The examples of a command, as its docstring gives them."""
    return (inspect.getdoc(command) or "").partition("\nExamples:\n")[2]


def completion(shell: Positional[Literal["bash", "zsh"]]) -> None:
    """Print a script that completes commands and options when you press the tab key.

    Args:
        shell: the shell that you use.

    Examples:
        eval "$(autosym completion bash)"
        autosym completion zsh > ~/.zfunc/_autosym
    """
    _called(["--tyro-print-completion", shell])


def _how_to_go_on(arguments: list[str]) -> str:
    """The command that continues an interrupted run from its checkpoint; empty for commands without one."""
    if arguments[:1] not in (["discover"], ["fit"], ["run"]):
        return ""
    again = [word for word in arguments if word not in ("--resume", "--force")]
    if arguments[0] == "discover":
        return f"; go on by the same command: {shlex.join(['autosym', *again])}"
    return f"; go on by: {shlex.join(['autosym', *again, '--resume'])}"


def discover(
    data: DataFile,
    out: Path = Path("runs/discover"),
    symmetries: tuple[str, ...] = ("translations", "c4", "flip-horizontal"),
    model: str = "f-fc+conv",
    minutes: MaybeFloat = None,
    budget: MaybeFloat = None,
    seeds: int = 3,
    size: Size = None,
    classes: MaybeInt = None,
    test: float = 0.0,
    force: bool = False,
    printing: Print = ALL,
) -> None:
    """Which symmetries do your own images have? Yes, no or undecided for each, with margins: several networks, widths and seeds.

    The same command goes on where it was stopped, and prints the answer again when it is done.

    Args:
        data: an .npz file of images (or x, X) and labels (or y, Y), or a folder with a folder of images for every class.
        out: where answer.json, fit.safetensors, report.html and the runs are written.
        symmetries: some of translations, c2, c4, d4, flip-horizontal, flip-vertical. c4 is left out by default if images are not square.
        model: the free path beside convolutions: f-fc+conv or where+conv.
        minutes: about how long all of it may take; networks are trained for fewer epochs if need be, and on some of the images if that
            is not enough. It says so before it starts. It is refused if the fewest (200, or 10 times as many as classes) take ten times
            as long.
        budget: how many fits of the largest network to spend; 6 for one symmetry and 7 for each further one by default, and three times
            as many with --minutes.
        seeds: how many seeds long runs have.
        size: resize images to HEIGHTxWIDTH; by default their size, at most 32 pixels, in multiples of 4.
        classes: number of classes, if some of them do not occur in the integer labels.
        test: fraction of the images to hold out, for a test accuracy and the second opinion: it may leave an answer undecided, no more.
        force: replace an earlier run in the output folder.
        printing: how much to print.

    Examples:
        autosym discover pictures/ --minutes 5 --out r
        autosym discover pictures.npz --symmetries translations c4 --out r
    """
    asked = own_images.Run(str(data), model, size=_size(size), classes=classes, test=test)
    refuse_overwriting([] if (out / SEARCH).exists() else [out], force)
    try:
        with replacing(out, force), saying(TooShort, not printing.quiet):
            result = own_images.discover(asked, out, symmetries, minutes, budget, seeds, not printing.quiet)
    except OtherSearch as error:
        raise Misused(f"{error}; --force replaces it") from error
    if printing.json:
        print(json_format.dumps(result))
        return
    for note in result["notes"]:
        if note not in result["text"]:
            printing.say(f"Note: {note}.")
    print(result["text"])
    print(result["headline"])
    if result["accuracy"] is not None:
        print(f"Test accuracy of the best network: {result['accuracy']:.1f} %.")
    printing.say(f"Written to {out}: answer.json, result.json, fit.safetensors. {result['page']}")


def fit(
    data: DataFile,
    out: Path = Path("runs/fit"),
    model: str = "f-fc+conv",
    epochs: MaybeInt = None,
    seed: int = 0,
    size: Size = None,
    classes: MaybeInt = None,
    test: float = 0.0,
    lr: MaybeFloat = None,
    tries: int = TRIES,
    simplify: bool = True,
    resume: bool = False,
    force: bool = False,
    printing: Print = ALL,
) -> None:
    """Learn the symmetry of your own images: train a network with a symmetric and a free path in every layer.

    Paths that break a symmetry and are worth less than 10 nats of evidence are left out at the end.

    Args:
        data: an .npz file of images (or x, X) and labels (or y, Y), or a folder with a folder of images for every class.
        out: where result.json, history.jsonl, checkpoint.safetensors, fit.safetensors and report.html are written.
        model: the paths of every layer, e.g. f-fc+conv, conv, or f-fc+conv+gconv:c4.
        epochs: how long to train; by default it follows from the number of images.
        seed: random seed of the initial weights and of the order of the images.
        size: resize images to HEIGHTxWIDTH; by default their size, at most 32 pixels, in multiples of 4.
        classes: number of classes, if some of them do not occur in the integer labels.
        test: fraction of the images to hold out for a test accuracy; no choice depends on them.
        lr: learning rate, relative to the size of weights (0.05 by default).
        tries: how many runs to make at most, if nothing is learned; further ones have other seeds and a smaller rate.
        simplify: leave out paths that the data do not support; --no-simplify keeps all of them.
        resume: continue from the checkpoint in the output folder, as if the run had never stopped.
        force: replace an earlier run in the output folder.
        printing: how much to print.

    Examples:
        autosym fit pictures/ --out r
        autosym fit pictures.npz --model f-fc+conv+gconv:c4 --test 0.1 --out r
    """
    asked = own_images.Run(str(data), model, "evidence", epochs, seed, _size(size), classes, test, lr, tries, simplify)
    if resume and holds_run(out) and not (out / CHECKPOINT).exists():
        raise Misused(
            f"{out} holds a run without a checkpoint to resume: replace it by --force, or name another folder by --out"
        )
    refuse_overwriting([out], force, resume)
    with replacing(out, force):
        result = own_images.train(asked, out, progress=printing.progress, resume=resume)
    page = try_write_run(out)
    if printing.json:
        print(json_format.dumps(result))
        return
    for note in result["notes"]:
        printing.say(f"Note: {note}.")
    print(result["headline"])
    for caution in result["cautions"]:
        print(f"Caution: {caution}")
    show_symmetry(Path(data).stem, result["symmetry"])
    if result["simplification"]:
        print(f"{simplified(result['simplification'])} Priced in {result['simplification']['seconds']:.1f} s.")
    row = result["row"]
    held_out = "" if row["accuracy"] is None else f", {_test_accuracy(row)}"
    found = in_words(row["log_evidence"], row["samples"])
    print(f"{found[0].upper()}{found[1:]}, training accuracy {row['train_accuracy']:.1f} %{held_out}.")
    printing.say(f"One fit depends on its seed: autosym discover {data} compares networks, widths and seeds.")
    printing.say(f"Written to {out}: result.json, history.jsonl, checkpoint.safetensors, fit.safetensors. {page}")
    printing.say(f"In Python: fit = autosym.load({str(out)!r})")


def audit(
    model: ModelFile,
    data: DataFile,
    groups: tuple[str, ...] = (),
    size: Size = None,
    mean: tuple[float, ...] = (),
    std: tuple[float, ...] = (),
    samples: int = 64,
    printing: Print = ALL,
) -> None:
    """Measure the equivariance of a saved network: |f(g x) - g f(x)| / |f(x)| for every group.

    Args:
        model: a network saved by torch.export.save (.pt2), or the folder of a run of autosym fit.
        data: images, as for autosym fit; bytes are read as 0 to 1.
        groups: shifts (the border stays as it is), translations (circular shifts), c2, c4, d4, flip-horizontal, flip-vertical, c8; by
            default shifts and all exact groups that act on the images.
        size: resize images to HEIGHTxWIDTH, if the network takes another size.
        mean: subtracted from the images before the network sees them: one number, or one for each channel.
        std: the images are divided by it, after the mean is subtracted: one number, or one for each channel.
        samples: how many images to measure on.
        printing: how much to print.

    Examples:
        autosym audit r pictures.npz
        autosym audit model.pt2 pictures/ --groups translations c4 --size 32x32
    """
    found = own_images.audit(model, data, groups, _size(size), mean, std, samples)
    if printing.json:
        rows = [asdict(row) | {"error": None if math.isnan(row.error) else row.error} for row in found]
        print(json_format.dumps({"output": found.output(), "rows": rows}, allow_nan=False))
        return
    print(found)
    printing.say("\n0 is exact, 1 is an error as large as the output itself; 1e-5 or less is rounding.")


def doctor(json: bool = False) -> None:
    """Is this installation sound? Versions, hardware, extras, write access, and numbers against closed forms, in some ten seconds.

    Args:
        json: print the checks as JSON, and nothing else on stdout.

    Examples:
        autosym doctor
        autosym doctor --json > doctor.json
    """
    checks = examined()
    failed = [check.name for check in checks if check.sound is False]
    if json:
        print(json_format.dumps([asdict(check) for check in checks]))
    else:
        mark = {True: "ok", None: "--", False: "WRONG"}
        print(table([("", "what", "found"), *((mark[c.sound], c.name, c.found) for c in checks)], "<<<"))
    if failed:
        raise ValueError(f"wrong: {', '.join(failed)}. Please report it with all of the above")


def _test_accuracy(row: Mapping[str, Any]) -> str:
    """With its standard error. If all held-out images are right, or none, that would be 0, which says too much."""
    if row["standard_error"]:
        return f"test accuracy {row['accuracy']:.1f} ± {row['standard_error']:.1f} %"
    return f"test accuracy {row['accuracy']:.0f} % of only {row['tested']} images"


def _size(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    found = re.fullmatch(r"(\d+)x(\d+)", text)
    if not found:
        raise ValueError(f"--size {text!r} is not HEIGHTxWIDTH in pixels, e.g. 32x32")
    return int(found[1]), int(found[2])


def report(
    run: RunFolder,
    other: MaybeRun = None,
    out: MaybePath = None,
    compare: tuple[Path, ...] = (),
    printing: Print = ALL,
) -> None:
    """Write the report of a run, or of two side by side, as one HTML file that opens anywhere. It needs only the files of the runs.

    Args:
        run: the folder of a run, or its result.json.
        other: a second run, to show beside the first.
        out: the file to write, or its folder (by default report.html, of two runs beside.html, in the folder of the first).
        compare: other runs on the same data; the report of one run shows their evidence too.
        printing: how much to print.

    Examples:
        autosym report r --compare other --out page.html
        autosym report r other --out both.html
    """
    if other is not None and compare:
        raise Misused("--compare is for the report of one run: leave it out, or the second run")
    page = write_run(run, out, compare) if other is None else write_pair(run, other, out)
    print(json_format.dumps({"report": str(page)}) if printing.json else page if printing.quiet else f"Written: {page}")
