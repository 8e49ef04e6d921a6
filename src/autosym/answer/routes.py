"""How a run of the search is made: build, hand over, fit, measure, keep.

    log evidence ~ Kronecker's + PART gamma                until the evidence of the whole network is taken ("whole")

Kronecker log-determinants are too large: the whole evidence is larger by a quarter to three quarters of the effective parameters gamma
(``training.guarding``, benchmarks/ends.py). Networks are compared at the middle of that.

Of every run its ``Outcome`` is kept, as JSON, and its ``End``, as safetensors: in memory, and in a folder if there is one. A run that is
there is not made again; one that was stopped goes on from its checkpoint. Several processes share the runs.
"""

import copy
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path as File
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from autosym.answer.hypotheses import Networks, breaking
from autosym.answer.plans import Outcome, Plan, Run
from autosym.bayes import likelihoods
from autosym.bayes.likelihoods import Likelihood
from autosym.bayes.priors import Prior
from autosym.evidence import costs, laplace, possible
from autosym.evidence.cautions import Failed
from autosym.evidence.costs import PRODUCT
from autosym.evidence.laplace import Laplace
from autosym.evidence.whole import Whole
from autosym.runtime import files, processes
from autosym.runtime.arithmetic import NotFinite
from autosym.runtime.batching import Data
from autosym.surgery.handing_over import hand_over, without
from autosym.training.fitted import Fit
from autosym.training.fitting import fit
from autosym.training.guarding import PARTS, NothingLearned
from autosym.training.schedule import Schedule

PART = sum(PARTS) / 2
DOUBT = (PARTS[1] - PARTS[0]) / math.sqrt(12)  # the standard deviation of a number that may be anything between
PRODUCTS = (60, 160)  # with the Gauss-Newton matrix, for the evidence of a whole network: at least and at most
SHARE = 0.4  # of the work of a fit, if these bounds allow
NATS = 20.0  # two standard errors that are small enough
SHORT = 3  # epochs at least
SEARCH_FILES = (
    "settings.json",
    "epochs.json",
    "samples.json",
    "widths.json",
    "moved.json",
    "decided.json",
)  # in the folder of a search
RUN_FILES = ("outcome.json", "end.json", "end.safetensors", "checkpoint.safetensors")  # in the folder of each of its runs

Say = Callable[[str], None]


@dataclass(frozen=True)
class End:
    """Where a run ended: weights, precisions and noise by name."""

    weights: Mapping[str, Tensor]
    precision: Mapping[str, float]
    noise: Mapping[str, float]


class OtherSearch(ValueError):
    """A folder is of a search with other settings."""


class Store:
    """Outcomes and ends by run: in ``folder``, else in memory. ``settings`` must be those that the folder was begun with.

    ``begin`` writes them, so that a call that is refused leaves nothing. Several processes share the folder.
    """

    def __init__(self, folder: File | None, settings: Mapping[str, Any]):
        self.folder = folder
        self.ends: dict[str, End] = {}
        self.outcomes: dict[str, Outcome] = {}
        self.begins: dict[File, Any] = {}
        self.begun = False
        if folder is None:
            return
        self.begun = bool(processes.agreed((folder / "settings.json").exists()))  # before anybody begins it
        path, wanted = folder / "settings.json", json.loads(json.dumps(settings))
        self.begins[path] = wanted
        if self.begun:
            known = _read(path)
            other = sorted(key for key in {*known, *wanted} if known.get(key) != wanted.get(key))
            if other:
                raise OtherSearch(
                    f"{folder} holds a search with other settings ({', '.join(other)}): resume with the same, or name another folder"
                )

    def begin(self) -> None:
        """Write what the folder is begun with, unless it is there: epochs and samples if they follow from the machine; settings last."""
        if processes.first() and not self.begun:
            for path, content in reversed(self.begins.items()):
                files.write(path, json.dumps(content, indent=1))

    def outcome(self, run: Run) -> Outcome | None:
        """What is known of a run, or None."""
        if run.key not in self.outcomes and self.folder is not None:
            path = self.folder / run.key / "outcome.json"
            if path.exists():
                found = _read(path)
                found["log_evidence"] = -math.inf if found["log_evidence"] is None else found["log_evidence"]
                self.outcomes[run.key] = Outcome(**found)
        return self.outcomes.get(run.key)

    def end(self, key: str) -> End:
        """Where the run with this key ended."""
        if self.folder is None:
            return self.ends[key]
        about = _read(self.folder / key / "end.json")
        return End(load_file(self.folder / key / "end.safetensors"), about["precision"], about["noise"])

    def keep(self, run: Run, outcome: Outcome, end: End | None) -> None:
        """The outcome is written last: a run with one is whole."""
        self.outcomes[run.key] = outcome
        if self.folder is None:
            self.ends |= {} if end is None else {run.key: end}
            return
        folder = self.folder / run.key
        if end is not None:
            weights = {name: tensor.contiguous().clone() for name, tensor in end.weights.items()}
            files.write(folder / "end.safetensors", save(weights))
            files.write(folder / "end.json", json.dumps({"precision": dict(end.precision), "noise": dict(end.noise)}))
        value = outcome.log_evidence if math.isfinite(outcome.log_evidence) else None
        files.write(folder / "outcome.json", json.dumps(asdict(outcome) | {"log_evidence": value}, allow_nan=False))
        (folder / "checkpoint.safetensors").unlink(missing_ok=True)

    def begun_with(self, name: str, found: int) -> int:
        """A number of the whole search that follows from the machine: as the folder says, if it was begun."""
        if self.folder is None:
            return found
        path = self.folder / f"{name}.json"
        self.begins[path] = {name: found}
        return _read(path)[name] if self.begun and path.exists() else found

    def schedule(self, found: Schedule) -> Schedule:
        """The schedule of a search whose epochs follow from the machine."""
        return replace(found, epochs=self.begun_with("epochs", found.epochs))

    def moved(self, find: Callable[[], dict[str, float]]) -> dict[str, float]:
        """How the data change when they are moved: as the folder says, if it does. A loader may show them in another order now."""
        path = None if self.folder is None else self.folder / "moved.json"
        if path is not None and path.exists():
            return _read(path)
        found = find()
        if path is not None and processes.first():
            files.write(path, json.dumps(found))
        return found

    def decided(self, name: str, find: Callable[[], float]) -> float:
        """A number that follows from how long runs took: as the folder says, if it does."""
        path = None if self.folder is None else self.folder / "decided.json"
        known = processes.shared(_read(path) if path is not None and path.exists() else {}, 0)  # all find, or none
        found = known[name] if name in known else find()
        if path is not None and processes.first() and name not in known:
            files.write(path, json.dumps(known | {name: found}, indent=1))
        return found

    def checkpoint(self, run: Run) -> File | None:
        return None if self.folder is None else self.folder / run.key / "checkpoint.safetensors"


def written(folder: File) -> list[File]:
    """The files in ``folder`` that a ``Store`` wrote; runs are told from other folders by their keys."""
    named = [folder / name for name in SEARCH_FILES]
    named += [run / name for run in sorted(folder.glob("*~*~*~*")) for name in RUN_FILES]
    return [path for path in named if path.is_file()]


class Fitter:
    """Makes runs: ``perform`` for the search, ``fitted`` for the answer. ``options`` go to ``fit``."""

    def __init__(
        self,
        networks: Networks,
        data: Data,
        samples: int,
        likelihood: str | Likelihood,
        schedule: Schedule,
        store: Store,
        say: Callable[[Run, Outcome | None], None] = lambda run, outcome: None,
        **options: Any,
    ):
        self.networks, self.data, self.samples, self.store, self.say = networks, data, samples, store, say
        self.tried, self.part_tried = data, 1.0  # samples by which times are measured, and which part of all they are
        self.likelihood, self.schedule, self.options = likelihoods.of(likelihood), schedule, options
        self.asked = schedule.epochs  # of a full fit; ``minutes`` may shorten the schedule
        self.work: dict[tuple[str, float], float] = {}
        self.plan = Plan((), (), 0, 0.0)  # made from costs, which this counts
        self.largest = ("", 1.0)  # the network and width whose fit is the unit of costs
        self.runs: dict[str, Run] = {}  # all that were asked for, by key
        self.before = 0.0  # about the seconds in which earlier calls have made runs

    def cost(self, network: str, width: float) -> float:
        """The work of a whole fit, counted (``evidence.costs``)."""
        if (network, width) not in self.work:
            model = self.networks.build(network, width, 0)
            x = self.networks.example
            self.work[network, width] = costs.of_fit(model, x, self.samples, self.schedule.epochs, self.schedule.batch_size)
        return self.work[network, width]

    def share(self, network: str, width: float) -> float:
        """The same in fits of the largest network."""
        return self.cost(network, width) / self.cost(*self.largest)

    def price(self, run: Run) -> float:
        """The work of a run, in the same unit."""
        return self.plan.part(run.stage) * self.share(run.network, run.width)

    def layers(self, network: str) -> list[str]:
        """The layers of a network that have paths which break its symmetry."""
        paths = breaking(self.networks.build(network, self.networks.widths[0], 0))
        return list(dict.fromkeys(path.rpartition(".")[0] for path in paths))

    def perform(self, runs: Sequence[Run]) -> dict[Run, Outcome]:
        """All of ``runs``, each made once. Processes take turns, and tell each other what they found."""
        earlier = [known.seconds for run in runs if run.key not in self.runs and (known := self.store.outcome(run))]
        self.before += sum(earlier) / processes.count()
        self.runs |= {run.key: run for run in runs}
        todo = processes.shared([run for run in runs if self.store.outcome(run) is None], 0)  # before anybody makes one of them
        owners = processes.owners([self.cost(run.network, run.width) for run in todo])
        own = [run for run, owner in zip(todo, owners, strict=True) if owner == processes.rank()]
        made: dict[str, tuple[Outcome, End | None]] = {}
        with processes.agreeing(), processes.alone():
            for run in own:
                self.say(run, None)
                outcome, end = self._made(run)
                torch.cuda.empty_cache()  # for others on the same GPU: a search of 20 fits would hold what its largest pass took
                self.store.keep(run, outcome, end)
                made[run.key] = outcome, end if self.store.folder is None else None
                self.say(run, outcome)
        for run in todo:
            outcome, end = processes.shared(made.get(run.key), owners[todo.index(run)])
            self.store.outcomes[run.key] = outcome
            self.store.ends |= {} if end is None else {run.key: end}
        outcomes = {run: self.store.outcome(run) for run in runs}
        return {run: outcome for run, outcome in outcomes.items() if outcome is not None}

    def _made(self, run: Run) -> tuple[Outcome, End | None]:
        begun = time.perf_counter()
        try:
            if run.stage == "whole":
                found, end = self._whole(run), None
            else:
                fitted = self._fit(run)
                found, end = _outcome(fitted), None if run.stage == "short" else end_of(fitted)  # from which nothing goes on
        except (NotFinite, NothingLearned) as error:
            found, end = Outcome(-math.inf, failed=str(error)), None
        return replace(found, seconds=time.perf_counter() - begun), end

    def _fit(self, run: Run) -> Fit:
        """The fit of a run: from scratch, or on from where another ended."""
        model, likelihood = self._network(run), copy.deepcopy(self.likelihood)
        epochs = max(SHORT, math.ceil(self.plan.part(run.stage) * self.schedule.epochs))
        schedule = replace(self.schedule, epochs=epochs, sampled_end=self.schedule.sampled_end or run.stage == "short")
        more: dict[str, Any] = {}
        if run.start:
            end = self.store.end(run.start)
            more["prior_precision"] = hand_over(self.at_end(run.start), model, end.precision)
            schedule = replace(schedule, start_cap=math.inf)
            _set_noise(likelihood, end)
        checkpoint = self.store.checkpoint(run)
        if checkpoint is not None:
            more |= {"checkpoint": checkpoint, "checkpoint_seconds": 20.0, "resume": True}
        return fit(model, self.data, likelihood, schedule=schedule, seed=run.seed, **more, **self.options)

    def at_end(self, key: str) -> nn.Module:
        """The network of a run, with the weights that it ended with."""
        model = self._network(self.runs[key])
        model.load_state_dict({name: tensor.clone() for name, tensor in self.store.end(key).weights.items()})
        return model

    def _network(self, run: Run) -> nn.Module:
        model = self.networks.build(run.network, run.width, run.seed)
        return without(model, breaking(model, run.left)) if run.left else model

    def fitted(self, key: str) -> Fit:
        """The fit at the end of a run, as ``fit`` would return it, by Kronecker factors."""
        end, model, likelihood = self.store.end(key), self.at_end(key), copy.deepcopy(self.likelihood)
        _set_noise(likelihood, end)
        at = laplace.at(model, self.data, likelihood, memory=self.options.get("memory"))
        prior = Prior(at.names, end.precision)
        with torch.no_grad():
            fitted = Fit(model, prior, at.likelihood, self.schedule, [], at(prior), at, self.runs[key].seed)
            return replace(fitted, augmented="augment" in self.options)

    def _whole(self, run: Run) -> Outcome:
        fitted = self.fitted(run.start)
        if failed := possible.failure(fitted.estimate, fitted.prior):
            return _unusable(failed)
        found = self.refined(fitted)
        assert isinstance(found.estimate, Whole)
        value = _more(found, found.estimate.missed)
        return Outcome(value, found.estimate.doubt, more=_known(found) | {"how": found.estimate.how})

    def refined(self, fitted: Fit) -> Fit:
        """With the evidence of the whole network, for a part of the work of a fit."""
        known = costs.of(fitted.model, self.data, fitted.laplace, self.options.get("memory"))
        one = PRODUCT * known.samples * known.forward
        allowed = SHARE * known.fit(self.schedule.epochs, self.schedule.batch_size) / one
        products = round(min(max(allowed, PRODUCTS[0]), PRODUCTS[1]))
        how = known.cheapest if known.least <= products * one else "probes"
        return fitted.refine(self.data, NATS, products=products, how=how, memory=self.options.get("memory"))


def end_of(fitted: Fit) -> End:
    """The end of a fit, in host memory."""
    noise = {name: float(t.detach()) for name, t in fitted.likelihood.hyperparameters().items()}
    return End({name: t.detach().cpu() for name, t in fitted.weights.items()}, fitted.prior.precision(), noise)


def _set_noise(likelihood: Likelihood, end: End) -> None:
    with torch.no_grad():
        for name, tensor in likelihood.hyperparameters().items():
            tensor.fill_(end.noise[name])


def _outcome(fitted: Fit) -> Outcome:
    if failed := possible.failure(fitted.estimate, fitted.prior):
        return _unusable(failed)
    at = fitted.laplace
    assert isinstance(at, Laplace)
    gamma = float(at.effective_parameters(fitted.prior).detach().sum())
    kronecker = float(fitted.evidence.log_evidence.detach())
    return Outcome(
        _more(fitted, PART * gamma), DOUBT * gamma, more=_known(fitted) | {"kronecker": kronecker, "effective": gamma}
    )


def _more(fitted: Fit, nats: float) -> float:
    """The log evidence and some ``nats`` more, but not more than is possible."""
    value = float(fitted.evidence.log_evidence.detach())
    return max(value, min(value + nats, fitted.evidence.most))


def _unusable(failed: Failed) -> Outcome:
    return Outcome(-math.inf, failed=str(failed), more={"unusable": failed.why})


def _known(fitted: Fit) -> dict[str, Any]:
    found = fitted.evidence
    most = found.most if math.isfinite(found.most) else None
    return {"log_likelihood": float(found.log_likelihood.detach()), "samples": found.samples, "most": most}


def _read(path: File) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): remove its folder, and the run is made again") from error
