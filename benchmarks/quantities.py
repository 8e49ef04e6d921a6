"""What ``same_numbers.py`` compares of the library: functions that yield quantities, each a name and any nest of numbers."""

import contextlib
import importlib
import json
import math
import pkgutil
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import autosym

Quantities = Iterator[tuple[str, Any]]
NOT_NUMBERS = {"seconds", "evidence_seconds", "provenance"}  # times, and where a result comes from


@cache
def find(name: str, *files: str) -> Any:
    """What is called ``name`` in a module with one of these file names, wherever in the package that module is."""
    modules = [module.name for module in pkgutil.walk_packages(autosym.__path__, "autosym.")]
    for file in files:
        for module in modules:
            if module.rpartition(".")[2] == file and hasattr(importlib.import_module(module), name):
                return getattr(importlib.import_module(module), name)
    raise LookupError(f"no module called {' or '.join(files)} has {name}: add the name of its file to this call of find()")


def leaves(value: Any) -> Iterator[np.ndarray]:
    """Every number of a value, in a fixed order: by name in dictionaries and modules; strings are left out."""
    if isinstance(value, nn.Module):
        value = value.state_dict()
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            if key not in NOT_NUMBERS:
                yield from leaves(value[key])
    elif isinstance(value, Tensor):
        yield value.detach().cpu().contiguous().numpy()
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from leaves(part)
    elif value is None or isinstance(value, (bool, int, float)):
        yield np.array(math.nan if value is None else value, dtype=np.float64)
    elif not isinstance(value, str):
        raise TypeError(f"a {type(value).__name__} is neither a number nor holds any: name the numbers of it")


def exact_bytes(value: Any) -> bytes:
    return b"".join(part.tobytes() for part in leaves(value))


def parts(record: Any) -> list[Any]:
    """All of an evidence."""
    return [record.log_evidence, record.log_likelihood, record.log_prior, record.complexity, record.occam, record.samples]


def shares(rows: list[Mapping[str, Any]]) -> list[Any]:
    """What is known of every path of every layer."""
    keys = ("share", "effective_parameters", "parameters", "precision", "omega", "symmetric")
    return [[row[key] for key in keys] for row in rows]


# ---- data and models


def images(count: int = 60, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Bars in noise: across (class 0), or down in the left (1) or the right half (2). So both shape and position matter."""
    draw = torch.Generator().manual_seed(5)
    x = 0.2 * torch.randn(count, 1, 8, 8, generator=draw, dtype=torch.float64)
    y = torch.arange(count) % 3
    places = torch.randint(4, (count,), generator=draw)
    for image, label, place in zip(x[:, 0], y.tolist(), places.tolist(), strict=True):
        image[(2 * place, slice(None)) if label == 0 else (slice(None), place + 4 * (label - 1))] += 2
    return x.to(dtype), y


def numbers(x: Tensor, outputs: int = 3) -> Tensor:
    """Targets of a regression."""
    return x.flatten(1)[:, 10 : 10 + outputs].sin()


def net(name: str, outputs: int = 3, **options: Any) -> nn.Module:
    """A small network of the papers' kind."""
    torch.manual_seed(1)
    return find("build", "nets", "networks")(name, (1, 8, 8), outputs, 2, (1, 2), (2, 2), hidden=4, **options)


def cnn(norm: bool = False, **options: Any) -> nn.Module:
    """A user's own network."""
    torch.manual_seed(2)
    first, second = nn.Conv2d(1, 4, 3, padding=1, **options), nn.Conv2d(4, 4, 3, 2, padding=1, groups=2, bias=False)
    middle = nn.BatchNorm2d(4) if norm else nn.Identity()
    made = nn.Sequential(first, nn.ReLU(), second, middle, nn.Tanh(), nn.Flatten(), nn.LazyLinear(3)).eval()
    made(torch.zeros(1, 1, 8, 8))
    for statistic in middle.buffers():
        statistic.copy_(torch.rand(statistic.shape) + 0.5)
    return made


def conv1d() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv1d(1, 3, 3, padding=1), nn.ReLU(), nn.Conv1d(3, 4, 3, stride=2), nn.Flatten(), nn.Linear(28, 3))


def dense() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.Tanh(), nn.Linear(5, 3))


def symmetrised() -> nn.Module:
    return autosym.symmetrise(net("conv"), {"rotation": 0.5, "x-translation": 0.2}, samples=5)


# ---- evidence

GROUPS = ("c2", "c4", "d4", "c8", "flip-horizontal", "flip-vertical")
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    **{name: partial(net, name) for name in ("fc", "conv", "f-fc", "s-fc", "s-conv", *(f"gconv:{group}" for group in GROUPS))},
    **{name: partial(net, name) for name in ("fc+conv", "f-fc+conv", "s-fc+s-conv", "conv+gconv:c4", "f-fc+conv+gconv:d4")},
    "s-fc+s-conv, omega": partial(net, "s-fc+s-conv", prior="omega"),
}
TORCH: dict[str, Callable[[], nn.Module]] = {
    "torch linear": dense,
    "torch conv1d": conv1d,
    **{f"torch conv2d {mode}": partial(cnn, padding_mode=mode) for mode in ("zeros", "circular")},
    "torch conv2d dilation": partial(cnn, dilation=2),
}
CURVATURE: dict[str, dict[str, Any]] = {
    "exact": {},
    "sampled": {"sampled": True, "seed": 3},
    "subset": {"subset": 9, "seed": 4},
}
MORE: dict[str, dict[str, Any]] = {
    "sampled subset": {"sampled": True, "subset": 7},
    "blocks": {"share_blocks": True},
    "expand": {"expand_bias": True},
    "batches": {"batch_size": 5, "dtype": torch.float64},
}


def laplace(model: nn.Module, data: Any, likelihood: Any = None, **options: Any) -> tuple[Any, Any]:
    """The evidence; its slopes, the effective parameters, and the precisions after a closed-form step."""
    likelihood = likelihood or autosym.Categorical()
    at = find("at", "laplace")(model, data, likelihood, **options)
    prior = autosym.Prior(at.names, 2.0)
    record = at(prior)
    slopes = torch.autograd.grad(record.log_evidence, [prior.log_precision, *likelihood.parameters()])
    gammas = at.effective_parameters(prior)
    at.mackay(prior)
    return parts(record), [slopes, gammas, prior.log_precision]


def of_networks() -> Quantities:
    for name, make in {**NETWORKS, **TORCH}.items():
        model = make() if name in NETWORKS else make().double()
        x, y = images(16, next(model.parameters()).dtype)
        x = x.flatten(2)[..., :16] if "1d" in name else x
        found = {kind: laplace(model, (x, y), **options) for kind, options in CURVATURE.items()}
        found["gaussian"] = laplace(model, (x, numbers(x)), autosym.Gaussian(0.7))
        for kind, (record, _) in found.items():
            yield f"evidence {name}, {kind}", record
        yield f"slopes {name}", [slopes for _, slopes in found.values()]
    for kind, options in MORE.items():
        yield f"evidence f-fc+conv, {kind}", laplace(net("f-fc+conv"), images(16), **options)
    by_name = {"1.weight": 3.0, "1.bias": 1.0, "3.weight": 2.0, "3.bias": 0.5}
    yield "log_evidence", [autosym.log_evidence(dense(), images(16), prior_precision=given) for given in (1.0, by_name)]


def of_other_estimators() -> Quantities:
    model, (x, y) = net("f-fc+conv"), images(16)
    for kind, options in {"all": {}, "parts": {"parts": 2}, "one output": {"samples": 8, "outputs": "one"}}.items():
        at = find("at", "kernel")(model, (x, y), **options)
        prior = autosym.Prior(at.names, 2.0)
        yield f"kernel {kind}", [parts(at(prior)), at.effective_parameters(prior)]
    posterior = find("Posterior", "variational")(model, 0.05)
    record = find("at", "variational")(model, (x, y), posterior, count=3)
    slopes = torch.autograd.grad(record.log_evidence, list(posterior.parameters()))
    posterior.update_precisions(0.5)
    yield "variational", [parts(record), slopes, posterior.kl()]
    pair = x.flatten(1).double()[:, :6], numbers(x).double()
    yield "exact", [parts(find("at", "exact")(*pair, precision=p, variance=0.3)) for p in (2.0, torch.arange(1.0, 7))]
    features = find("RandomFeatures", "last_layer", "features")(64, 8)
    fitted = find("learn", "last_layer")(autosym.symmetrise(features, {"rotation": 0.3}, samples=3), (x, y), 3, epochs=3)
    yield "last layer", [parts(fitted.evidence), fitted.history, fitted.head, fitted(x)]


def of_ranges() -> Quantities:
    model, data = symmetrised(), images(16)
    for kind in ("exact", "sampled"):
        at = find("at", "laplace")(model, data, "categorical", **CURVATURE[kind])
        leaf = {"raw": model.transformations.raw}
        gradient = find("gradient", "differentiable", "gradient", "gradients")
        yield f"slopes of ranges, {kind}", gradient(model, data, autosym.Prior(at.names, 2.0), at, leaf, **CURVATURE[kind])
    for where in ("input", "weights"):
        made = autosym.symmetrise(net("fc"), "affine", samples=4, where=where, padding="border")
        made.transformations.redraw(7)
        torch.manual_seed(8)
        yield f"symmetrised, {where}", [made(data[0]), made.augmentation()(data[0]), [r.value for r in made.ranges().values()]]


# ---- fits


def jitter(x: Tensor, generator: torch.Generator) -> Tensor:
    return x + 0.1 * torch.randn(x.shape, generator=generator)


def relaxed() -> nn.Module:
    return autosym.relax(cnn(norm=True), images(4)[0], fold=True)


def loader() -> DataLoader:
    return DataLoader(TensorDataset(*images()), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(6))


FITS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "default": (NETWORKS["f-fc+conv"], {}),
    "gradient": (NETWORKS["f-fc+conv"], {"step": "gradient", "hyper_steps": 3}),
    "paper": (NETWORKS["fc+conv"], {"schedule": "paper", "every": 2}),
    "none": (NETWORKS["conv"], {"step": "none", "prior_precision": 0.5}),
    "student-t": (NETWORKS["f-fc+conv"], {"nu": 4.0}),
    "omega": (NETWORKS["s-fc+s-conv, omega"], {}),
    "groups": (NETWORKS["conv+gconv:c4"], {}),
    "kernel": (NETWORKS["conv"], {"kernel": 10}),
    "gaussian": (partial(net, "f-fc+conv", 2), {"likelihood": "gaussian"}),
    "ranges": (symmetrised, {"hyper_lr": 0.15}),
    "relaxed": (relaxed, {"lr": 0.02}),
    "augmented": (NETWORKS["conv"], {"augment": jitter, "optimiser": "sgd", "lr": 0.02, "subset": 12, "clip": 1.0}),
    "loader": (NETWORKS["conv"], {"data": loader, "evidence_data": images()}),
    "double": (lambda: relaxed().double(), {"data": partial(images, dtype=torch.float64), "sampled": False, "damping": 0.5}),
}


def run_fit(name: str, **more: Any) -> autosym.Fit:
    make, options = FITS[name]
    options = {"epochs": 8, "batch_size": 16, "seed": 2, **options, **more}
    x, y = images()
    data = options.pop("data")() if "data" in options else (x, numbers(x, 2) if "likelihood" in options else y)
    model = make()
    torch.manual_seed(0)
    return autosym.fit(model, data, **options)


fitted = cache(run_fit)


def end_of(fit: autosym.Fit) -> dict[str, Any]:
    return {
        "evidence": parts(fit.evidence),
        "weights": fit.model,
        "precisions": [fit.prior.log_precision, fit.likelihood, fit.schedule.lr],
        "history": fit.history,
        "shares": shares(fit.symmetry().as_dicts()),
    }


def of_fits() -> Quantities:
    for name in FITS:
        for part, value in end_of(fitted(name)).items():
            yield f"fit {name}, {part}", value


class Interrupted(Exception):
    pass


def interrupt(line: Mapping[str, Any]) -> None:
    if line["epoch"] == 5:
        raise Interrupted


def of_checkpoints(handed: Path) -> Quantities:
    """Runs that are stopped after half of their epochs and go on: from a file of this source, and from one that ``handed`` holds."""
    for name in ("default", "student-t", "omega", "gaussian", "ranges", "augmented", "relaxed"):
        for kind, folder in (("own", None), ("handed on", handed)):
            with tempfile.TemporaryDirectory() as temporary:
                file = (folder or Path(temporary)) / f"{name}.safetensors"
                if not file.exists():
                    with contextlib.suppress(Interrupted):
                        run_fit(name, checkpoint=file, checkpoint_seconds=0.0, log=interrupt)
                own = shutil.copy(file, Path(temporary) / "resumed.safetensors")
                end = end_of(run_fit(name, checkpoint=own, resume=True))
                if exact_bytes(end) != exact_bytes(end_of(fitted(name))):
                    raise ValueError(f"{name}, {kind}: resumed, it does not end like the run that was never interrupted")
            yield f"checkpoint {name}, {kind}", end


# ---- after a fit


def of_answers() -> Quantities:
    x, y = images()
    for name in ("default", "groups", "relaxed"):
        simple = autosym.simplify(fitted(name), (x, y), nats=0.5)
        found = simple.model.simplification
        worth = [[path.nats, path.share, path.left_out] for path in found.paths]
        yield f"simplify {name}", [found.log_evidence, worth, end_of(simple)]
        for kind, data in (("with data", (x, y)), ("without", None)):
            plain = autosym.harden(fitted(name), data, tolerance=0.2)
            notes = [[part.dropped, part.share, part.change] for part in plain.hardening.parts]
            cost = vars(plain.hardening.cost) if plain.hardening.cost else None
            yield f"harden {name}, {kind}", [plain(x), notes, plain.hardening.parameters, cost, plain]
    for paths in ("f-fc", "fc", "s-fc", "fc+s-fc"):
        torch.manual_seed(9)
        model = autosym.relax(cnn(norm=True), x[:4], paths, fold=True)
        yield f"relax {paths}", [model(x), len(model.relaxation.names("relaxed")), model]
    line = x.flatten(2)[..., :16]
    torch.manual_seed(9)
    yield "relax conv1d", autosym.relax(conv1d(), line[:4])(line)
    compared = autosym.compare({name: fitted(name) for name in ("default", "none", "groups", "student-t")}, (x, y))
    keys = ("log_evidence", "per_sample", "difference", "probability", "short_of_mode", "unlearned")
    yield "compare", [[row[key] for key in keys] for row in compared.rows]
    for name in ("default", "gaussian", "student-t", "omega"):
        for link in ("probit", "monte-carlo") if name == "default" else ("probit",):
            found = fitted(name).predictive(x[:5], link, samples=16)
            keys = ("mean", "covariance", "variance", "probabilities")  # others may be added
            yield f"predictive {name}, {link}", {key: getattr(found, key) for key in keys}
    for name in ("default", "groups", "relaxed"):
        errors = autosym.equivariance_error(fitted(name).model, ["translations", *GROUPS], (x, y), elements=5, seed=1)
        yield f"equivariance {name}", [row.error for row in errors]
    yield "calibration_error", autosym.calibration_error(fitted("default").model(x).detach().softmax(1), y)


def of_reports() -> Quantities:
    keys = ("evidence", "samples", "outputs", "fingerprint", "parameters", "effective_parameters", "broken", "ranges", "banks")
    keys += ("history", "filters", "compare", "equivariance", "calibration", "sigma_noise")
    for name, data in {"default": images(), "ranges": images(30), "groups": None, "gaussian": None}.items():
        others = {"none": fitted("none"), "a number": -30.0} if name == "default" else None
        found = find("contents", "findings", "contents")(fitted(name), data, compare=others)
        json.dumps(found, allow_nan=False)
        known = [found.get(key) for key in keys]
        yield f"report {name}", [found["evidence"]["log_evidence"], known, shares(found["symmetry"])]


def of_own_loop() -> Quantities:
    for kind in ("penalty", "gradient"):
        model, (x, y) = net("f-fc+conv"), images()
        options = {"step": "gradient", "subset": 20} if kind == "gradient" else {}
        learner = autosym.Learner(model, (x, y), prior_precision=0.5, seed=3, **options)
        optimiser, records = torch.optim.SGD(model.parameters(), 0.05), []
        for _ in range(3):
            optimiser.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            (loss + learner.penalty() if kind == "penalty" else loss).backward()
            if kind == "gradient":
                learner.add_prior_gradient()
            optimiser.step()
            records.append(parts(learner.step()))
        yield f"learner, {kind}", [records, model, learner.prior.log_precision, shares(learner.symmetry().as_dicts())]


def of_dynamics() -> Quantities:
    draw = torch.Generator().manual_seed(1)
    size, phase = (torch.rand(6, 1, generator=draw, dtype=torch.float64) * scale + 0.5 for scale in (1.0, 6.0))
    angle = phase + 0.1 * torch.arange(15)
    x = torch.stack([size * angle.cos(), -size * angle.sin()], 2)
    search = autosym.noether.Search(points=12, starts=2, steps=60, features=32)
    found = autosym.noether.discover(x, 0.1, search=search, seed=1)
    yield "noether", [found.log_evidence, found.as_dict()]
