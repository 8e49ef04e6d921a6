"""lift: a user's CNN as one that is strictly equivariant to a group, with the same topology.

    conv: C -> C' channels        ->  group convolution: C/|G| -> C'/|G| fields of |G| channels
    f(g x) = f(x) for every g     checked on random numbers in float64 before the model is returned

What forward() does between layers stays as it is. Layers are replaced in the order in which one forward pass meets them, each by what
its actual input allows, so widths stay consistent over residuals and concatenation.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import replace as replace_fields
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from autosym.curvature.input_shapes import explained
from autosym.curvature.owners import sites
from autosym.linear.group_conv import GroupConv
from autosym.linear.groups import GROUPS, Group
from autosym.linear.normalisation import NORMALISATIONS, too_wide
from autosym.linear.path import Path
from autosym.nn.layers import Relaxed
from autosym.runtime import arithmetic
from autosym.runtime.batching import check_module
from autosym.runtime.tables import table
from autosym.surgery.checking import OfSize, replace
from autosym.surgery.flow import FIELDS, INVARIANT, Flow, Trace
from autosym.surgery.function_calls import pools_as_modules
from autosym.surgery.over_group import KEPT, PADS, POOLS, WHY, Made, OverGroup
from autosym.surgery.over_shifts import OverShifts
from autosym.surgery.plain_layers import is_subclass, plain_layers

TOLERANCE = 1e-9  # relative, in float64: of a lifted model that does not follow its group exactly
SHIFTS = ((0, 0), (0, 1), (1, 0), (2, 1), (-3, 2), (5, -4))
COVERED = (nn.Linear, nn.Conv1d, nn.Conv2d, *NORMALISATIONS)
MATCHES, WEIGHTS, PADDINGS = ("channels", "parameters"), (None, "scratch", "projected"), (None, "circular")


@dataclass(frozen=True)
class LiftedLayer:
    """What one layer of the given model became."""

    layer: str
    kind: str
    became: str
    note: str


@dataclass(frozen=True)
class Lifting:
    """What became of every layer, in the order of the forward pass; the numbers of parameters before and after. Prints as a table."""

    group: str
    layers: tuple[LiftedLayer, ...]
    parameters: tuple[int, int]

    def __str__(self) -> str:
        rows = [("layer", "kind", "became", "")]
        rows += [(n.layer or "(model)", n.kind, n.became, n.note) for n in self.layers]
        before, after = self.parameters
        return f"{table(rows, '<<<<')}\nlifted to {self.group}; parameters: {before} before, {after} after"


@arithmetic.true_float32()
def lift(
    model: nn.Module,
    example: Tensor,
    group: str | Group,
    match: Literal["channels", "parameters"] = "channels",
    weights: Literal["scratch", "projected"] | None = None,
    padding: Literal["circular"] | None = None,
) -> nn.Module:
    """A copy of a CNN whose outputs do not change when the image is moved by ``group``: f(g x) = f(x), for any weights.

    ``group`` names an exact group of turns and flips ("c2", "c4", "d4", "flip-horizontal", "flip-vertical", or a ``Group``), or
    "translations". ``example`` is a small batch of images (B, C, H, W); the lifted model takes images of this size.

    **A group of turns and flips.** Channels become fields of |G| channels; the first convolution lifts the image, the others are group
    convolutions; normalisation treats a field as one channel; dense layers see the mean over the group and over positions.
    ``match="channels"`` keeps the number of channels (rounded up to whole fields), with about 1/|G| of the parameters;
    ``match="parameters"`` about keeps the number of parameters, with sqrt(|G|) times the channels. Weights start anew. With
    ``weights="projected"`` they are the orthogonal projection of the trained ones onto equivariant maps. The channels of a trained network
    are not turned copies of each other, so the projection does not compute what the network did: train it again.

    **Translations.** Padding becomes circular, a stride becomes the choice of a polyphase grid, a dense layer on flattened maps becomes
    its invariant part. Trained weights are kept, but they were trained for other borders and strides: train it on.

    ``padding="circular"`` makes padding circular for a group too; it is kept as it is by default. Zeros turn with the image, but do not
    follow shifts. Layers that cannot be lifted are refused by name. ``lifting`` of the returned model says what each layer became.
    """
    with explained(model, example):
        found = _refuse(model, example, group, match, weights, padding)
        example = example[:2].to(next(model.parameters()))
        plain = plain_layers(model, example)
    options = (found, match, weights == "projected", padding)
    try:
        lifted = _lifted(plain, example, *options)
    except _NotFollowed as error:
        called = pools_as_modules(plain) if error.functions else None
        if called is None:
            raise
        lifted = _lifted(called, example, *options)
    return lifted if plain is model else _with_given_kinds(lifted, model)


def _with_given_kinds(lifted: nn.Module, model: nn.Module) -> nn.Module:
    """Subclasses of torch's layers under their own names in ``lifting``, not as the torch layers that they were read as."""
    found, given, layers = lifted.lifting, dict(model.named_modules()), []
    assert isinstance(found, Lifting)
    for note in found.layers:
        owner = given.get(note.layer) or given.get(note.layer.rpartition(".")[0])  # what it was read as may be a Sequential
        if owner is not None and is_subclass(owner):
            note = replace_fields(note, kind=type(owner).__name__, note=", ".join(filter(None, (note.note, f"as {note.kind}"))))
        layers.append(note)
    size = sum(parameter.numel() for parameter in model.parameters())
    lifted.lifting = replace_fields(found, layers=tuple(layers), parameters=(size, found.parameters[1]))
    return lifted


class _NotFollowed(ValueError):
    """A lifted model does not follow its group; ``functions`` are what its forward() calls to resize maps."""

    def __init__(self, message: str, functions: Sequence[str]):
        super().__init__(message)
        self.functions = functions


def _lifted(
    model: nn.Module, example: Tensor, group: Group | None, match: str, projected: bool, padding: str | None
) -> nn.Module:
    lifted = copy.deepcopy(model)
    training = {module: module.training for module in lifted.modules()}
    lifted.eval()
    finals, read, gates = _plan(lifted, example)
    if group is not None and finals & read:
        raise ValueError(
            "the outputs add up maps that other layers read too: end the model with one dense layer or convolution"
        )
    recipe = OverShifts() if group is None else OverGroup(group, match, projected, padding, finals, gates)
    replacing = _Replacing(lifted, recipe, group, training)
    notes = replacing.run(example)
    with torch.device("cpu"):
        _check(lifted, example, group, replacing.flow.functions)
    for module in lifted.modules():
        module.training = training.get(module, model.training)
    sizes = tuple(sum(p.numel() for p in m.parameters()) for m in (model, lifted))
    name = "translations" if group is None else group.name
    lifted.register_forward_pre_hook(OfSize(tuple(example.shape[2:]), "lifted"))
    lifted.lifting = Lifting(name, notes, (sizes[0], sizes[1]))  # type: ignore[assignment]
    return lifted


def _refuse(
    model: nn.Module, example: Tensor, group: str | Group, match: str, weights: str | None, padding: str | None
) -> Group | None:
    """The group, or None for translations. Refuses, before any work, what cannot be lifted."""
    check_module(model)
    if not isinstance(example, Tensor) or not example.is_floating_point() or example.dim() != 4 or not len(example):
        raise ValueError("example must be a small batch of images (B, C, H, W) of floating point numbers")
    for name, value, known in (("match", match, MATCHES), ("weights", weights, WEIGHTS), ("padding", padding, PADDINGS)):
        if value not in known:
            raise ValueError(f"{name} is {value!r}: use {' or '.join(repr(k) for k in known if k)}")
    if hasattr(model, "lifting") or any(isinstance(module, (Path, Relaxed)) for module in model.modules()):
        raise ValueError("the model is lifted or relaxed already: lift the plain model, then relax it")
    for name, module in model.named_modules():
        if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():  # type: ignore[misc]
            raise ValueError(f"{name} ({type(module).__name__}) has no weights yet: run the model once on an example first")
    if not list(model.parameters()):
        raise ValueError("the model has no parameters, so there is nothing to lift")
    if group == "translations":
        if weights is not None or match != "channels" or padding is not None:
            raise ValueError(
                "translations keep the trained weights and widths, with circular padding: leave out weights, match, padding"
            )
        return None
    exact = [name for name, known in GROUPS.items() if known.exact]
    found = GROUPS.get(group) if isinstance(group, str) else group
    if not isinstance(found, Group):
        raise ValueError(f"unknown group {group!r}: use {', '.join(exact)}, translations, or a Group")
    if not found.exact or found.size is not None or len(found) < 2:
        why = (
            "interpolates, so no network over it is exactly equivariant"
            if not found.exact
            else "is no group of turns and flips"
        )
        raise ValueError(f"{found.name} {why}: use {', '.join(exact)}")
    if weights == "projected" and match != "channels":
        raise ValueError("weights='projected' needs as many channels as were trained: use match='channels'")
    found.check_size(example.shape[-2:])
    return found


def _plan(model: nn.Module, example: Tensor) -> tuple[frozenset[nn.Module], set[nn.Module], set[nn.Module]]:
    """The convolutions whose maps are the model's output, those that layers read, and the dense layers whose outputs become maps."""
    flow = Flow(example)
    read: set[nn.Module] = set()

    def see(module: nn.Module, args: tuple, y: Any) -> None:
        trace = flow.of(args[0]) if args and isinstance(args[0], Tensor) else None
        if trace is None or not isinstance(y, Tensor):
            return
        if isinstance(module, nn.Conv2d):
            flow.mark(y, Trace(FIELDS, y.shape[1], frozenset({module})))
        else:
            flow.mark(y, Trace(INVARIANT, y.shape[-1], denses=trace.denses | {module}))
        read.update(trace.convs)

    handles = [m.register_forward_hook(see) for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    try:
        with flow, torch.no_grad():
            outputs = model(example)
    except RuntimeError as error:
        raise ValueError(
            f"the model does not take the example, {tuple(example.shape)}; torch says: {str(error).splitlines()[0]}"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    if not isinstance(outputs, Tensor) or outputs.dim() != 2 or len(outputs) != len(example):
        shape = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ValueError(
            f"the model must return (B, outputs) for a batch of {len(example)}, got {shape}: lift the part of it that does"
        )
    trace = flow.of(outputs)
    return trace.convs if trace is not None else frozenset(), read, flow.gates


class _Pending(nn.Module):
    """Stands where a layer was, until it sees the first input and knows what the layer becomes."""

    def __init__(self, name: str, module: nn.Module, replacing: "_Replacing"):
        super().__init__()
        self.name, self.given, self.replacing = name, [module], replacing  # in a list: not a child
        self.made: Made | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
            return self.replacing.call(self, args[0])
        return self.replacing.call_as_given(self, args, kwargs)


class _Replacing:
    """Replaces the layers of a model, each when a forward pass meets it."""

    def __init__(self, model: nn.Module, recipe: OverGroup | OverShifts, group: Group | None, training: dict[nn.Module, bool]):
        self.model, self.recipe, self.group, self.training = model, recipe, group, training
        self.notes: dict[str, LiftedLayer] = {}
        self.last = "the image"

    def run(self, example: Tensor) -> tuple[LiftedLayer, ...]:
        pending = [_Pending(name, module, self) for name, module in self._targets()]
        for stand_in in pending:
            replace(self.model, stand_in.given[0], stand_in)
        self.flow = Flow(example)
        try:
            with self.flow, torch.no_grad(), self._shown():
                self.model(example)
        except (RuntimeError, AttributeError, TypeError, IndexError) as error:
            raise ValueError(
                f"forward() of the lifted model cannot run after {self.last} ({str(error).splitlines()[0]}): it reads attributes or "
                "numbers of channels or positions of the given layers, or adds a buffer or maps of another width; take them from the "
                "tensors instead (x.shape[1], torch.flatten), or choose widths that |G| divides"
            ) from error
        for stand_in in pending:
            (given,) = stand_in.given
            if stand_in.made is None and list(given.parameters()):
                raise ValueError(f"{stand_in.name} ({type(given).__name__}) took no part in the forward pass: remove it")
            replace(self.model, stand_in, given if stand_in.made is None else stand_in.made.module)
        self._freeze()
        return tuple(self.notes.values())

    def call(self, stand_in: _Pending, x: Tensor) -> Tensor:
        (module,), name = stand_in.given, stand_in.name
        kind, trace = type(module).__name__, self.flow.of(x)
        self.flow.inside += 1
        try:
            unseen = Made(module, "kept", "does not see the image", INVARIANT)
            with x.device:  # whatever torch.set_default_device says
                made = unseen if trace is None else self.recipe.make(module, x, trace)
            if stand_in.made is not None and (list(module.parameters()) or made.became != stand_in.made.became):
                raise ValueError("it is used more than once in a forward pass: make one layer for each use")
            stand_in.made = made = stand_in.made or made
            y = made.module.eval()(x)
        except ValueError as error:
            raise ValueError(f"{name} ({kind}) cannot be lifted: {error}") from error
        for part in made.module.modules():
            self.training[part] = self.training[module]
        if trace is not None:
            same = made.kind == FIELDS and y.dim() == 2 and y.shape == x.shape  # flattened maps keep their number of channels
            self.flow.mark(y, Trace(made.kind, trace.channels if same else y.shape[1]))
        self.flow.inside -= 1
        self.last = name
        if self.group is not None and made.kind == FIELDS:
            _tell(made.module, self.group)
        self.notes.setdefault(name, LiftedLayer(name, kind, made.became, made.note))
        return y

    def call_as_given(self, stand_in: _Pending, args: tuple, kwargs: dict) -> Any:
        """A layer of several inputs stays as it is, for translations; whether it follows them is measured."""
        (module,), name = stand_in.given, stand_in.name
        kind = type(module).__name__
        if self.group is not None:
            raise ValueError(f"{name} ({kind}) cannot be lifted: {WHY.get(type(module), 'its input is not one tensor')}")
        stand_in.made = Made(module, "kept", "", FIELDS)
        self.notes.setdefault(name, LiftedLayer(name, kind, "kept", ""))
        return module(*args, **kwargs)

    def _targets(self) -> list[tuple[str, nn.Module]]:
        """Torch layers with parameters, and pools. Parameters of a user's own classes are refused, or frozen if they are one number."""
        found: list[tuple[str, nn.Module]] = []
        for name, module in self.model.named_modules():
            if any(module is part for _, taken in found for part in taken.modules()):
                continue
            own, torchs = list(module.parameters(recurse=False)), type(module).__module__.startswith("torch.nn")
            kinds = (*POOLS, *KEPT, _BatchNorm, nn.InstanceNorm2d, *(PADS if self.recipe.padding else ()))
            if torchs and (own or isinstance(module, kinds)):
                found.append((name, module))
            elif self.group is not None and any(parameter.numel() > 1 for parameter in own):
                raise ValueError(
                    f"{name or 'the model'} ({type(module).__name__}) has parameters of its own, which may differ by channel or position: "
                    "lift knows torch's layers; use nn.Conv2d, nn.Linear, nn.BatchNorm2d, nn.GroupNorm, or one number"
                )
        return found

    def _freeze(self) -> None:
        """Parameters that the evidence does not cover are point estimates."""
        for name, module in self.model.named_modules():
            own = list(module.parameters(recurse=False))
            wide = type(module) in NORMALISATIONS and too_wide(module)
            if own and not isinstance(module, Path) and (type(module) not in COVERED or wide):
                for parameter in own:
                    parameter.requires_grad_(False)
                why = "a point estimate: the evidence does not cover it"
                self.notes[name] = LiftedLayer(name, type(module).__name__, "frozen", why)

    @contextmanager
    def _shown(self) -> Iterator[None]:
        """Say of torch's own layers on fields that their output is lifted, as group convolutions do (``equivariance_error``)."""

        def tell(module: nn.Module, _: object, y: Any) -> None:
            trace = self.flow.of(y) if isinstance(y, Tensor) else None
            if self.group is not None and trace is not None and trace.kind == FIELDS:
                _tell(module, self.group)

        leaves = [m for m in self.model.modules() if not isinstance(m, _Pending) and not list(m.children())]
        handles = [module.register_forward_hook(tell) for module in leaves]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _tell(module: nn.Module, group: Group) -> None:
    for part in module.modules():
        if not list(part.children()) and not isinstance(part, Path):
            part.lifted = group  # type: ignore[assignment]


@torch.no_grad()
def _check(lifted: nn.Module, example: Tensor, group: Group | None, functions: Sequence[str]) -> None:
    """f(g x) = f(x) to rounding, for random images and random weights and statistics: equivariance must not rest on their values.

    On the CPU, where float64 is not slow, and the same numbers are drawn whatever the model's device.
    """
    sites(lifted)
    drawn = torch.Generator("cpu").manual_seed(0)
    shaken = copy.deepcopy(lifted).double().cpu()
    for parameter in shaken.parameters():
        size = parameter.square().mean().sqrt().clamp_min(0.1)
        parameter.data += size / 2 * torch.randn(parameter.shape, generator=drawn, dtype=torch.float64)
    for module in shaken.modules():
        if isinstance(module, _BatchNorm) and module.running_mean is not None and module.running_var is not None:
            module.running_mean += torch.randn(module.running_mean.shape, generator=drawn, dtype=torch.float64) / 4
            module.running_var *= 1 + torch.rand(module.running_var.shape, generator=drawn, dtype=torch.float64)
    image = torch.randn(1, *example.shape[1:], generator=drawn, dtype=torch.float64)
    moved = (
        [image.roll(shift, (-2, -1)) for shift in SHIFTS] if group is None else [group.act(g, image) for g in range(len(group))]
    )
    inputs: dict[str, Tensor] = {}
    for name, module in shaken.named_modules():
        if isinstance(module, GroupConv) and not module.lift:
            module.register_forward_pre_hook(lambda _, args, name=name: inputs.__setitem__(name, args[0]))
    f = shaken(torch.cat(moved))
    if (f - f[:1]).norm() <= TOLERANCE * f.norm():
        return
    what = "translations" if group is None else group.name
    where = "the output" if group is None else next((name for name, x in inputs.items() if _is_broken(x, group)), "the output")
    hint = f"; it calls {', '.join(functions)}: make that a module, which lift can replace" if functions else ""
    raise _NotFollowed(
        f"what reaches {where} does not follow {what}: forward() does something between the layers that depends on position, "
        f"orientation or the order of channels (slices of maps, shuffled channels, pools on maps without a symmetric grid){hint}",
        functions,
    )


def _is_broken(x: Tensor, group: Group) -> bool:
    expected = torch.cat([group.act_on_features(g, x[:1]) for g in range(len(group))])
    return bool((x - expected).norm() > TOLERANCE * x.norm())
