"""How far a search has come, what it is doing, and how long it will take: a bar in a terminal, else a line for every run."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from autosym.answer.plans import Outcome, Run
from autosym.runtime import processes

STAGES = {"short": "short run", "long": "long run", "on": "fitting on", "whole": "whole evidence", "layers": "without layers"}


class Forecast:
    """Seconds that are left, from the work that is done and what it took. Work is in fits of the largest network."""

    def __init__(self, total: float, seconds: float):
        self.total, self.each, self.done, self.took = total, seconds / max(total, 1e-9), 0.0, 0.0

    def add(self, work: float, seconds: float) -> None:
        """A run was made."""
        self.done, self.took = self.done + work, self.took + seconds
        self.total = max(self.total, self.done)

    @property
    def left(self) -> float:
        """Seconds; at first by what was expected, then more and more by what runs took."""
        known = min(1.0, 5 * self.done / self.total)
        each = self.each if not self.done else known * self.took / self.done + (1 - known) * self.each
        return (self.total - self.done) * each

    def __str__(self) -> str:
        if self.done >= self.total:  # what is optional was not counted
            return "99 %, some more runs as far as the budget lasts"
        return f"{100 * self.done / self.total:.0f} %, about {spoken(self.left)} left"


def spoken(seconds: float) -> str:
    """1 min, 2.5 h: a time in words."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@contextmanager
def told(wanted: bool, forecast: Forecast, work: Callable[[Run], float]) -> Iterator[tuple[Callable, Callable[[str], None]]]:
    """Two functions: ``say(run, outcome)`` before (None) and after a run, and ``tell(text)`` at the beginning of a stage."""

    def count(run: Run, outcome: Outcome | None) -> None:
        if outcome is not None:
            forecast.add(work(run), outcome.seconds)

    if not wanted or not processes.first():
        yield count, lambda text: None
        return
    if not sys.stderr.isatty():
        yield _lines(forecast, count)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[left]}"))
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("discover", total=forecast.total, left=str(forecast))

        def say(run: Run, outcome: Outcome | None) -> None:
            count(run, outcome)
            bar.update(task, completed=forecast.done, total=forecast.total, description=_named(run), left=str(forecast))

        yield say, lambda text: bar.update(task, description=text)


def _lines(forecast: Forecast, count: Callable[[Run, Outcome | None], None]) -> tuple[Callable, Callable[[str], None]]:
    begun = time.perf_counter()

    def say(run: Run, outcome: Outcome | None) -> None:
        count(run, outcome)
        if outcome is not None:
            value = outcome.failed or f"log evidence {outcome.log_evidence:.0f}"
            print(f"[{spoken(time.perf_counter() - begun)}; {forecast}] {_named(run)}: {value}", file=sys.stderr, flush=True)

    return say, lambda text: print(text, file=sys.stderr, flush=True)


def _named(run: Run) -> str:
    stage = f"{STAGES[run.stage]} ({', '.join(run.left) or 'none'})" if run.stage == "layers" else STAGES[run.stage]
    return f"{stage}: {run.network}, width {run.width:g}, seed {run.seed}"
