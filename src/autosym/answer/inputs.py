"""What ``discover`` is given: data that can be asked about, a model or a name for one, and options of ``fit``."""

import copy
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from autosym.answer.hypotheses import Built, Given, seeded
from autosym.bayes.likelihoods import Likelihood
from autosym.curvature import input_shapes
from autosym.runtime.batching import Data, batches, checksum, is_sharded, raw, size_of, targets_of, to_model
from autosym.training.schedule import Schedule

OPTIONS = ("augment", "memory", "capture", "deterministic")  # of ``fit``, beside the fields of a schedule
TRAINED = 0.1  # nats a sample: what a model that was trained explains at least
CHANNELS = (1, 3)  # of one image, that is given without a batch


def schedule(options: Mapping[str, Any]) -> tuple[Schedule, dict[str, Any]]:
    """The schedule of a full fit, and the other options of ``fit``."""
    known = {*OPTIONS, "schedule", *(field.name for field in fields(Schedule))}
    if unknown := sorted(set(options) - known):
        raise TypeError(f"discover got {', '.join(unknown)}; it takes fields of Schedule, and {', '.join(OPTIONS)}")
    more = {key: options[key] for key in OPTIONS if key in options}
    changes = {key: value for key, value in options.items() if key not in (*OPTIONS, "schedule")}
    schedule = Schedule.of(options.get("schedule"), changes)
    if schedule.step == "none" or schedule.kernel is not None:
        raise ValueError("discover compares evidence at learned precisions: leave out step='none' and kernel")
    return schedule, more


def looked_at(data: Data, batch_size: int) -> tuple[Tensor, int, int]:
    """A few images, how many samples there are, and how many classes or targets. Targets that are all the same are refused."""
    first, count, most = None, 0, 0
    told: set[tuple[float, ...]] = set()
    whole = data.dataset if is_sharded(data) else data  # type: ignore[union-attr]
    for x, y in batches(whole, batch_size):
        first, count = x if first is None else first, count + len(x)
        told |= set(map(tuple, y.reshape(len(y), math.prod(y.shape[1:]))[: 1 if len(told) > 1 else None].tolist()))
        most = max(most, int(y.max()) + 1 if not y.is_floating_point() else (y.shape[1] if y.dim() > 1 else 1))
    if first is None or first.dim() != 4:
        shape, mend = ("none", "") if first is None else (tuple(first.shape), f"{_mended(first.shape)}; ")
        raise ValueError(
            f"discover takes images (B, C, H, W) with targets, got {shape}: {mend}give a pair of tensors, or a dataset. Of sequences "
            "(B, C, L) it cannot be asked: relax the network, fit and simplify"
        )
    if len(told) == 1:
        only = ", ".join(f"{number:g}" for number in next(iter(told))[:4])
        raise ValueError(
            f"all {count} targets are {only}: a network learns nothing from them; give samples of a second class, or number"
        )
    return first[:8], size_of(data) or count, most


def _mended(shape: Sequence[int]) -> str:
    """How images of this shape become a batch; one image is told by its channels."""
    one = len(shape) == 3 and shape[0] in CHANNELS
    return "this looks like one image; give all of them, x in place of x[0]" if one else input_shapes.mended(shape)


def networks(
    model: Any,
    names: Sequence[str],
    x: Tensor,
    samples: int,
    outputs: int,
    data: Data,
    likelihood: Likelihood,
    network: Mapping[str, Any] | None,
) -> tuple[Built | Given, dict[str, Any]]:
    """The networks of the hypotheses, and the recipe by which an answer makes its own again."""
    recipe: dict[str, Any] = {
        "symmetries": list(names),
        "in_shape": list(x.shape[1:]),
        "dtype": str(x.dtype).removeprefix("torch."),
    }
    if isinstance(model, str):
        form = dict(network or {})
        classes = form.pop("classes", outputs)
        likelihood.check(classes, targets_of(data))
        built = Built(model, names, x, classes, samples, **form)
        form = {key: list(v) if isinstance(v, tuple) else v for key, v in form.items()}
        return built, recipe | {"name": model, "classes": classes, "samples": samples, "form": form}
    if network is not None:
        raise ValueError("network says how a named network is made, but a model was given: leave it out")
    if not isinstance(model, nn.Module) and (isinstance(model, type) or not callable(model)):
        raise TypeError(f"model must be a torch module, a name for nets.build or a factory width -> module, got {model!r}")
    trained = isinstance(model, nn.Module) and is_trained(model, data, likelihood)
    x = x.to(
        next((model if isinstance(model, nn.Module) else model(1)).parameters())
    )  # its device and precision, whatever the data's
    return Given(model, names, x, trained), recipe | {"name": None, "trained": trained, "free": "auto"}


@torch.no_grad()
def is_trained(model: nn.Module, data: Data, likelihood: Likelihood) -> bool:
    """Whether outputs fit their own targets better than those of other samples, of all data: they may be sorted by class."""
    model = copy.deepcopy(model).eval()
    outputs, targets = [], []
    for batch in batches(data, 256):
        x, y = to_model(*batch, model, "discover")
        outputs.append(model(x))
        likelihood.check(outputs[-1].shape[1], y)
        targets.append(y)
    f, y = torch.cat(outputs), torch.cat(targets)
    others = f[torch.randperm(len(f), generator=torch.Generator().manual_seed(0)).to(f.device)]
    losses = [float(likelihood.loss(g, y)) / len(y) for g in (f, others)]
    return losses[1] - losses[0] > TRAINED


def known(model: Any, data: Data, recipe: Mapping[str, Any]) -> dict[str, Any]:
    """What tells a search from others in its folder: the data, and the model that is given: its layers and its weights."""
    with seeded(0):
        made = model if isinstance(model, nn.Module) else None if isinstance(model, str) else model(1)
    given = 0 if made is None else zlib.crc32(repr(made).encode())
    for tensor in () if made is None else made.state_dict().values():
        given = zlib.crc32(raw(tensor), given)
    return {"data": _sum_of(data), "model": given, "recipe": {key: repr(value) for key, value in recipe.items()}}


def _sum_of(data: Data) -> int | None:
    """A checksum: of tensors in their order, of other data over samples in any order, as a loader may shuffle them."""
    known = checksum(data)
    if known is not None:
        return known
    return sum(checksum(one) or 0 for x, y in batches(data, 256) for one in zip(x.split(1), y.split(1), strict=True))
