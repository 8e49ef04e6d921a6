"""What commands share: how much they print, and which folders they may write to."""

import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.conf import Positional

from autosym.answer import routes
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


def _maybe(name: str) -> Any:
    """What may be left out, by its ``name`` in help: tyro's own would be "{None}|INT" with "(default: None)"."""
    return tyro.conf.arg(metavar=name, help_behavior_hint="")


DataFile = Positional[Annotated[Path, tyro.conf.arg(metavar="DATA")]]
ModelFile = Positional[Annotated[Path, tyro.conf.arg(metavar="MODEL")]]
RunFolder = Positional[Annotated[Path, tyro.conf.arg(metavar="RUN")]]
Name = Positional[Annotated[str, tyro.conf.arg(metavar="NAME")]]
MaybeData = Positional[Annotated[Path | None, _maybe("[DATA]")]]
MaybeRun = Positional[Annotated[Path | None, _maybe("[OTHER]")]]
MaybeInt = Annotated[int | None, _maybe("INT")]
MaybeFloat = Annotated[float | None, _maybe("FLOAT")]
MaybeName = Annotated[str | None, _maybe("NAME")]
MaybePath = Annotated[Path | None, _maybe("PATH")]
Size = Annotated[str | None, _maybe("HEIGHTxWIDTH")]


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
    """Set the files of a run in ``folder`` aside for a new one. They are put back if the new one stops before it has begun.

    A folder without a run is left as it is. If files cannot be put back, they stay in the folder ``.replaced-...``.
    """
    aside, ready = None, False
    try:
        with processes.agreeing():  # no process goes on before this is done
            if wanted and processes.first() and holds_run(folder):
                aside = Path(tempfile.mkdtemp(prefix=".replaced-", dir=folder))
                _move(folder, aside)
        ready = True
        yield
    except BaseException:  # Ctrl-C too
        if aside is not None and not (ready and _begun(folder)):
            for path in _files(folder) if ready else ():  # the new call wrote them: all older ones are aside
                path.unlink()
                _prune(path, folder)
            _move(aside, folder)
        _drop(aside)
        raise
    _drop(aside)


def _files(folder: Path) -> list[Path]:
    """What runs wrote to ``folder``, file by file. Whatever else is there, also in the folder of a search, is not theirs."""
    own = [folder / name for name in (*FILES, *BESIDE)]
    own += [run / name for run in sorted(folder.glob("try-[0-9]*")) for name in ("history.jsonl", CHECKPOINT)]
    return [*(path for path in own if path.is_file()), *routes.written((folder / SEARCH).parent)]


def _begun(folder: Path) -> bool:
    """Whether a run in ``folder`` has something to go on from. The settings of a search are not enough."""
    searched = routes.written((folder / SEARCH).parent)
    return (folder / CHECKPOINT).exists() or any(path.name in routes.RUN_FILES for path in searched)


def _move(here: Path, there: Path) -> None:
    """Move what runs wrote, and nothing else; what is ``there`` is replaced."""
    for path in _files(here):
        new = there / path.relative_to(here)
        new.parent.mkdir(parents=True, exist_ok=True)
        path.replace(new)
        _prune(path, here)


def _prune(path: Path, folder: Path) -> None:
    """Remove the folders that ``path`` was in, inside of ``folder``, as far as they are empty."""
    for parent in path.relative_to(folder).parents[:-1]:
        if not any((folder / parent).iterdir()):
            (folder / parent).rmdir()


def _drop(aside: Path | None) -> None:
    if aside is not None:
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def saying(category: type[Warning], wanted: bool) -> Iterator[None]:
    """Warnings of one ``category`` are lines on stderr, if they are ``wanted``; others are shown as ever."""
    with warnings.catch_warnings():
        warnings.simplefilter("always" if wanted else "ignore", category)
        shown = warnings.showwarning

        def say(message: Any, kind: type[Warning], *more: Any, **options: Any) -> None:
            if issubclass(kind, category):
                print(f"autosym: {message}", file=sys.stderr, flush=True)
            else:
                shown(message, kind, *more, **options)

        warnings.showwarning = say  # type: ignore[assignment]
        yield
