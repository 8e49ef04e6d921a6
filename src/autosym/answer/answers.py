"""What ``discover`` found: a verdict on each symmetry with its margins, the candidates, and the best of them as a fit."""

import copy
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path as File
from typing import Any, ClassVar

import torch
from torch import nn

from autosym.answer.hypotheses import SHIFTS, Built, Given, breaking
from autosym.answer.margins import FEW, RARE, Judgement, Margin
from autosym.answer.plans import Run
from autosym.answer.symmetrising import Gain, Opinion
from autosym.evidence.record import nats
from autosym.linear.path import Path
from autosym.nn.layers import Branch, Relaxed
from autosym.runtime import files, processes
from autosym.runtime.tables import table
from autosym.surgery.handing_over import without
from autosym.surgery.hardening import harden
from autosym.training.fitted import Fit, load

FILE, KIND, VERSION = "answer.json", "autosym answer", 1
GAINS = ("training", "held_out")  # of an opinion


@dataclass(frozen=True)
class LayerAnswer:
    """A layer of the network that breaks the symmetry: what its breaking paths are worth after refitting, and whether it needs them.

    None: they are worth little, but were not left out together with those of other layers.
    """

    layer: str
    nats: float
    breaks: bool | None


@dataclass(frozen=True)
class Verdict:
    """Do the data have this symmetry, for these networks? ``judgement`` is "yes", "no" or "undecided".

    ``breaking`` is what the best network that breaks it gains over the best that keeps it, ``tie`` what that one gains over the best
    without the tie. ``why`` says why it is undecided, ``advice`` what would decide.
    """

    symmetry: str
    judgement: Judgement
    breaking: Margin
    tie: Margin
    why: str = ""
    tried: Mapping[str, float] = field(default_factory=dict)
    opinion: Opinion | None = None
    layers: tuple[LayerAnswer, ...] = ()
    moved: float | None = (
        None  # the probability that data with the symmetry change as much when they are moved; None: not known
    )
    left_out: str = ""  # that some samples were left out, and why

    @property
    def probability(self) -> float:
        """By its own margin: of a no, that breaking gains; of a yes, that the tie is worth something; undecided: the likelier of both."""
        gains = self.breaking.probability
        return {"no": gains, "yes": self.tie.probability, "undecided": max(gains, 1 - gains)}[self.judgement]

    @property
    def by_moving(self) -> bool:
        """Whether it is a no because the data change when they are moved: what breaking gains would not count by itself."""
        return self.judgement == "no" and self.moved is not None and not self.breaking.counts

    @property
    def advice(self) -> tuple[str, ...]:
        """What would decide, and how much each gained when it was tried. Empty if it is decided."""
        if self.judgement != "undecided":
            return ()
        if self.moved is not None and self.moved <= RARE and self.tie.counts:  # no training would change that
            how = "shifted around the border (torch.roll)" if self.symmetry == SHIFTS else "moved"
            return (f"the same images, each {how} by lot, if you know that its label stays",)
        close = self.breaking if self.breaking.nats > FEW else self.tie
        found = []
        if close.nats > close.error and math.isfinite(close.bound):  # else it is chance, and says nothing of more samples
            times = max(close.bound, FEW) / close.nats
            if times > 1:
                found.append(f"about {times:.1f} times as many samples, if margins grow with their number")
        found += [f"{what} (gained {gain:+.0f} nats when tried)" for what, gain in self.tried.items() if gain >= FEW]
        last = "more seeds, by a larger budget"
        if self.left_out:
            last = "more minutes, in another folder: more samples are used then"
        elif math.isinf(self.tie.error):  # no two runs of a network learned something
            last = "more samples, more epochs, or a larger network: seeds that learn nothing tell nothing"
        return (*found, last)


@dataclass(frozen=True)
class Candidate:
    """One network at the best of its ends: its log evidence and the standard error of that, and how many runs it had."""

    network: str
    width: float
    seed: int
    log_evidence: float
    error: float
    runs: int
    key: str = ""
    parameters: int = 0


@dataclass(frozen=True)
class Answer:
    """Which symmetries the data have, for the networks that were tried. Prints as a short table.

    ``fit`` is the candidate with the most evidence. ``cost`` is in fits of the largest network.
    """

    verdicts: tuple[Verdict, ...]
    candidates: tuple[Candidate, ...]
    samples: int
    cost: float
    seconds: float
    notes: tuple[str, ...] = ()
    recipe: Mapping[str, Any] = field(default_factory=dict, repr=False)  # how the network of ``fit`` is made again
    found: Fit | None = field(default=None, repr=False, compare=False)

    report: ClassVar[Callable[..., File]]
    """``answer.report(path)``: the verdicts as one HTML file (``report.answered.write``)."""

    @property
    def fit(self) -> Fit:
        """The fit of the candidate with the most evidence, as ``harden`` and ``predictive`` take it."""
        if self.found is None:
            raise ValueError(
                "the fit needs the network: load the answer by Answer.load(folder, model), with the model of discover"
            )
        return self.found

    def plain(self) -> nn.Module:
        """The best network in ordinary torch layers: hardened (``harden``), or a copy, if it has no others."""
        made = any(isinstance(module, (Relaxed, Branch, Path)) for module in self.fit.model.modules())
        return harden(self.fit) if made else copy.deepcopy(self.fit.model)

    def verdict(self, symmetry: str) -> Verdict:
        """The verdict on one symmetry."""
        known = {verdict.symmetry: verdict for verdict in self.verdicts}
        if symmetry not in known:
            raise ValueError(f"{symmetry!r} was not asked for: the answer is about {', '.join(known)}")
        return known[symmetry]

    @property
    def best(self) -> Candidate:
        """The candidate with the most evidence; where that gains nothing by breaking a symmetry, the strict one."""
        own = [candidate for candidate in self.candidates if candidate.network == self.recipe.get("network")]
        return own[0] if own else max(self.candidates, key=lambda candidate: candidate.log_evidence)

    def __repr__(self) -> str:
        judged = ", ".join(f"{verdict.symmetry}: {verdict.judgement}" for verdict in self.verdicts)
        return f"<Answer: {judged}; {sum(candidate.runs for candidate in self.candidates)} fits on {self.samples} samples>"

    def __str__(self) -> str:
        rows = [("symmetry", "there?", "breaking gains", "the tie is worth", "")]
        for v in self.verdicts:
            layers = [layer.layer for layer in v.layers if layer.breaks]
            unsure = [layer.layer for layer in v.layers if layer.breaks is None]
            where = f"broken in {', '.join(layers)}" if layers else f"perhaps broken in {', '.join(unsure)}" if unsure else ""
            rows.append((v.symmetry, v.judgement, str(v.breaking), str(v.tie), where))
        more = [
            f"{v.symmetry} is undecided: {v.why}. What would decide: {'; '.join(v.advice)}." for v in self.verdicts if v.why
        ]
        value = nats(self.best.log_evidence, self.best.error)
        more += [
            f"{v.symmetry}: the data change when they are moved (data with this symmetry would do so with probability {v.moved:.3g})."
            for v in self.verdicts
            if v.by_moving
        ]
        cost = f"the search cost {self.cost:.1f} fits of the largest network, {self.seconds:.0f} s"
        best = f"best: {self.best.network}, width {self.best.width:g}, log evidence {value}; {cost}"
        return "\n".join([table(rows, "<<>><"), *more, best, *(f"Note: {note}" for note in self.notes)])

    def as_dict(self) -> dict[str, Any]:
        """Everything but the fit, ready for JSON; numbers that are not finite are None."""
        state = asdict(_Plain(self.verdicts, self.candidates, self.samples, self.cost, self.seconds, self.notes))
        for verdict, own in zip(state["verdicts"], self.verdicts, strict=True):
            verdict |= {"probability": own.probability, "advice": own.advice, "by_moving": own.by_moving}
        return _finite(state | {"best": self.best.network})

    def save(self, folder: str | File) -> File:
        """Write the answer to ``folder``, with its fit; ``Answer.load`` reads it."""
        path = File(folder) / FILE
        state = {"format": KIND, "version": VERSION, "recipe": dict(self.recipe), "answer": self.as_dict()}
        if self.found is not None:
            self.found.save(folder)
        if processes.first():
            files.write(path, json.dumps(state, indent=1, allow_nan=False))
        return path

    @staticmethod
    def load(folder: str | File, model: nn.Module | Callable[[int], nn.Module] | None = None) -> "Answer":
        """The answer that ``save`` wrote. ``model`` is the one of ``discover``; without it there is no fit, unless it was a name."""
        path = File(folder) / FILE
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist: name a folder that answer.save(folder) wrote")
        try:
            state = json.loads(path.read_text())
            if state["format"] != KIND or state["version"] != VERSION:
                raise ValueError(f"it is {state['format']} of version {state['version']}, not {KIND} of version {VERSION}")
            answer = _unpacked(state)
        except (LookupError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is damaged, or of another version ({error}): save the answer again") from error
        made = network_of(state["recipe"], model)
        if made is None:
            return answer
        return Answer(**{**vars(answer), "found": load(folder, made)})


@dataclass(frozen=True)
class _Plain:
    verdicts: Sequence[Verdict]
    candidates: Sequence[Candidate]
    samples: int
    cost: float
    seconds: float
    notes: Sequence[str]


def network_of(recipe: Mapping[str, Any], model: nn.Module | Callable[[int], nn.Module] | None = None) -> nn.Module | None:
    """The network of the fit, with other weights; None if that needs a model which is not given."""
    example = torch.zeros(2, *recipe["in_shape"], dtype=getattr(torch, recipe["dtype"]))
    if recipe["name"] is not None:
        networks: Built | Given = Built(
            recipe["name"], recipe["symmetries"], example, recipe["classes"], recipe["samples"], **recipe["form"]
        )
    elif model is None:
        return None
    else:
        example.normal_(generator=torch.Generator().manual_seed(0))
        networks = Given(model, recipe["symmetries"], example, recipe["trained"], recipe["free"])
    made = networks.build(recipe["network"], recipe["width"], recipe["seed"])
    return without(made, breaking(made, recipe["left"])) if recipe["left"] else made


def _unpacked(state: Mapping[str, Any]) -> Answer:
    given = state["answer"]
    verdicts = []
    for v in given["verdicts"]:
        margins = {name: _margin(v[name]) for name in ("breaking", "tie")}
        layers = tuple(LayerAnswer(layer["layer"], _number(layer["nats"]), layer["breaks"]) for layer in v["layers"])
        opinion = None
        if (said := v["opinion"]) is not None:
            gains = {name: said[name] and Gain(*(_number(said[name][key]) for key in ("nats", "error"))) for name in GAINS}
            opinion = Opinion(said["symmetry"], said["of"], said["elements"], **gains)
        verdicts.append(
            Verdict(
                v["symmetry"],
                v["judgement"],
                **margins,
                why=v["why"],
                tried=v["tried"],
                opinion=opinion,
                layers=layers,
                moved=v.get("moved"),
                left_out=v.get("left_out", ""),
            )
        )
    candidates = tuple(Candidate(**c) for c in given["candidates"])
    numbers = (given["samples"], given["cost"], given["seconds"])
    return Answer(tuple(verdicts), candidates, *numbers, tuple(given["notes"]), state["recipe"])


def _margin(given: Mapping[str, Any]) -> Margin:
    nats = given["nats"]
    return Margin(math.inf * given["sign"] if nats is None else nats, _number(given["error"]), given["freedom"])


def _number(given: float | None, lost: float = math.inf) -> float:
    """A number that was finite, or what it was if not: errors of one run, and the worth of paths without which nothing is learned."""
    return lost if given is None else given


def _finite(value: Any) -> Any:
    """The same with None for numbers that are not finite; of a margin, the sign says which it was."""
    if isinstance(value, Mapping):
        found = {key: _finite(item) for key, item in value.items()}
        if set(found) == {"nats", "error", "freedom"}:
            found["sign"] = (value["nats"] > 0) - (value["nats"] < 0)
        return found
    if isinstance(value, (tuple, list)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def described(run: Run) -> str:
    """A run in words."""
    return f"{run.network}, width {run.width:g}, seed {run.seed}"
