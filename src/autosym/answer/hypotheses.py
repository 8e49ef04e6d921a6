"""Which networks stand for which hypothesis, and how they are made.

    symmetry         strict: keeps it               relaxed: may break it           untied: without the tie
    translations     convolutions, circular         free paths beside them          the free paths alone
    a group G        group convolutions             turn:G beside them              convolutions of as many channels

Each relaxed network contains the strict one, path by path and layer by layer, so weights can be handed from one to the other
(``surgery.handing_over``). Networks come from a name of ``nets.build`` (``Built``), or from a user's CNN by ``lift`` and ``relax``
(``Given``), which is also tried as it is.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from autosym.answer.plans import Question, Run
from autosym.linear.conv import Conv
from autosym.linear.groups import GROUPS
from autosym.linear.path import Kept
from autosym.nn import nets
from autosym.nn.layers import Relaxed
from autosym.surgery.handing_over import relaxed, wake, without
from autosym.surgery.lifting import Lifting, lift
from autosym.surgery.relaxing import Relaxation, relax
from autosym.surgery.widening import anew, widened

SHIFTS = "translations"
START = 0.3  # the size of free paths that are trained together with symmetric ones from the start, as in ``nets.build``
AS_GIVEN = "as given"
USUAL = (SHIFTS, "c4", "flip-horizontal")


class Networks(Protocol):
    """The networks of a search: ``questions`` about symmetries, ``others`` that belong to none, and ``build``."""

    questions: tuple[Question, ...]
    others: tuple[str, ...]
    widths: tuple[float, ...]
    notes: tuple[str, ...]
    example: Tensor

    def build(self, network: str, width: float, seed: int) -> nn.Module:
        """The network, initialised by ``seed``; the same each time."""
        ...

    def route(self, run: Run) -> str:
        """By which weights a run begins."""
        ...


def breaking(model: nn.Module, layers: Sequence[str] | None = None) -> list[str]:
    """The paths of these relaxed layers, or of all, that break a symmetry which another path of their layer keeps, as LAYER.PATH."""
    found = []
    for name, layer in relaxed(model).items():
        kept = {path: layer.keeps(path) for path in layer}
        if layers is None or name in layers:
            found += [f"{name}.{p}".lstrip(".") for p in layer if any(_keeps_more(other, kept[p]) for other in kept.values())]
    return found


def _keeps_more(one: Kept, other: Kept) -> bool:
    shifts = (one.equivariant or one.invariant) and not (other.equivariant or other.invariant)
    return (one.every and not other.every) or shifts or (not other.every and set(one.groups) > set(other.groups))


def checked(symmetries: str | Sequence[str], size: Sequence[int]) -> tuple[str, ...]:
    """The names of the symmetries, without doubles; groups that do not act on images of this size are refused.

    Of the ``USUAL`` ones, which nobody chose, quarter turns are left out if images are not square.
    """
    names = (symmetries,) if isinstance(symmetries, str) else tuple(dict.fromkeys(symmetries))
    if names == USUAL and size[0] != size[1]:
        names = tuple(name for name in names if name != "c4")
    exact = [name for name, group in GROUPS.items() if group.exact]
    unknown = [name for name in names if name not in (SHIFTS, *exact)]
    if unknown or not names:
        raise ValueError(
            f"symmetries must name some of {SHIFTS}, {', '.join(exact)}; got {unknown[0] if unknown else 'none'!r}"
        )
    for name in names:
        if name != SHIFTS:
            GROUPS[name].check_size(size)
    return names


def sized(in_shape: Sequence[int], samples: int) -> dict[str, Any]:
    """Arguments of ``nets.build`` for images and their number: maps are halved while their sides are even, up to four times."""
    sides, halvings = list(in_shape[1:]), 0
    while halvings < 4 and all(side % 2 == 0 for side in sides):
        sides, halvings = [side // 2 for side in sides], halvings + 1
    blocks = max(3, halvings)
    return {
        "width": min(16, max(4, int(math.sqrt(samples) / 3))),
        "channels": tuple(2**block for block in range(blocks)),
        "strides": (2,) * halvings + (1,) * (blocks - halvings),
        "hidden": 8,
    }


class Built:
    """Networks of ``nets.build``. The name says which free path stands beside convolutions: "f-fc+conv", "where+conv"; "conv": f-fc.

    A width counts channels, so a group convolution has as many as the convolution that it is compared with.
    """

    def __init__(self, name: str, symmetries: Sequence[str], example: Tensor, classes: int, samples: int, **form: Any):
        free = [path for path in name.split("+") if nets.is_free(path)]
        rest = set(name.split("+")) - set(free) - {"conv"}
        if rest or len(free) > 1:
            raise ValueError(
                f"discover makes its own networks from {name!r}: name one free path beside conv, e.g. f-fc+conv or where+conv"
            )
        self.example, self.classes = example[:2], classes
        self.others: tuple[str, ...] = ()
        self.notes: tuple[str, ...] = ()
        self.form = sized(example.shape[1:], samples) | form
        order = max((len(GROUPS[name]) for name in symmetries if name != SHIFTS), default=1)
        self.form["width"] = order * math.ceil(self.form["width"] / order)  # whole fields
        self.widths: tuple[float, ...] = (1.0, 2.0)
        mixed = f"{free[0] if free else 'f-fc'}+conv"
        self.questions = tuple(
            Question(s, "conv", mixed, "f-fc") if s == SHIFTS else Question(s, f"gconv:{s}", f"gconv:{s}+turn:{s}", "conv")
            for s in symmetries
        )

    def build(self, network: str, width: float, seed: int) -> nn.Module:
        group = network.partition("gconv:")[2].partition("+")[0]
        fields = max(1, round(width * self.form["width"] / (len(GROUPS[group]) if group else 1)))
        with seeded(seed):
            made = nets.build(network, tuple(self.example.shape[1:]), self.classes, **(self.form | {"width": fields}))
        return made.to(self.example)

    def route(self, run: Run) -> str:
        return ""


class Given:
    """Networks made of a user's CNN: by ``lift`` strict, by ``relax`` free. ``model`` is a module, or a factory: width -> module.

    Seed 0 begins with the weights of a module that was ``trained``, other seeds anew.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[int], nn.Module],
        symmetries: Sequence[str],
        example: Tensor,
        trained: bool,
        free: str = "auto",
    ):
        self.model, self.symmetries, self.free = model, tuple(symmetries), free
        self.trained = trained and isinstance(model, nn.Module)
        self.example = example[:2]
        self.shifts = SHIFTS in symmetries
        notes: list[str] = []
        self.widths: tuple[float, ...] = (1.0, 2.0)
        if isinstance(model, nn.Module):
            try:
                with seeded(0):
                    widened(model, self.example, 2)
            except ValueError as error:
                self.widths = (1.0,)
                notes.append(f"only one width was tried: {error}")
        if self.shifts and self._has_waves():
            notes.append(
                "maps are too large for F-FC: the network without the tie has waves of position alone, and is a weak rival"
            )
        self.notes = tuple(notes)
        apart = not self.shifts or not self._keeps_shifts()
        self.others: tuple[str, ...] = (AS_GIVEN,) if apart else ()
        plain = f"{SHIFTS} kept" if self.shifts else AS_GIVEN
        self.questions = tuple(
            Question(s, f"{s} kept", f"{s} relaxed", f"{s} untied", self.others)
            if s == SHIFTS
            else Question(s, f"{s} kept", f"{s} relaxed", plain)
            for s in self.symmetries
        )

    def build(self, network: str, width: float, seed: int) -> nn.Module:
        with seeded(seed):
            return self._made(network, width, seed).eval()

    def _made(self, network: str, width: float, seed: int) -> nn.Module:
        given = self._plain(width, seed)
        if network == AS_GIVEN:
            return relax(given, self.example, paths={})
        symmetry, _, role = network.rpartition(" ")
        trained = self._begins_trained(width, seed)
        if symmetry == SHIFTS:
            whole = relax(lift(given, self.example, SHIFTS), self.example, paths=self.free)
            if role == "kept":
                return without(whole, breaking(whole))
            if role == "untied":
                whole = without(whole, _tied(whole))
            if role == "untied" or not trained:
                _wake(whole, START if role == "relaxed" else 1.0)
            return whole
        whole = relax(self._lifted(given, symmetry, trained), self.example, paths="where")
        turned = without(whole, [f"{name}.{path}".lstrip(".") for name, layer in relaxed(whole).items() for path in layer.free])
        if role == "kept":
            return without(turned, breaking(turned))
        if not trained:
            _wake(turned, START)
        return turned

    def _lifted(self, given: nn.Module, group: str, trained: bool) -> nn.Module:
        padding: Any = "circular" if self.shifts else None
        if trained:
            try:
                return lift(given, self.example, group, weights="projected", padding=padding)
            except ValueError:
                pass  # its widths are no whole fields: a network of new weights then
        return lift(given, self.example, group, padding=padding)

    def _plain(self, width: float, seed: int) -> nn.Module:
        if not isinstance(self.model, nn.Module):
            return self.model(int(width)).to(self.example).eval()
        if width > 1:
            return widened(self.model, self.example, int(width)).eval()
        return (copy.deepcopy(self.model) if self._begins_trained(width, seed) else anew(self.model)).to(self.example).eval()

    def route(self, run: Run) -> str:
        return "trained" if self._begins_trained(run.width, run.seed) else ""

    def _begins_trained(self, width: float, seed: int) -> bool:
        return self.trained and seed == 0 and width == 1

    def _has_waves(self) -> bool:
        with seeded(0):
            made = relax(lift(self._plain(1, 0), self.example, SHIFTS), self.example, paths=self.free).relaxation
        assert isinstance(made, Relaxation)
        return any("where" in note.paths for note in made.layers)

    def _keeps_shifts(self) -> bool:
        with seeded(0):
            found = lift(self._plain(1, 0), self.example, SHIFTS).lifting
        assert isinstance(found, Lifting)
        return all(note.became == "kept" for note in found.layers)


def _tied(model: nn.Module) -> list[str]:
    """The convolutions that have a free path beside them. A head keeps both of its parts: together they are a dense map."""
    layers = [(name, layer) for name, layer in relaxed(model).items() if layer.free]
    return [
        f"{name}.{path}".lstrip(".")
        for name, layer in layers
        for path in layer.symmetric
        if any(isinstance(part, Conv) for part in layer[path].modules())
    ]


def _wake(model: nn.Module, size: float) -> None:
    for layer in model.modules():
        if isinstance(layer, Relaxed):
            for name in layer.silent():
                wake(layer[name], size)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Torch's random numbers on the CPU begin at ``seed``; what they were before comes back at the end."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
