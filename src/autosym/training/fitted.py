"""What a fit returns, and how it is saved and loaded."""

import copy
import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path as File
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from autosym.bayes import likelihoods
from autosym.bayes.likelihoods import LIKELIHOODS, Likelihood, classes
from autosym.bayes.priors import Prior
from autosym.curvature import Curvature, Factors, FewColumns
from autosym.curvature.owners import sites
from autosym.evidence import costs, mode, posterior, verdicts, whole
from autosym.evidence.kernel import Kernel
from autosym.evidence.laplace import Laplace
from autosym.evidence.leave_one_out import Tuning
from autosym.evidence.mode import Mode
from autosym.evidence.predictive import Link, Predictive, predictive
from autosym.evidence.record import Evidence, nats
from autosym.evidence.shares import Symmetry, symmetry
from autosym.evidence.whole import PRODUCTS, How, Whole
from autosym.nn.rebuilding import rebuilt
from autosym.nn.symmetrised import transformations
from autosym.runtime import files, processes
from autosym.runtime.batching import Data, check_module, raw
from autosym.runtime.records import pack, unpack
from autosym.training import checkpoint
from autosym.training.forecasting import Forecast
from autosym.training.schedule import Schedule
from autosym.training.snapshots import Start

FILE, KIND, RESULT = "fit.safetensors", "autosym fit", "result.json"
KINDS = {kind.__name__: kind for kind in (Schedule, Evidence, Laplace, Kernel, Whole, Curvature, Factors, FewColumns, Start)}
EXPECTED = {"schedule": Schedule, "history": list, "evidence": Evidence}
PRIOR = ("names", "nu", "log_precision", "scales", "mixture_bound")
ON_DEVICE = ("estimate/curvature/factors/", "estimate/eigenvalues/", "model/", "prior/scales/")  # the model's


@dataclass(frozen=True, repr=False)
class Fit:
    """A fitted model, its prior and noise, the history of the run, and the evidence at the end, at which ``estimate`` was taken.

    ``model`` is the one that was given to ``fit``. What depends on its weights is refused once they have changed (by another fit of the
    same model, say): ``restore()`` puts those of this fit back.
    """

    model: nn.Module
    prior: Prior
    likelihood: Likelihood
    schedule: Schedule
    history: list[dict[str, Any]]
    evidence: Evidence
    estimate: Laplace | Kernel | Whole
    seed: int = 0
    simplified: bool = False  # whether paths without evidence were left out (``simplify``)
    augmented: bool = (
        False  # whether weights were trained on other data than the evidence is of: ``augment``, or ``evidence_data``
    )
    weights: Mapping[str, Tensor] = field(default_factory=dict)  # of the model as it was fitted, by name in its state
    started: Mapping[str, Sequence[float] | None] = field(default_factory=dict)  # the widths of ranges before they were learned
    start: Start | None = None  # the model as it was given
    recoveries: int = 0  # how often the run collapsed, and went back to a good snapshot at a lower rate (history says why)
    epoch: int | None = None  # after which the weights were as they are now; 0 is the start
    chosen_by: str | None = None  # whose evidence chose that epoch: "kronecker", "whole" or "kernel"
    forecast: Forecast | None = None  # what the fit was expected to take; not saved
    given: Mapping[str, Tensor] = field(
        default_factory=dict
    )  # state of the model as it was given, if it was trained before; not saved

    # Pages are made from fits, so their room comes after this one: autosym/__init__.py gives the methods that write them.
    report: ClassVar[Callable[..., File]]
    """``fit.report(path, data=None, **options)``: what was learned as one HTML file (``report.writing.write``)."""
    plot: ClassVar[Callable[..., Any]]
    """``fit.plot()``: shares, evidence and precisions as a figure of matplotlib (``report.drawing.plot``)."""

    def __repr__(self) -> str:
        value, most = nats(float(self.evidence.log_evidence)), nats(self.evidence.most)
        found = f"log evidence {value} nats over {self.evidence.samples} samples ({self.likelihood.name})"
        cannot = "" if self.evidence.possible else f", which cannot be: at most {most}"
        gained = ", nothing was gained" if self.nothing_gained else ""
        again = f", {self.recoveries} recoveries" if self.recoveries else ""
        less = ", simplified: print(fit.model.simplification)" if hasattr(self.model, "simplification") else ""
        return f"<Fit of {type(self.model).__name__}: {found}{cannot}, {len(self.history)} epochs{again}{gained}{less}>"

    def __post_init__(self) -> None:
        if not self.weights:
            weights = {name: t.detach().clone() for name, t in self.model.state_dict().items()}
            object.__setattr__(self, "weights", weights)
        if not self.started:
            object.__setattr__(self, "started", {name: part.started for name, part in transformations(self.model).items()})

    @property
    def nothing_gained(self) -> bool:
        """Whether no snapshot of the run had more evidence than the given model, which is then returned as it was."""
        return self.epoch == 0

    def symmetry(self) -> Symmetry:
        """For every layer and path: precision, effective parameters, relative share. Prints as a table."""
        self.check_weights()
        found = symmetry(self.model, self.prior, self.estimate)
        found = replace(found, simplified=self.simplified, nothing_gained=self.nothing_gained)
        return with_cautions(
            found, self.evidence, self.estimate, self.prior, self.likelihood, self.schedule, self.history, self.epoch
        )

    def refine(
        self,
        data: Data,
        nats: float = 5.0,
        *,
        probes: int = 64,
        products: int = PRODUCTS,
        seconds: float | None = None,
        seed: int = 0,
        how: How | None = None,
        memory: float | None = None,
        tf32: bool = False,
    ) -> "Fit":
        """The same fit with the evidence of the whole network in place of its Kronecker approximation, and shares by it.

        ``data`` must be those of the fit. Two standard errors are at most ``nats``, or as small as so many ``probes``, ``products`` with
        the matrix, or ``seconds`` make them. There are none where a matrix of all weights, or of all samples, is factorised
        (``evidence.whole``). With ``tf32`` arithmetic is as torch is set. Compare refined fits with refined ones.
        """
        self.check_weights()
        found = whole.at(
            self.model,
            data,
            self.laplace,
            self.prior,
            nats=nats,
            seed=seed,
            how=how,
            probes=probes,
            products=products,
            seconds=seconds,
            memory=memory,
            tf32=tf32,
        )
        return replace(self, evidence=found.evidence, estimate=found)

    def affords_whole(self, data: Data, times: int = 1, memory: float | None = None) -> bool:
        """Whether ``refine``, so many ``times``, takes no more work than the fit did (counted, not timed: ``evidence.costs``).

        ``data`` are those of the fit, whose batches are the loader's, if it is one. ``memory`` is that of ``refine``.
        """
        if isinstance(self.estimate, Kernel) or math.isfinite(self.prior.nu):
            return False  # it has no evidence of the whole network
        batch_size = getattr(data, "batch_size", None) or self.schedule.batch_size
        return costs.within_a_fit(self.model, data, self.laplace, self.schedule.epochs, batch_size, times, memory)

    def mode(self, data: Data, nats: float = 0.1, *, memory: float | None = None) -> Mode:
        """The mode of the network linearised at these weights, and by how many nats its log joint density is larger there.

        ``data`` must be those of the fit. Newton steps are made until one more would gain less than ``nats``. Pass its ``offset`` to
        ``evidence.whole.at`` for the evidence of the linearised network there.
        """
        self.check_weights()
        return mode.linearised(self.model, data, self.laplace, self.prior, nats=nats, memory=memory)

    def predictive(
        self,
        x: Tensor,
        link: Link = "probit",
        samples: int = 256,
        seed: int = 0,
        *,
        data: Data | None = None,
        scale: float | None = None,
    ) -> Predictive:
        """The posterior predictive of the linearised model at ``x``; ``link`` is "probit" (closed form) or "monte-carlo".

        With the ``data`` of the fit it is that of the whole network, by its own number of draws; without them that of Kronecker factors.
        What is said of y goes by ``scale`` times the covariance. By default that is 1, but not for classes, where 1 is far too timid: with
        ``data`` leave-one-out chooses scale and temperature (``evidence.posterior.tuned``), without them the probabilities are the point
        estimate's (scale 0). With ``data`` the mean of the posterior is not the point estimate, so scale 0 is not either.
        """
        self.check_weights()
        if scale is not None and not (isinstance(scale, (int, float)) and 0 <= scale < math.inf):
            raise ValueError(
                f"scale must be a number, finite and not negative, got {scale!r}: 0 is the posterior's mean alone, 1 the posterior"
            )
        of_classes = classes(self.likelihood, self.laplace.outputs) is not None
        if data is not None:
            at = (self.model, data, self.laplace, self.prior)
            if of_classes and scale is None:
                return posterior.tuned(*at, link=link, seed=seed).predictive(x, link)
            found = posterior.at(*at, seed=seed)
            return replace(found, tuning=Tuning(scale=1.0 if scale is None else scale)).predictive(x, link)
        scale = float(not of_classes) if scale is None else scale
        device = next(self.model.parameters()).device  # which may be another one than that of the fit
        vectors = {name: (p.to(device), u.to(device), v.to(device)) for name, (p, u, v) in self._eigenvectors.items()}
        return predictive(self.model, x, vectors, self.prior, self.likelihood, link, samples, seed, scale)

    def check_weights(self) -> None:
        """Refuse a model whose weights, frozen ones and ranges included, are no longer those of the fit."""
        now = self.model.state_dict()
        moved = [
            name
            for name, then in self.weights.items()
            if name not in now or not torch.equal(now[name], then.to(now[name].device))
        ]
        if moved:
            raise ValueError(
                f"{moved[0]} was changed after the fit (by another fit of the same model?), and the evidence is of the weights before "
                "that: put them back by fit.restore(), or train a copy.deepcopy(model) next time"
            )

    def restore(self) -> None:
        """Put the weights of this fit back into its model."""
        self.model.load_state_dict(self.weights)
        self._start_ranges()

    def _start_ranges(self) -> None:
        for name, part in transformations(self.model).items():
            part.started = self.started.get(name)

    def save(self, folder: str | File) -> File:
        """Write everything but the model's code to ``folder``, as one file of safetensors and JSON; ``autosym.load`` reads it.

        With several processes, the first writes.
        """
        self.check_weights()
        path, tensors = File(folder) / FILE, {f"model/{name}": t for name, t in self.weights.items()}
        learned = dict(self.likelihood.hyperparameters())
        estimate = self.estimate.laplace if isinstance(self.estimate, Whole) else self.estimate
        state = {
            "schedule": pack(self.schedule, "schedule", tensors),
            "history": pack(self.history, "history", tensors),
            "evidence": pack(self.evidence, "evidence", tensors),
            "estimate": pack(estimate, "estimate", tensors, leave_out=("likelihood", "parameters")),
            "whole": pack(self.estimate, "whole", tensors, leave_out=("laplace",)) if estimate is not self.estimate else None,
            "prior": pack({key: getattr(self.prior, key) for key in PRIOR}, "prior", tensors),
            "likelihood": {"name": self.likelihood.name, "learned": pack(learned, "likelihood", tensors)},
            "seed": self.seed,
            "simplified": self.simplified,
            "augmented": self.augmented,
            "start": pack(self.start, "start", tensors),
            "recoveries": self.recoveries,
            "epoch": self.epoch,
            "chosen_by": self.chosen_by,
            "started": {name: list(widths) for name, widths in self.started.items() if widths},
        }
        if processes.first():
            checkpoint.write(path, tensors, {**state, "checksum": _checksum(tensors, state)}, KIND)
        return path

    @property
    def laplace(self) -> Laplace:
        """The estimate with its Kronecker factors."""
        if isinstance(self.estimate, Whole):
            return self.estimate.laplace
        if isinstance(self.estimate, Kernel):
            raise ValueError("this fit was made with kernel evidence, which has no Kronecker factors: fit without kernel=")
        return self.estimate

    @cached_property
    def _eigenvectors(self) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
        return self.laplace.curvature.eigenvectors(self.prior.scales)


def load(folder: str | File, model: nn.Module | None = None, likelihood: str | Likelihood | None = None) -> Fit:
    """The fit that ``Fit.save`` or ``autosym fit --out`` wrote to ``folder``; it can do what it could before.

    ``model`` has the same layers as the fitted one, with the same ones frozen; it is given the weights of the fit, in place. A folder of
    ``autosym fit`` says how its network is built, so leave ``model`` out. If the likelihood is your own, give the one of the fit.
    """
    path = File(folder) / FILE
    if model is not None:
        check_module(model)
        model = processes.unwrapped(model)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: name a folder that fit.save(folder) or autosym fit wrote")
    tensors, state = checkpoint.read(path, KIND)
    if state.pop("checksum", None) != _checksum(tensors, state):
        raise ValueError(f"{path} is damaged: its checksum is another; save the fit again")
    model = _built(File(folder) / RESULT, tensors) if model is None else model
    try:
        given = _likelihood(state["likelihood"]["name"], likelihood, path)
        fit = _unpacked(state, tensors, model, given)
        names, own = fit.prior.names, tuple(site.name for site in sites(model))
    except (LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise ValueError(
            f"{path} is damaged, or of another version ({type(error).__name__}: {error}): save the fit again"
        ) from error
    if set(names) != set(own):
        other = sorted(set(names) ^ set(own))
        raise ValueError(
            f"{path} is of another model, or of one with other layers frozen: they differ in {', '.join(other[:3])}"
        )
    checkpoint.load_into(model.state_dict(), fit.weights, path)
    fit._start_ranges()
    return fit


def _built(result: File, tensors: Mapping[str, Tensor]) -> nn.Module:
    """The network that a run says in its result.json."""
    found = files.read(result) if result.exists() else {}
    if not isinstance(found, dict) or "network" not in found:
        raise ValueError(
            f"{result.parent} does not say how its network is built: pass it, as in autosym.load(folder, model); what discover wrote is "
            "read by autosym.Answer.load(folder)"
        )
    with files.of_this_version(result):
        return rebuilt(found["network"], _weights(tensors))


def _weights(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("model/"): t for name, t in tensors.items() if name.startswith("model/")}


def _likelihood(name: str, given: str | Likelihood | None, path: File) -> Likelihood:
    """A likelihood of that name: ours, or the one given."""
    if given is None and name not in LIKELIHOODS:
        raise ValueError(f"{path} has a likelihood of your own, {name!r}: give it too, as in load(folder, model, likelihood)")
    found = copy.deepcopy(likelihoods.of(name if given is None else given))
    if found.name != name:
        raise ValueError(f"{path} is of a fit with the likelihood {name!r}, not {found.name!r}: give that one")
    return found


def _unpacked(state: Mapping[str, Any], tensors: Mapping[str, Tensor], model: nn.Module, likelihood: Likelihood) -> Fit:
    """The fit of a file, with its tensors on the device of the model where they have to be."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    tensors = {name: t.to(device) if name.startswith(ON_DEVICE) else t for name, t in tensors.items()}
    with torch.no_grad():
        for name, value in unpack(state["likelihood"]["learned"], tensors, {}).items():
            likelihood.hyperparameters()[name].copy_(value)
    known = unpack(state["prior"], tensors, {})
    prior = Prior(known["names"], 1.0, known["nu"])
    prior.log_precision.data.copy_(known["log_precision"])
    prior.scales, prior.mixture_bound = known["scales"], known["mixture_bound"]
    weights = _weights(tensors)
    more: dict[str, Any] = {"likelihood": likelihood}
    if state["estimate"]["record"] == Laplace.__name__:
        more["parameters"] = {n: weights[n] if n in weights else weights[f"{n}.weight".lstrip(".")] for n in prior.names}
    estimate = unpack(state["estimate"], tensors, KINDS, **more)
    if state.get("whole") is not None:
        estimate = unpack(state["whole"], tensors, KINDS, laplace=estimate)
    parts = {key: unpack(state[key], tensors, KINDS) for key in EXPECTED}
    wrong = [key for key, kind in EXPECTED.items() if not isinstance(parts[key], kind)]
    if wrong:
        raise TypeError(f"{wrong[0]} is a {type(parts[wrong[0]]).__name__}")
    return Fit(
        model,
        prior,
        likelihood,
        **parts,
        estimate=estimate,
        seed=state["seed"],
        simplified=state["simplified"],
        augmented=state.get("augmented", True),  # files of before do not say: nothing is trained on what may be other data
        weights=weights,
        started=state.get("started", {}),
        start=unpack(state.get("start"), tensors, KINDS),
        recoveries=state.get("recoveries", 0),
        epoch=state.get("epoch"),
        chosen_by=state.get("chosen_by"),
    )


def _checksum(tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> int:
    """Of all numbers and names of a file."""
    found = zlib.crc32(json.dumps(state, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        found = zlib.crc32(raw(tensor), zlib.crc32(name.encode(), found))
    return found


def with_cautions(
    found: Symmetry,
    evidence: Evidence,
    estimate: Laplace | Kernel | Whole,
    prior: Prior,
    likelihood: Likelihood,
    schedule: Schedule,
    history: Sequence[Mapping] = (),
    epoch: int | None = None,
) -> Symmetry:
    """The same table, with what belongs beside it: that nothing is established, or not yet settled."""
    known = verdicts.Known(
        float(evidence.log_evidence),
        evidence.samples,
        classes(likelihood, estimate.outputs),
        None if estimate.fingerprint is None else estimate.fingerprint.tolist(),
        schedule.step != "none",
        schedule.lr,
        history,
        float(evidence.log_likelihood),
        evidence.most,
        float(estimate.effective_parameters(prior).detach().sum()),
        epoch,
    )
    return replace(found, evidence=evidence, cautions=verdicts.cautions(found.paths, known, found.limits))
