"""What the evidence of a whole network costs, and what a fit costs: counted, not timed, so that runs decide alike on any machine.

The unit is a multiplication of a large matrix product. A number that a layer reads or writes counts as ``NUMBER`` of them, and a call of a
layer as ``CALL``, as small layers spend their time so (set by twenty networks on a CPU). By the path law a path multiplies S K out in times
for a sample, and moves S K (out + in) numbers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from autosym.curvature.owners import sites
from autosym.curvature.passes import Pass, budget
from autosym.curvature.tape import Tape
from autosym.evidence.laplace import Laplace
from autosym.evidence.rows import MOVED, outer_is_slower
from autosym.linear.path import Definition
from autosym.runtime import arithmetic
from autosym.runtime.batching import Data

NUMBER = 40.0
CALL = 1e7  # of a path in a training step, however small: calling it takes time
STEP = 3.0  # forward passes of a training step
PRODUCT = 6.0  # of a product with the Gauss-Newton matrix
PROBES, STEPS = 16, 30  # that an estimate by probes takes, as a rule
How = Literal["weights", "rows", "probes"]

FEW = 12_000  # weights or rows: no larger matrix is factorised


@dataclass(frozen=True)
class Costs:
    """Multiplications of a forward pass of one sample, and of the evidence by each route that there is memory for."""

    forward: float
    samples: int
    paths: int
    routes: Mapping[How, float]

    @property
    def cheapest(self) -> How:
        """The route of the least work."""
        return min(self.routes, key=self.routes.__getitem__)

    @property
    def least(self) -> float:
        return self.routes[self.cheapest]

    def fit(self, epochs: int, batch_size: int) -> float:
        """Those of the weight steps of a fit."""
        calls = epochs * math.ceil(self.samples / batch_size) * self.paths
        return epochs * self.samples * STEP * self.forward + calls * CALL


def within_a_fit(
    model: nn.Module, data: Data, laplace: Laplace, epochs: int, batch_size: int, times: int = 1, memory: float | None = None
) -> bool:
    """Whether the evidence of the whole network, so many ``times``, takes no more work than a fit of so many epochs."""
    costs = of(model, data, laplace, memory)
    return times * costs.least <= costs.fit(epochs, batch_size)


@arithmetic.true_float32()
def of(model: nn.Module, data: Data, laplace: Laplace, memory: float | None = None) -> Costs:
    """The costs for the model and data that ``laplace`` was taken at."""
    x = next(iter(Pass(model, data, laplace.likelihood, 1)))[0][:1]
    shapes = _shapes(model, x)
    forward = _forward(shapes)
    counted = [shape for name, shape in shapes.items() if name not in laplace.left_out]
    weights, rows = sum(k * o * i for _, k, o, i in counted), laplace.samples * laplace.outputs
    outer = [(k, o, i) for s, k, o, i in counted if s == 1 and not outer_is_slower(o, i)]
    joined = weights - sum(k * o * i for k, o, i in outer)
    slopes = rows * STEP * forward  # the Jacobian, row by row
    routes: dict[How, float] = {"probes": PROBES * STEPS * PRODUCT * laplace.samples * forward}
    device, size = x.device, next(model.parameters()).element_size()
    room = 2 * budget(memory, device)
    if weights <= FEW and 8 * 4 * weights**2 <= room:
        routes["weights"] = slopes + 0.6 * rows * weights**2 + 0.8 * weights**3
    if rows <= FEW and 8 * 5 * rows**2 + 2 * size * rows * weights <= room:
        each = sum(k * (o + MOVED) for k, o, _ in outer)
        routes["rows"] = slopes + rows**2 * (0.9 * joined + each) + (1.0 if outer else 0.4) * rows**3
    return Costs(forward, laplace.samples, len(shapes), routes)


@arithmetic.true_float32()
def of_fit(model: nn.Module, x: Tensor, samples: int, epochs: int, batch_size: int) -> float:
    """The work of the weight steps of a fit of ``model`` on so many samples like ``x``, (B, ...), before there is any evidence."""
    shapes = _shapes(model, x[:1])
    return Costs(_forward(shapes), samples, len(shapes), {}).fit(epochs, batch_size)


def _forward(shapes: Mapping[str, tuple[int, int, int, int]]) -> float:
    return sum(s * k * (o * i + NUMBER * (o + i)) for s, k, o, i in shapes.values())


def _shapes(model: nn.Module, x: Tensor) -> dict[str, tuple[int, int, int, int]]:
    """S, K, out and in of every path, for one sample."""
    found: dict[str, tuple[int, int, int, int]] = {}
    owned = {site.name: site.parameter.numel() for site in sites(model)}

    def see(name: str, path: Definition, x: Tensor) -> None:
        shared, blocks, inside = path.columns(x)[:1].shape[1:]
        found[name] = shared, blocks, owned[name] // (blocks * inside), inside

    with Tape(sites(model), see) as tape, torch.enable_grad():
        tape.record(model, x)
    return found
