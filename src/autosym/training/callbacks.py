"""Callbacks: functions that are called with every line of a history, as soon as it is known.

Those of this library (a file, a bar in the terminal, TensorBoard) are contexts that give such a function, or None where none is wanted.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path as File
from typing import Any

from autosym.runtime import processes

Callback = Callable[[dict[str, Any]], None]
OWN = ("loss", "seconds", "log_evidence", "log_likelihood", "occam")  # numbers of a line that are not hyperparameters


@contextmanager
def opened(
    progress: bool | str,
    history: str | File | None,
    tensorboard_folder: str | File | None,
    others: Sequence[Callback | None],
    epochs: int,
    lines: list[dict[str, Any]],
    samples: int,
) -> Iterator[Callback]:
    """All callbacks of a run as one. The run is of ``epochs`` on ``samples`` and has ``lines`` already. One process of several calls."""
    if not processes.first():
        yield lambda line: None
        return
    with (
        progress_bar(progress, epochs) as show,
        json_lines(history, lines) as write,
        tensorboard(tensorboard_folder, len(lines), samples) as scalars,
    ):
        wanted = [callback for callback in (show, write, scalars, *others) if callback is not None]

        def tell(line: dict[str, Any]) -> None:
            for callback in wanted:
                callback(line)

        yield tell


def announce(progress: bool | str, forecast: Any) -> None:
    """Say what a fit will take, where ``progress`` is shown."""
    if progress and forecast is not None and processes.first():
        print(f"{progress if isinstance(progress, str) else 'fit'}: {forecast}", file=sys.stderr, flush=True)


@contextmanager
def json_lines(path: str | File | None, lines: list[dict[str, Any]]) -> Iterator[Callback | None]:
    """One line of JSON for each epoch, written at once. ``lines`` are those of the run that is resumed."""
    if path is None:
        yield None
        return
    File(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
        yield lambda line: print(json.dumps(line), file=file, flush=True)


@contextmanager
def progress_bar(wanted: bool | str, epochs: int) -> Iterator[Callback | None]:
    """Loss, evidence and the free paths' shares: as a bar in a terminal or a notebook, else as a line every tenth of the run.

    With a name it is always lines, which begin with it: bars of runs side by side would overwrite each other.
    """
    if not wanted:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    named = f"{wanted}: " if isinstance(wanted, str) else ""
    shown = {"evidence": "", "shares": ""}

    def described(line: dict[str, Any]) -> str:
        if "log_evidence" in line:
            shown["evidence"] = f"  log evidence {line['log_evidence']:.0f}"
            shares = " ".join("?" if share is None else f"{share:.0%}" for share in line["free_share"].values())
            shown["shares"] = f"  free paths {shares}" if shares else ""
        loss = "not finite" if line["loss"] is None else f"{line['loss']:.3f}"
        again = f"  recovered: {line['recovered']['why']}" if "recovered" in line else ""
        return f"loss {loss}{again}{shown['evidence']}{shown['shares']}"

    def say(line: dict[str, Any]) -> None:
        text = described(line)
        if line["epoch"] == epochs or line["epoch"] % max(1, epochs // 10) == 0:
            print(f"{named}epoch {line['epoch']}/{epochs}  {text}", file=sys.stderr, flush=True)

    console = Console(stderr=True)
    if named or not (console.is_terminal or console.is_jupyter):
        yield say
        return
    columns = (TextColumn("epoch"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=epochs)
        yield lambda line: bar.update(task, completed=line["epoch"], description=described(line))


@contextmanager
def tensorboard(folder: str | File | None, done: int, samples: int) -> Iterator[Callback | None]:
    """Scalars of every line for TensorBoard. Evidence and its parts are per sample. ``done`` epochs were written before."""
    if folder is None:
        yield None
        return
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(f"fit(tensorboard=...) needs the package tensorboard: pip install tensorboard ({error})") from error
    with SummaryWriter(str(folder), purge_step=done + 1 if done else None) as writer:

        def write(line: dict[str, Any]) -> None:
            for tag, value in scalars(line, samples).items():
                writer.add_scalar(tag, value, line["epoch"])
            writer.flush()

        yield write


def scalars(line: Mapping[str, Any], samples: int) -> dict[str, float]:
    """A line as tags and numbers. What is not known is left out."""
    found = {} if line["loss"] is None else {"loss": line["loss"]}
    for key in ("log_evidence", "log_likelihood", "occam"):
        if key in line:
            found[f"{key}_per_sample"] = line[key] / samples
    for key in ("precision", "effective_parameters", "free_share"):
        found |= {f"{key}/{name}": value for name, value in line.get(key, {}).items() if value is not None}
    return found | {key: value for key, value in line.items() if isinstance(value, float) and key not in OWN}
