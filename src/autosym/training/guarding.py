"""Guards of a run: what a collapse is, what the run goes back to, when it may settle, and where it ends.

A network may forget what the evidence does not want. A collapse is a loss near that of guessing, or one that stays far above what a
trained model had, with less evidence than the best snapshot has; or evidence far below all before.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from autosym.evidence.kernel import Kernel
from autosym.evidence.laplace import Laplace
from autosym.evidence.whole import OtherData
from autosym.runtime import processes
from autosym.runtime.arithmetic import NotFinite
from autosym.training import evidence_steps
from autosym.training.running import Run
from autosym.training.snapshots import Snapshot, Start
from autosym.training.starting import SLOWER, floor

NEAR = 0.8  # of the way from the least loss back to that of guessing: a loss beyond it is near guessing
FAR = 0.25  # of that way: of a model trained before, a loss that stays beyond it does not come back by itself, one that visits often does
STAYS = 128  # steps, and before the first recovery two epochs at least, beyond which it stays
MOST = 12  # recoveries
LESS = 0.05  # part of the evidence: with less lost since the best step it is better to go on, as lower rates bring more
PARTS = (
    0.25,
    0.75,
)  # of Kronecker's effective parameters: the whole evidence is larger by 0.33 to 0.60 of them (benchmarks/ends.py)
NOISE = 1.0  # nats that sampled curvature is off by where next to nothing is left: no collapse
FEWEST = 6  # evidence steps, in which a rise can be told from chance


class NothingLearned(ValueError):
    """A network from scratch collapsed until the end of its run: there is nothing to return."""


def lost(run: Run, loss: float) -> str | None:
    """Why an epoch with this loss at its end is a collapse, or None. Remembers the least loss."""
    progress, start = run.progress, _start(run)
    if not math.isfinite(loss):
        return f"the loss is {loss}"
    near, far = _levels(run)
    low, progress.low = progress.low, min(progress.low, loss)
    visits = start.explains and loss > near  # from scratch it comes back by itself
    gone = visits or (loss > far and _stayed(run, far))
    if run.schedule.step == "none" or start.guess - low <= start.least or not gone:
        return None  # without evidence a prior that is held may want it so
    now = _evidence(run) if _kept(run) else None
    if now is not None and now >= max(_kept(run)):  # the start's too: what is more than the last step's may be far below it
        progress.low = loss
        return None
    if loss <= near:
        return f"the loss, {loss:.3g}, stays far above {low:.3g}, which it had reached (guessing: {start.guess:.3g})"
    return f"the loss, {loss:.3g}, is near that of guessing, {start.guess:.3g}"


def _levels(run: Run) -> tuple[float, float]:
    """The losses beyond which one is near guessing, and beyond which one may visit but not stay."""
    low, start = run.progress.low, _start(run)
    explained = start.guess - low
    return low + NEAR * explained, low + (FAR if start.explains else NEAR) * explained


def _stayed(run: Run, far: float) -> bool:
    """Whether the loss was beyond ``far`` in all epochs before this one that matter. After a recovery one epoch may be enough."""
    epochs = math.ceil(STAYS / math.ceil(run.count / run.stream.together)) - 1
    epochs = epochs if run.progress.recoveries else max(1, epochs)
    before = run.progress.lines[::-1][:epochs]
    return len(before) == epochs and all("recovered" not in line and (line.get("loss") or 0.0) > far for line in before)


def worth_keeping(run: Run, loss: float, value: float | None) -> bool:
    """Whether a run may go back to here: of a model trained before, not where its loss is far off, unless its evidence is the most."""
    if run.schedule.step == "none" or not _start(run).explains or loss <= _levels(run)[1]:
        return True
    return value is not None and value >= max(_kept(run), default=math.inf)


def fallen(run: Run, line: Mapping[str, Any]) -> str | None:
    """Why an evidence step with these figures is a collapse, or None."""
    now, progress = processes.agreed(line["log_evidence"]), run.progress
    if not math.isfinite(now):
        return f"the log evidence is {now}"
    kept = progress.snapshots[progress.good].log_evidence
    gone = processes.agreed(sum(line["effective_parameters"].values())) < 1
    if gone and kept is not None and now < kept - NOISE:
        return "no effective parameters are left"
    before = evidence(
        progress.lines
    )  # without the start: a network that has just got free paths falls below it, and comes back
    if before and now < min(before) - max(max(before) - min(before), abs(min(before))):
        return f"the log evidence fell to {now:.0f}"
    return None


def recover(run: Run, why: str) -> dict[str, Any]:
    """Go back to the last good snapshot, at a lower rate; returns what the history says of it. Too many end the run there.

    Twice in a row from one snapshot: it was not as good as it seemed, so go back further.
    """
    progress = run.progress
    if progress.lines and progress.lines[-1].get("recovered", {}).get("epoch") == progress.good:
        progress.good = progress.best if progress.best < progress.good else 0
    progress.recoveries += 1
    progress.pace /= SLOWER
    good = progress.snapshots[progress.good]
    run.state.put_back(good)
    progress.low, progress.over = good.low, progress.recoveries >= MOST
    return {"recovered": {"why": why, "epoch": progress.good, "lr": float(f"{run.schedule.peak * progress.pace:.3g}")}}


def settle(run: Run) -> None:
    """Before precisions are fixed: go back to the snapshot with the most evidence, if much was lost since."""
    best, last = (run.progress.snapshots[epoch] for epoch in (run.progress.best, run.progress.good))
    if best.log_evidence is None or not best.epoch:
        return
    if _more(best.log_evidence - LESS * abs(best.log_evidence), last.log_evidence):
        run.state.put_back(best)
        run.progress.good, run.progress.low = best.epoch, best.low


def stopped_rising(lines: Sequence[Mapping[str, Any]], planned: int) -> bool:
    """Whether the last third of the ``planned`` evidence steps has no more evidence than the third before it, and no new best.

    One that was made in place of several counts as often.
    """
    taken = [line for line in lines if line.get("log_evidence") is not None]
    values = [line["log_evidence"] for line in taken for _ in range(line.get("steps", 1))]
    third = max(FEWEST, math.ceil(planned / 3))
    if len(values) < 2 * third:
        return False
    late, before = values[-third:], values[:-third]
    return sum(late) <= sum(before[-third:]) and max(late) <= max(before)


@dataclass(frozen=True)
class End:
    """Where a run may end: everything as it was then, the factors there (None: dropped), their log evidence (-inf: failed), their
    effective parameters.
    """

    state: Snapshot
    at: Laplace | Kernel | None
    value: float
    effective: float

    @classmethod
    def here(cls, run: Run, epoch: int) -> "End":
        """At the present weights, of that epoch; those of the start have their best precisions."""
        at = run.at_end() if epoch or run.schedule.step == "none" else floor(run)
        effective, value = float(at.effective_parameters(run.prior).detach().sum()), run.value(at)
        return cls(run.state.snapshot(epoch, value), at, -math.inf if value is None else value, processes.agreed(effective))

    def again(self, run: Run) -> Laplace | Kernel:
        """Everything put back as it was, and the factors there, taken once more if they were dropped."""
        run.state.put_back(self.state)
        return run.at_end() if self.at is None else self.at


def held(run: Run, ends: Sequence[End]) -> list[End]:
    """The same ends, without the factors of all but the best where all of them do not fit into the memory of a pass."""
    best = max(ends, key=lambda end: end.value)
    if processes.agreed(sum(end.at.nbytes for end in ends if end.at is not None) <= run.room()):
        return list(ends)
    return [end if end is best else replace(end, at=None) for end in ends]


def choose(run: Run, curvature: Literal["kronecker", "whole"] | None = None) -> tuple[Laplace | Kernel, int, str]:
    """The model's end: where training ended, at its best snapshot, or at its start, by exact curvature for all.

    Returns the evidence there, as a function of the prior, the epoch, and whose evidence has chosen: one for all that are compared.
    Nothing but more evidence wins against the end. With the ``curvature`` "whole" it is that of the whole network, with None too, if
    Kronecker factors leave it open which end is the best, and it takes a quarter of the fit's work at most.
    """
    progress, recovered = run.progress, run.progress.lines[-1].get("recovered")
    if recovered and not (progress.good or _start(run).explains):
        why, lr = recovered["why"], run.schedule.peak
        raise NothingLearned(f"nothing was learned, as {why}: lower lr (now {lr}), train longer, or rescale the inputs")
    ends = [End.here(run, progress.good if recovered else len(progress.lines))]
    first = ends[0].again(run)
    by = "kernel" if isinstance(first, Kernel) else "kronecker"
    open_yet = curvature == "whole" or (curvature is None and run.affords_whole(first, times=2))
    del first
    for snapshot in (progress.snapshots[progress.best], progress.snapshots[0]):
        # by Kronecker factors its evidence is known well enough to spare the pass; that of the whole network may order ends otherwise
        known = None if open_yet else max(end.value for end in ends)
        if snapshot.epoch not in [end.state.epoch for end in ends] and _more(snapshot.log_evidence, known):
            run.state.put_back(snapshot)
            ends = held(run, [*ends, End.here(run, snapshot.epoch)])
    if open_yet and (compared := _by_whole(run, ends, curvature == "whole")):
        ends, by = compared, "whole"
    best = max(ends, key=lambda end: end.value)
    return best.again(run), best.state.epoch, by


def contenders(ends: Sequence[End]) -> list[End]:
    """Those that may have the most evidence of the whole network: it is larger than Kronecker's by a part of the effective parameters.

    The one with the most by Kronecker factors is among them: what has less by both is never chosen, whatever that part is.
    """
    least, most = PARTS
    sure, best = max(end.value + least * end.effective for end in ends), max(end.value for end in ends)
    return [end for end in ends if end.value > -math.inf and (end.value + most * end.effective >= sure or end.value == best)]


def _by_whole(run: Run, ends: Sequence[End], asked: bool) -> list[End] | None:
    """The ends with the evidence of the whole network. If it was not ``asked`` for: of contenders, and None if that is not worth it."""
    if not asked:
        ends = contenders(ends)
        if len(ends) < 2 or not run.affords_whole(ends[0].again(run), len(ends)):
            return None
    found = []
    for end in ends:
        try:
            value = run.whole_value(end.again(run))
        except (NotFinite, OtherData, RuntimeError):
            # it overflows, a loader augments, memory is short, or a layer has no second derivative: nobody asked for it
            if asked:
                raise
            return None
        found.append(replace(end, value=-math.inf if value is None else value))
    return found


def evidence(lines: Sequence[Mapping[str, Any]]) -> list[float]:
    """The log evidence of all evidence steps."""
    return [line["log_evidence"] for line in lines if line.get("log_evidence") is not None]


def _kept(run: Run) -> list[float]:
    """The log evidence of all snapshots that have one, the start's too."""
    return [snapshot.log_evidence for snapshot in run.progress.snapshots.values() if snapshot.log_evidence is not None]


def _start(run: Run) -> Start:
    assert run.progress.start is not None, "begin() comes first"
    return run.progress.start


def _evidence(run: Run) -> float | None:
    """The log evidence of the present weights after a step of the precisions, as a snapshot's is."""
    how, due = run.schedule.evidence_step, max(1, run.waited(len(run.progress.lines) + 1))
    with run.state.trying():
        try:
            at = run.estimate(how, run.seed)
            evidence_steps.improved(run.prior, run.likelihood, at, how, due)
            return run.value(at)
        except NotFinite:
            return None


def _more(one: float | None, other: float | None) -> bool:
    return one is not None and (other is None or one > other)
