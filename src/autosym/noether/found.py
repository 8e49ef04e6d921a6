"""The result of a search: quantities in symbols, with names, singular values, drift, and the evidence for each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autosym.noether.conserved import Quadratic
from autosym.noether.drift import Doubt, unexplained
from autosym.noether.known import Known, unit
from autosym.report import words
from autosym.report.drawing import new_figure

STANDS_OUT = 0.2  # of the largest singular value: a direction below it is a remainder of the random start
EVIDENT = 5.0  # nats, odds of 150 to 1: the least evidence for a set of quantities
SAME = 0.95  # a quantity gets the name of a known one if their cosine is at least this
NEAR = 5.0  # degrees: from here on it is only "near" the known one, as a mixture of two energies is near their sum


@dataclass(frozen=True)
class Quantity:
    """C(x) = 1/2 x^T A x + b^T x, in the units of the data."""

    text: str
    A: tuple[tuple[float, ...], ...]
    b: tuple[float, ...]
    name: str | None  # of the nearest known quantity, if the cosine of their angle is at least SAME; "near" it from NEAR on
    angle: float  # to the nearest known quantity, in degrees
    drift: float  # change of C along held-out trajectories; 1 is the change by a move of that size in any direction
    nats: float  # the log evidence lost without it, or gained with it if it is undecided
    along: tuple[tuple[float, ...], ...] = ()  # its change along some of these trajectories, in the units of ``drift``
    noise: float = 0.0  # the part of ``drift`` that noise of the states explains, at least
    doubt: Doubt = ""  # why it does not count

    @property
    def changes(self) -> float:
        """The drift that noise does not explain."""
        return unexplained(self.drift, self.noise)

    def __str__(self) -> str:
        called = (
            f"{self.name}, at {self.angle:.1f} degrees" if self.name else f"no known one (nearest at {self.angle:.0f} degrees)"
        )
        noisy = f" ({self.noise:.1%} by noise)" if self.noise >= 0.001 else ""
        return f"{self.text}\n      {called}; drift {self.drift:.1%}{noisy}; {self.nats:+.1f} nats of evidence for it"


@dataclass(frozen=True)
class Discovery:
    """The conserved quantities: those that do not change along trajectories, and that the evidence supports.

    Candidates come in closed form from the training trajectories (``candidates.least_drift``). Whether a candidate changes, there and
    along held-out trajectories, is judged by ``drift.judged``. All that do not change count together, as a set: if, by themselves,
    they have at least EVIDENT nats more than no symmetry. A member of the set may have negative nats, as flows of other members can
    move points in the same way. Evidence alone does not do: a flow that is no
    symmetry smooths the Hamiltonian, and that has evidence too.
    """

    quantities: tuple[Quantity, ...]
    undecided: tuple[Quantity, ...]  # by their ``doubt``
    drifting: tuple[Quantity, ...]  # the search by evidence found them (at least STANDS_OUT of the largest), but they change
    singular_values: tuple[float, ...]
    directions: Tensor  # right singular vectors (rank, M M + M) of (A, b), in units where the data have size 1
    log_evidence: float  # of the velocities, in nats, exact; with the quantities alone, or with all directions if none counts
    log_evidence_without: float  # of the same model without any symmetry
    starts: tuple[float, ...]  # the log evidence that each start, or each number of directions, reached; the best is kept
    residual: float  # change of the H that the search learned under its flows, relative to F: 0 is invariant
    points: int
    scale: float  # root mean square of all coordinates of the data
    features: str = "all coordinates"  # what the features of the Hamiltonian depend on

    @property
    def symmetries(self) -> int:
        return len(self.quantities)

    def generators(self) -> list[list[list[float]]]:
        """G = [[J A, J b], [0, 0]] of each quantity, in the units of the data."""
        made = (Quadratic.of(torch.tensor([q.A]), torch.tensor([q.b])) for q in self.quantities)
        return [quantity.generators()[0].tolist() for quantity in made]

    def parallelness(self, truth: tuple[Known, ...]) -> list[float]:
        """Norm of the projection of each quantity (without any, the first direction) on the span of the true ones: 1 is inside."""
        basis = torch.linalg.qr(torch.stack([known.vector(self.scale) for known in truth]).mT)[0]
        made = (Known("", torch.tensor(q.A).double(), torch.tensor(q.b).double()) for q in self.quantities)
        found = [quantity.vector(self.scale) for quantity in made] or [self.directions[0]]
        return (torch.stack(found) @ basis).norm(dim=1).tolist()

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON. Here ``parallelness`` is the cosine between each quantity and the nearest known one."""
        return {
            "symmetries": self.symmetries,
            "quantities": [vars(q) for q in self.quantities],
            "undecided": [vars(q) for q in self.undecided],
            "drifting": [vars(q) for q in self.drifting],
            "parallelness": [float(np.cos(np.deg2rad(q.angle))) for q in self.quantities],
            "singular_values": list(self.singular_values),
            "standing_out": standing_out(self.singular_values),
            "generators": self.generators(),
            "log_evidence": self.log_evidence,
            "log_evidence_without": self.log_evidence_without,
            "starts": list(self.starts),
            "residual": self.residual,
            "points": self.points,
            "features": self.features,
        }

    def __str__(self) -> str:
        count = self.symmetries
        gain = self.log_evidence - self.log_evidence_without
        lines = [words.counted(count)]
        lines += [f"C{i + 1} = {q}" for i, q in enumerate(self.quantities)]
        lines += [f"Undecided: {q}\n      {words.undecided(q.doubt)}" for q in self.undecided]
        if self.drifting:
            worst = max(q.drift for q in self.drifting)
            lines.append(f"Not conserved: {len(self.drifting)} {words.DRIFTING} (drift up to {worst:.0%}).")
        of = "" if count else " of what the search learned"
        lines.append(
            f"Log evidence{of} {self.log_evidence:.1f} nats over {self.points} points, {gain:+.1f} against no symmetry."
        )
        lines.append("Singular values of what the search learned: " + ", ".join(f"{s:.2f}" for s in self.singular_values))
        return "\n".join(lines)

    def plot(self) -> Any:
        """A matplotlib figure: the singular values, and the generator of every quantity."""
        generators = self.generators()
        figure = new_figure(3.2 * (1 + max(1, len(generators))), 3.2)
        axes = figure.subplots(1, 1 + len(generators), squeeze=False)[0]
        heights, count = self.singular_values, standing_out(self.singular_values)
        axes[0].bar(range(1, len(heights) + 1), heights, color=["C0" if i < count else "0.75" for i in range(len(heights))])
        axes[0].axhline(STANDS_OUT * max(heights), color="0.4", linestyle=":", linewidth=1)
        axes[0].set(title=f"{count} of {len(heights)} stand out", xlabel="generator", ylabel="singular value")
        for axis, matrix, quantity in zip(axes[1:], generators, self.quantities, strict=True):
            bound = float(np.abs(matrix).max()) or 1.0
            axis.imshow(matrix, cmap="RdBu", vmin=-bound, vmax=bound)
            axis.set(title=quantity.name or "unnamed", xticks=[], yticks=[])
        return figure


def standing_out(singular_values: Sequence[float]) -> int:
    """How many directions stand out."""
    return sum(value >= STANDS_OUT * max(singular_values) for value in singular_values)


def readable(span: Tensor, known: list[Known], scale: float) -> Tensor:
    """A basis (n, D) of unit vectors for the span of n orthonormal rows; it contains the known quantities that lie in the span.

    Equal singular values leave their singular vectors free up to a rotation. In this basis they can be read and named.
    """
    chosen: list[Tensor] = []
    rest = span
    for one in known:
        v = one.vector(scale)
        if len(rest) and (span @ v).norm() >= SAME and (rest @ v).norm() >= 0.5:
            chosen.append(unit(span.mT @ (span @ v)))
            inside = unit(rest @ v)
            rest = (
                torch.linalg.svd(torch.eye(len(rest), dtype=rest.dtype) - torch.outer(inside, inside))[0][:, : len(rest) - 1].mT
                @ rest
            )
    return torch.stack([*chosen, *rest]) if len(span) else span
