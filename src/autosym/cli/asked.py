"""What commands share: how much they print, and which folders they may write to."""

import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from autosym.papers.measuring import CHECKPOINT
from autosym.runtime import processes

SEARCH = "runs/settings.json"  # what a search of ``autosym discover`` writes first
FILES = (
    "result.json",
    "answer.json",
    "history.jsonl",
    CHECKPOINT,
)  # any of them, or a search, makes a folder the folder of a run
BESIDE = ("report.json", "report.html", "fit.safetensors")  # what a run may write besides


class Misused(ValueError):
    """A call that is refused as it was given; exit code 2."""


@dataclass(frozen=True)
class Printing:
    """How much to print."""

    json: bool = False
    """print the result as JSON, and nothing else on stdout."""
    quiet: bool = False
    """print the result and nothing else: no progress, no notes, no list of files."""

    @property
    def progress(self) -> bool:
        """Whether to show progress: on a terminal, unless --quiet was given. It goes to stderr."""
        return sys.stderr.isatty() and not self.quiet

    def say(self, text: str) -> None:
        """Print what people want to know beside the result."""
        if not (self.json or self.quiet):
            print(text)

    def tell(self, text: str) -> None:
        """Print a line of progress."""
        if self.progress and processes.first():
            print(text, file=sys.stderr, flush=True)


Print = Annotated[Printing, tyro.conf.arg(name="")]
ALL = Printing()


def refuse_overwriting(folders: Iterable[Path], force: bool, resume: bool | None = None) -> None:
    """Refuse folders that hold a run, unless ``force`` or ``resume`` was given; ``resume`` is None for commands without it.

    Every process looks before any of them writes.
    """
    if force and resume:
        raise Misused("--force begins anew and --resume goes on: give one of them")
    with processes.agreeing():
        taken = [] if force or resume else [folder for folder in folders if holds_run(folder)]
        if taken:
            more = f" (and {len(taken) - 1} more)" * (len(taken) > 1)
            go_on = "" if resume is None else "go on with it by --resume, "
            raise Misused(
                f"{taken[0]}{more} holds an earlier run: {go_on}replace it by --force, or name another folder by --out"
            )


def holds_run(folder: Path) -> bool:
    """Whether a run has written to ``folder``."""
    return any((folder / name).exists() for name in (*FILES, SEARCH))


@contextmanager
def replacing(folder: Path, wanted: bool) -> Iterator[None]:
    """Set the files of a run in ``folder`` aside for a new one. They are put back if that one is refused before it has begun."""
    if not wanted:
        yield
        return
    aside = folder / ".replaced"
    with processes.agreeing():  # no process goes on before this is done
        if processes.first():
            shutil.rmtree(aside, ignore_errors=True)
            _move(folder, aside)
    try:
        yield
    except Exception:
        begun = (folder / CHECKPOINT).exists() or any((folder / SEARCH).parent.glob("*/*"))
        if processes.first() and not begun:
            _move(aside, folder)
        raise
    finally:
        if processes.first():
            shutil.rmtree(aside, ignore_errors=True)


def _move(here: Path, there: Path) -> None:
    """Move what a run writes, and nothing else; what is ``there`` is replaced."""
    there.mkdir(parents=True, exist_ok=True)
    if (here / SEARCH).exists():
        shutil.rmtree((there / SEARCH).parent, ignore_errors=True)
        (here / SEARCH).parent.rename((there / SEARCH).parent)
    for name in (*FILES, *BESIDE):
        if (here / name).exists():
            (here / name).replace(there / name)
