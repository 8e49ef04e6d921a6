"""relax: add a free path beside the symmetric one in every layer of a user's network that has a symmetry.

    conv(x)   ->  1/n (n conv(x) + free(x) + ...)             free(x) = 0 at the start: the function is the same
    W vec(x)  ->  1/2 (2 pool(x) + 2 rest(x))                 pool sees the mean over positions, rest sees x - mean x

In a factored free path, only the output factor starts at zero. A layer that is not relaxed stays as it is, and is listed with
the reason. Parameters that the evidence cannot cover are frozen: they are point estimates outside the evidence. A subclass of a torch
layer is read as the plain layer that it computes (``reading``), and a dense layer on maps (..., C) as a 1x1 convolution.
"""

import copy
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from autosym.curvature.owners import is_under
from autosym.curvature.verification import refuse_batch_dependence
from autosym.linear.conv import CONVOLUTIONS, Conv, form_of
from autosym.linear.dense import Bias, Centred, Pool
from autosym.linear.normalisation import NORMALISATIONS, WIDEST, too_wide
from autosym.linear.path import Path
from autosym.nn.layers import Affine, Relaxed
from autosym.runtime import arithmetic
from autosym.runtime.tables import table
from autosym.surgery.chains import pool_of, relaxed_lifted
from autosym.surgery.checking import OfSize, check, replace
from autosym.surgery.folding import fold as merge
from autosym.surgery.free_paths import (
    LARGEST_FACTORS,
    approximate,
    factor_bytes,
    fewer_waves,
    fitting,
    free_names,
    free_path,
    start_at_zero,
    too_large,
)
from autosym.surgery.observation import LAYERS, Observation, Seen, is_subclass
from autosym.surgery.reading import Read, as_convolution, read
from autosym.surgery.refusals import observed, refuse


@dataclass(frozen=True)
class LayerNote:
    """What became of one layer: "relaxed", "kept" (trained, in the evidence), "frozen" (a point estimate) or "folded"."""

    layer: str
    kind: str
    outcome: str
    paths: tuple[str, ...]
    note: str
    one_size: bool = False  # whether it computes the same as before for inputs of this size only


@dataclass(frozen=True)
class Relaxation:
    """What became of every layer with parameters, in the model's order; prints as a table."""

    layers: tuple[LayerNote, ...]
    parameters: tuple[int, int] = (0, 0)  # before and after
    factor_bytes: int = 0  # of the Kronecker factors of all autosym paths, in float32

    @property
    def growth(self) -> float:
        """Parameters after, in units of parameters before."""
        return self.parameters[1] / self.parameters[0] if self.parameters[0] else 1.0

    def names(self, outcome: str) -> tuple[str, ...]:
        """The names of layers with this outcome."""
        return tuple(note.layer for note in self.layers if note.outcome == outcome)

    def __str__(self) -> str:
        rows = [("layer", "kind", "outcome", "paths", "")]
        rows += [(n.layer or "(model)", n.kind, n.outcome, " + ".join(n.paths), n.note) for n in self.layers]
        return "\n".join([table(rows, "<<<<<"), *self._nothing(), *self._grown()])

    def _grown(self) -> Iterator[str]:
        if self.names("relaxed"):
            before, after = self.parameters
            yield f"parameters: {before:,} before, {after:,} after ({self.growth:.1f} times)"
            yield f"Kronecker factors of relaxed layers: {self.factor_bytes / 2**20:,.1f} MiB in float32"

    def _nothing(self) -> Iterator[str]:
        """What to do if no layer was relaxed."""
        kinds = {kind.__name__ for kind in (*CONVOLUTIONS, Relaxed)}
        if not self.names("relaxed") and not kinds & {note.kind for note in self.layers}:
            yield "No layer was relaxed: relax frees convolutions (Conv1d, Conv2d, Conv3d) and dense layers on their maps."
            yield "This model has none: give it a network with convolutions, or build one with autosym.nn.build."
        elif not self.names("relaxed"):
            yield "No layer was relaxed, for the reasons given."


@arithmetic.true_float32()
def relax(
    model: nn.Module,
    example: Tensor,
    paths: str | Mapping[str, str] = "auto",
    keep: Collection[str] = (),
    fold: bool = False,
    learn_normalisation: bool = False,
) -> nn.Module:
    """A copy of ``model`` that computes the same function, with a symmetric and a free path in its layers.

    ``example`` is a small batch of inputs; the free paths are made for maps of its size. ``paths`` names the free path of every
    convolution: "f-fc", "fc", "s-fc", "where", or several joined by "+". "where" is a convolution times the lowest waves of position along
    each axis (4 on images), "where:8" times the 8 lowest; with no other free path, a model of convolutions still takes inputs of other
    sizes. "auto" is "f-fc", or "where" if f-fc would add more than 20 million weights to the model. ``paths`` may also be a dict from layer
    names to free paths; all other layers then stay as they are. A dense layer on flattened maps becomes "pool" and "rest": what it does
    with the mean over positions, and with the differences from it. In a model of ``lift``, every group convolution becomes a chain: beside
    it stand one path for each smaller group ("turn:c4" breaks c4), and the free path. So does its head, with "rest" as the free path.

    ``keep`` names layers, or whole modules, that stay as they are. ``fold`` merges batch normalisation into the layer directly
    before it. Scales and shifts of normalisation layers are frozen; with ``learn_normalisation`` those of BatchNorm, LayerNorm and
    GroupNorm are trained, and covered by the evidence.

    ``relaxation`` of the returned model lists what was relaxed, kept, frozen and folded, and why, and by how much the model grew.
    """
    keep = (keep,) if isinstance(keep, str) else tuple(keep)
    refuse(model, example, paths, keep)
    refuse_batch_dependence(model)
    example = example.to(next(model.parameters()))
    relaxed = copy.deepcopy(model)
    seen = observed(relaxed, example)
    if paths == "auto":
        paths = fitting(seen.of(module) for module in relaxed.modules() if isinstance(module, (*CONVOLUTIONS, Relaxed)))
    modules = dict(relaxed.named_modules())
    held = {m for name, m in modules.items() if any(is_under(name, k) for k in keep)}
    with example.device:  # whatever torch.set_default_device says
        notes = _converted(relaxed, modules, seen, paths, held, fold, learn_normalisation)
    notes = _put_back(relaxed, example, modules, notes)
    for note in notes:
        if isinstance(paths, Mapping) and note.layer in paths and note.outcome != "relaxed":
            raise ValueError(f"{note.layer} ({note.kind}) cannot be relaxed: {note.note}; leave it out of paths")
    size, made = (sum(p.numel() for p in m.parameters()) for m in (model, relaxed))
    relaxed.relaxation = Relaxation(tuple(notes), (size, made), factor_bytes(relaxed))  # type: ignore[assignment]
    if any(note.one_size for note in notes):
        relaxed.register_forward_pre_hook(OfSize(tuple(example.shape[2:]), "relaxed"))
    check(relaxed, example, seen.outputs)
    return relaxed


def _converted(
    relaxed: nn.Module,
    modules: Mapping[str, nn.Module],
    seen: Observation,
    paths: str | Mapping[str, str],
    held: Collection[nn.Module],
    fold: bool,
    learn_normalisation: bool,
) -> list[LayerNote]:
    """Relax, fold or freeze the layers of the model in place; what became of each."""
    norms = {name: m for name, m in modules.items() if isinstance(m, _BatchNorm)}
    unfolded = {name: merge(relaxed, m, seen, held) for name, m in norms.items()} if fold else {}
    notes = []
    over_group = [m for m in modules.values() if isinstance(m, Relaxed)]  # of a lifted model
    inside = {part for layer in over_group for part in layer.modules() if part is not layer}
    for name, module in modules.items():
        if module in inside:
            continue
        told = f"; not folded: {unfolded[name]}" if unfolded.get(name) else ""
        if unfolded.get(name) == "":
            notes.append(LayerNote(name, type(module).__name__, "folded", (), "into the layer before it"))
        elif isinstance(module, (*LAYERS, Relaxed)):
            notes.append(_convert(relaxed, name, module, seen.of(module), paths, module in held))
        elif type(module) in NORMALISATIONS and list(module.parameters()):
            notes.append(_normalisation(name, module, seen.of(module), learn_normalisation, told))
        elif list(module.parameters(recurse=False)) or name in norms:
            notes.append(_frozen(name, module, f"a point estimate: the evidence does not cover this kind of layer{told}"))
    return notes


def _convert(
    model: nn.Module, name: str, module: nn.Module, seen: Seen, paths: str | Mapping[str, str], held: bool
) -> LayerNote:
    """Relax one convolution or dense layer of the model in place, or say why it stays as it is."""
    kind = type(module).__name__
    dense = (isinstance(module, nn.Linear) and not seen.last) or pool_of(module) is not None
    wanted = paths.get(name) if isinstance(paths, Mapping) else "pool" if dense else paths
    trained = {parameter.requires_grad for parameter in module.parameters()}
    if trained != {False} and seen.calls > 1 and not held:
        raise ValueError(
            f"{name} ({kind}) is used {seen.calls} times in a forward pass: the curvature of a shared layer is not the sum of its "
            f"uses; make one layer for each use, or keep it as it is, frozen, with keep=[{name!r}]"
        )
    if why := _uncovered(module, seen):
        return _frozen(name, module, why)
    if held or wanted is None or len(trained) > 1:
        why = "named in keep" if held else "not named in paths" if wanted is None else "partly frozen in the given model"
        return _as_given(name, module, why)
    own = _read(module, seen)
    if own.layer is None:
        return _frozen(name, module, own.note)
    layer, maps = as_convolution(own.layer, seen) if seen.last else (own.layer, seen)
    made, why = (relaxed_lifted if isinstance(layer, Relaxed) else _relaxed_dense if dense else _relaxed_conv)(
        name, layer, maps, wanted
    )
    note = "; ".join(filter(None, (why, own.note)))
    if made is None and own.layer is module:
        return LayerNote(name, kind, "kept", (), note)
    if made is not None:
        made.channels_last = seen.last
    new = made or (own.layer if own.runs else _conv(own.layer, seen, 1))
    replace(model, module, new.to(next(own.layer.parameters())).train(module.training))
    return LayerNote(name, kind, "kept" if made is None else "relaxed", tuple(made or ()), note, own.one_size)


def _conv(conv: nn.Module, seen: Seen, scale: int, path: Path | None = None) -> nn.Module:
    """A torch convolution, with its bias, times ``scale``, as paths: in ``path``, or in a new one."""
    assert isinstance(conv, CONVOLUTIONS)
    by_channel = (conv.out_channels, *(1 for _ in conv.kernel_size))
    return _with(path or Conv(*form_of(conv)), conv.weight, conv.bias, by_channel, seen.out_shape, scale, any_size=True)


def _read(module: nn.Module, seen: Seen) -> Read:
    """The module itself, or what a subclass of a torch layer was seen to compute."""
    if not is_subclass(module):
        return Read(module, "")
    assert seen.x is not None
    return read(module, seen.x)


def _as_given(name: str, module: nn.Module, why: str) -> LayerNote:
    """Leave the layer as it is: trained if the evidence covers it, so not as a subclass, which may compute anything."""
    if is_subclass(module):
        return _frozen(name, module, f"{why}; the evidence does not cover a subclass, {type(module).__name__}, as it is")
    return LayerNote(name, type(module).__name__, "kept", (), why)


def _normalisation(name: str, module: nn.Module, seen: Seen, learned: bool, told: str) -> LayerNote:
    """Keep the scale and shift of a normalisation layer for the evidence, or freeze them and say why; ``told`` is said too."""
    why = _uncovered(module, seen)
    if not why and not learned:
        why = "a point estimate: learn_normalisation is False"
    elif not why and too_wide(module):
        why = f"a point estimate: its exact block of curvature would be too large (more than {WIDEST} numbers)"
    if why:
        return _frozen(name, module, f"{why}{told}")
    return LayerNote(name, type(module).__name__, "kept", (), f"scale and shift learned{told}")


def _uncovered(module: nn.Module, seen: Seen) -> str:
    """Why the evidence cannot cover a layer of a kind that it covers, or an empty string."""
    if not any(parameter.requires_grad for parameter in module.parameters()):
        return "frozen in the given model"
    if seen.calls == 0:
        return "took no part in the forward pass as a layer, so the evidence cannot cover it"
    if seen.calls > 1:
        return "used more than once, so the evidence cannot cover it"
    if not seen.by_sample or module._forward_hooks or module._forward_pre_hooks:
        return "its input is not one tensor (B, ...), or it has hooks, so the evidence cannot cover it"
    return ""


def _relaxed_conv(name: str, conv: nn.Module, seen: Seen, wanted: str) -> tuple[Relaxed | None, str]:
    """conv(x) as the mean of n conv(x) and of free paths that start at zero, or None; and a note."""
    assert isinstance(conv, CONVOLUTIONS)
    linear = Conv(*form_of(conv)).to(conv.weight)
    free = free_names(name, conv, wanted)
    if len(seen.in_shape) != len(conv.kernel_size) + 1:
        raise ValueError(f"{name} saw an input without a batch, {seen.in_shape}: example must be a batch (B, ...)")
    if math.prod(seen.out_shape[1:]) == 1:
        return None, "has only one output position, so it shares no weights"
    if "s-fc" in free and len(conv.kernel_size) > 2:
        return None, "s-fc is for sequences and images: name it in paths with f-fc, fc or where"
    with torch.device("meta"):
        size = sum(factor_bytes(free_path(path, linear, seen)) for path in free)
    if size > LARGEST_FACTORS:
        return None, too_large(wanted, seen, size)
    symmetric = _conv(conv, seen, 1 + len(free), linear)
    made = {path: free_path(path, linear, seen).to(conv.weight) for path in free}
    for path in made.values():
        start_at_zero(path, linear, seen.x)
    return Relaxed({"conv": symmetric}, made), "; ".join([approximate(linear, seen.in_shape[1:]), *fewer_waves(made)])


def _relaxed_dense(name: str, linear: nn.Module, seen: Seen, wanted: str) -> tuple[Relaxed | None, str]:
    """W x on flattened maps as the mean of its invariant part, 2 pool(x), and of the rest, 2 rest(x)."""
    assert isinstance(linear, nn.Linear)
    if wanted != "pool":
        raise ValueError(f"{name} (Linear) cannot have the paths {wanted!r}: a dense layer on flattened maps takes 'pool'")
    positions = math.prod(seen.maps[1:])
    if not seen.maps or math.prod(seen.maps) != linear.in_features:
        return None, _why_not_pool(seen)
    if positions == 1:
        return None, "a dense map of one position has no symmetry to relax"
    channels, outputs = seen.maps[0], linear.out_features
    by_position = linear.weight.detach().unflatten(1, (channels, positions))
    invariant = by_position.sum(2)
    pool = _with(Pool(channels, positions, outputs), invariant, linear.bias, (outputs,), (outputs,), 2)
    rest = Centred(channels, positions, outputs)
    rest.weight.data = 2 * (by_position - invariant[..., None] / positions).reshape(rest.weight.shape)
    return Relaxed({"pool": pool}, {"rest": rest}), "invariant part and the rest"


def _why_not_pool(seen: Seen) -> str:
    """Why a dense layer has no invariant part to separate from the rest."""
    if len(seen.in_shape) > 1:
        alike = math.prod(seen.in_shape[:-1])
        return f"acts on the last axis, the same at all {alike} positions of the other axes: relax has no free path for that"
    if not seen.flat:
        return "a dense map has no symmetry to relax (relax saw no maps flattened just before it)"
    if not seen.convolved:
        return f"a dense map of flattened {seen.flat} has no symmetry to relax: no convolution comes before it"
    return f"a dense map of flattened {seen.flat}, not known to be the maps of a convolution, channels first"


def _with(
    path: Path,
    weight: Tensor,
    bias: Tensor | None,
    shape: Sequence[int],
    out_shape: Sequence[int],
    scale: int,
    any_size: bool = False,
) -> nn.Module:
    """The path with the weights of a torch layer, and its bias if it has one, times ``scale``."""
    path.weight.data = scale * weight.detach().reshape(path.weight.shape)
    if bias is None:
        return path
    own = Bias(shape, out_shape, any_size=any_size)
    own.weight.data = scale * bias.detach().reshape(own.weight.shape)
    return Affine(path, own)


def _frozen(name: str, module: nn.Module, why: str) -> LayerNote:
    for parameter in module.parameters(recurse=False):
        parameter.requires_grad_(False)
    return LayerNote(name, type(module).__name__, "frozen", (), why)


@torch.no_grad()
def _put_back(
    relaxed: nn.Module, example: Tensor, given: Mapping[str, nn.Module], notes: Sequence[LayerNote]
) -> list[LayerNote]:
    """Put layers back whose attributes forward() reads, and relaxed ones lack; other failures are left to ``check``."""
    now = {note.layer: note for note in notes}
    while True:
        try:
            relaxed(example)
        except AttributeError as error:
            new: Any = error.obj
            changed = (n for n, note in now.items() if relaxed.get_submodule(n) is not given[n] and note.outcome != "folded")
            name = next((n for n in changed if relaxed.get_submodule(n) is new), None)
            if name is None:
                return list(now.values())
            replace(relaxed, new, given[name])
            now[name] = _as_given(name, given[name], f"forward() reads its {error.name}, which a relaxed layer does not have")
        except Exception:
            return list(now.values())
        else:
            return list(now.values())
