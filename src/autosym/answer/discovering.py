"""discover: which symmetries do these data have, for this network? Verdicts with margins, and the best network.

hypotheses   networks that keep a symmetry, that may break it, and that are without the tie               (``hypotheses``)
search       short runs, long ones, and from each other's ends; at two widths and several seeds          (``search``, ``routes``)
verdicts     by two margins of evidence with their errors                                                (``margins``)
opinion      the best network that breaks a symmetry, averaged over its group: a contradiction leaves it undecided  (``symmetrising``)
"""

import copy
import math
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path as File
from typing import Any

import torch
from torch import Tensor, nn

from autosym.answer import margins, moving, sampling, symmetrising
from autosym.answer.answers import Answer, Candidate, LayerAnswer, Verdict
from autosym.answer.deadline import Deadline, Pace, check
from autosym.answer.forecast import Forecast, spoken, told
from autosym.answer.hypotheses import USUAL, Built, Given, Networks, checked, seeded
from autosym.answer.margins import FEW
from autosym.answer.plans import FITS, Question, planned, sure_cost
from autosym.answer.routes import PART, Fitter, Store
from autosym.answer.sampling import MEASURED, Draw
from autosym.answer.search import Finding, Search
from autosym.answer.symmetrising import Opinion
from autosym.bayes import likelihoods
from autosym.bayes.likelihoods import Likelihood
from autosym.curvature import input_shapes
from autosym.evidence import laplace
from autosym.evidence.verdicts import LITTLE
from autosym.runtime import processes
from autosym.runtime.batching import Data, batches, check_repeatable, checksum, size_of, targets_of, to_model
from autosym.training.schedule import Schedule

BUDGET = (6.0, 7.0)  # fits for the first symmetry, and for each further one
OPTIONS = ("augment", "memory", "capture", "deterministic")  # of ``fit``, beside the fields of a schedule
TRAINED = 0.1  # nats a sample: what a model that was trained explains at least
EVIDENCE = 1.5  # times as long as its weight steps an epoch takes, about, with trials of the rate and sampled curvature
PASSES = 2.0  # exact passes of a run, about, of the largest network: smaller ones take less
CHANNELS = (1, 3)  # of one image, that is given without a batch

Made = Callable[[Data, int], tuple[Built | Given, dict[str, Any]]]  # networks for data of so many samples, and their recipe


def discover(
    model: nn.Module | str | Callable[[int], nn.Module],
    data: Data,
    symmetries: str | Sequence[str] = USUAL,
    likelihood: str | Likelihood = "categorical",
    *,
    budget: float | None = None,
    minutes: float | None = None,
    seeds: int = 3,
    held_out: Data | None = None,
    resume: str | File | None = None,
    progress: bool = False,
    network: Mapping[str, Any] | None = None,
    **options: Any,
) -> Answer:
    """Which of ``symmetries`` do these ``data`` have, for networks like ``model``? Yes, no or undecided, each with margins and errors.

    ``model`` is a CNN (trained or not), a factory ``width -> module`` for widths 1, 2, ..., or a name for ``nets.build`` ("f-fc+conv"; its
    form follows from the data, or from ``network``). ``symmetries`` are "translations" and exact groups ("c4", "flip-horizontal", ...). By
    default translations, c4 (if images are square) and flip-horizontal.

    ``budget`` counts fits of the largest network: 6 for one symmetry and 7 for each further one by default, so 20 for three. It is kept,
    by shorter runs if need be. With ``minutes`` all of it takes about that long, by fewer epochs (``deadline``). If even the shortest
    search takes longer, some of the samples are drawn, by class (``sampling``); a warning and a note say how many. If the fewest, 200 or
    10 times as many as classes, take longer, a warning says so beforehand; if they take ten times as long, it is refused.

    ``seeds``: of long runs. ``held_out`` data serve the second opinion only. ``resume`` names a folder: what is done is kept there, and a
    search that was stopped goes on as if it had not been. ``options`` are those of ``fit``: fields of its schedule, augment, memory,
    capture, deterministic. With torchrun, processes share the runs.
    """
    begun = time.perf_counter()
    check_repeatable(data, data)
    schedule, more = _schedule(options)
    x, samples, outputs = _looked_at(data, schedule.batch_size)
    if minutes is not None and not minutes > 0:
        raise ValueError(f"minutes must be positive, got {minutes}")
    names, likelihood = checked(symmetries, x.shape[-2:]), likelihoods.of(likelihood)

    def made(some: Data, count: int) -> tuple[Built | Given, dict[str, Any]]:
        with input_shapes.explained(model, x):
            networks, recipe = _networks(model, names, x, count, outputs, some, likelihood, network)
        missing = [name for name in USUAL if name not in names] if tuple(symmetries) == USUAL else []
        networks.notes += tuple(f"{name} was left out: images are {x.shape[-2]}x{x.shape[-1]}, not square" for name in missing)
        return networks, recipe

    networks, recipe = made(data, samples)
    budget = BUDGET[0] + BUDGET[1] * (len(names) - 1) if budget is None else float(budget)
    settings = {"symmetries": names, "seeds": seeds, "budget": budget, "minutes": minutes, "schedule": repr(schedule)}
    settings |= {"options": sorted(more), "likelihood": likelihood.name}
    settings |= {} if resume is None else _known(model, data, recipe)
    store = Store(None if resume is None else File(resume), settings)
    fitter = Fitter(networks, data, samples, likelihood, schedule, store, **more)
    if minutes is None:
        forecast, deadline, left_out = _planned(fitter, seeds, budget)[0], None, ""
    else:
        draw = Draw(data, likelihoods.classes(likelihood, outputs))
        fitter, recipe, forecast, deadline = _within(fitter, recipe, made, draw, seeds, budget, 60 * minutes, begun)
        left_out = sampling.said(fitter.samples, samples, 60 * minutes)
    store.begin()
    with told(progress, forecast, fitter.price) as (fitter.say, tell):
        tell(f"{len(fitter.plan.networks)} networks, up to {budget:g} fits of the largest: about {spoken(forecast.left)}")
        perform = fitter.perform if deadline is None else deadline.perform
        steps = (perform, fitter.share, tell, fitter.networks.route, fitter.layers)
        classes, questions = _classes(fitter.networks, likelihood), fitter.networks.questions
        explained = partial(_explained, samples=fitter.samples, entropy=_entropy(fitter.data) if classes else None)
        moved = store.moved(lambda: _moved(names, fitter.data, fitter.samples, classes))
        search = Search(questions, fitter.plan, *steps, explained, moved, fitter.samples >= moving.MANY).run()
        tell("second opinions")
        found = zip(questions, search.findings(), strict=True)
        verdicts = [_verdict(search, fitter, question, finding, held_out, left_out) for question, finding in found]
    return _answer(search, fitter, verdicts, recipe, begun, minutes, left_out)


def _answer(
    search: Search,
    fitter: Fitter,
    verdicts: Sequence[Verdict],
    recipe: dict[str, Any],
    begun: float,
    minutes: float | None,
    left_out: str,
) -> Answer:
    """The verdicts with the candidates, and the best of them as a fit."""
    key = _chosen(search, verdicts)
    run = fitter.runs[key]
    recipe |= {"network": run.network, "width": run.width, "seed": run.seed, "left": list(run.left)}
    notes = (
        *fitter.networks.notes,
        *([left_out] if left_out else []),
        *_shortened(fitter.plan.part("long"), fitter.schedule.epochs, "minutes" if minutes else "budget"),
        *_idle(*search.idle()),
        *search.cautions(),
    )
    with processes.alone():
        fit = fitter.fitted(key)
    found = (
        tuple(verdicts),
        tuple(_candidates(search, fitter)),
        fitter.samples,
        search.spent,
        fitter.before + time.perf_counter() - begun,
    )
    return Answer(*found, notes, recipe, fit)


@torch.no_grad()
def _classes(networks: Networks, likelihood: Likelihood) -> bool:
    """Whether targets are classes, for as many outputs as the networks have."""
    outputs = networks.build(networks.questions[0].strict, networks.widths[0], 0)(networks.example)
    return likelihoods.classes(likelihood, outputs.shape[-1]) is not None


def _moved(names: Sequence[str], data: Data, samples: int, classes: bool) -> dict[str, float]:
    """How probable it is, of each symmetry, that data with it change as much as these when they are moved; the same in all processes."""
    with processes.agreeing(), processes.alone():
        pair = moving.some(data, samples)
        found = {name: moving.probability(name, *pair, classes) for name in names}
    return processes.shared(found, 0)


def _entropy(data: Data) -> float:
    """Of the labels, in nats a sample: what one who knows how frequent they are does not know."""
    labels = targets_of(data).reshape(-1)
    parts = labels.unique(return_counts=True)[1].double() / len(labels)
    return float(-(parts * parts.log()).sum())


def _explained(log_evidence: float, samples: int, entropy: float | None) -> float:
    """The part of the labels that a network explains: guessing by their frequencies explains nothing. 1 if they are not classes."""
    if entropy is None:
        return 1.0
    return 1 + log_evidence / (samples * entropy) if entropy > 0 else 0.0


def _known(model: Any, data: Data, recipe: Mapping[str, Any]) -> dict[str, Any]:
    """What tells a search from others in its folder: the data, and the model that is given: its layers and its weights."""
    with seeded(0):
        made = model if isinstance(model, nn.Module) else None if isinstance(model, str) else model(1)
    given = 0 if made is None else zlib.crc32(repr(made).encode())
    for tensor in () if made is None else made.state_dict().values():
        given = zlib.crc32(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes(), given)
    return {"data": _sum_of(data), "model": given, "recipe": {key: repr(value) for key, value in recipe.items()}}


def _sum_of(data: Data) -> int | None:
    """A checksum: of tensors in their order, of other data over samples in any order, as a loader may shuffle them."""
    known = checksum(data)
    if known is not None:
        return known
    return sum(checksum(one) or 0 for x, y in batches(data, 256) for one in zip(x.split(1), y.split(1), strict=True))


def _planned(fitter: Fitter, seeds: int, budget: float) -> tuple[Forecast, float, float]:
    """Give the fitter its plan; returns what it will take, and seconds of the largest network: an epoch's weight steps, and a pass."""
    networks = fitter.networks
    everything = dict.fromkeys([n for q in networks.questions for n in q.networks] + list(networks.others))
    fitter.largest = max(((n, w) for n in everything for w in networks.widths), key=lambda one: fitter.cost(*one))
    epoch, each = _seconds(fitter, *fitter.largest)
    runs = len(everything) * (2 * len(networks.widths) + seeds + 4)
    fitter.plan = planned(networks.questions, networks.others, networks.widths, seeds, budget, fitter.share)
    total = sum(sure_cost(fitter.plan, networks.questions, fitter.share))
    forecast = Forecast(total, total * epoch * fitter.schedule.epochs + runs * each)
    return forecast, epoch / EVIDENCE, each / PASSES


def _within(
    fitter: Fitter, recipe: dict[str, Any], made: Made, draw: Draw, seeds: int, budget: float, seconds: float, begun: float
) -> tuple[Fitter, dict[str, Any], Forecast, Deadline]:
    """What keeps the search within so many seconds, and its fitter: with fewer epochs, and of fewer samples if that is not enough.

    A search that takes far longer is refused, if not yet begun.
    """
    store, schedule, samples = fitter.store, fitter.schedule, fitter.samples
    count = store.begun_with("samples", samples)
    while True:
        if count < fitter.samples:
            some = draw.first(count)
            networks, recipe = made(some, count)
            shorter = sampling.shortened(schedule, samples, count)
            fitter = Fitter(networks, some, count, fitter.likelihood, shorter, store, **fitter.options)
        if count > MEASURED:
            fitter.tried, fitter.part_tried = draw.first(MEASURED), MEASURED / count
        forecast, *measured = _planned(fitter, seeds, budget)
        deadline = Deadline(fitter, fitter.networks.questions, Pace.measured(fitter, *measured), seconds, begun, budget)
        allowed = count if store.begun else deadline.samples(draw.least(samples))
        if allowed == count:
            break
        count = allowed
    store.begun_with("samples", count)
    fitter.schedule = store.schedule(replace(fitter.schedule, epochs=deadline.epochs()))
    fitter.work.clear()
    expected = deadline.expected(fitter.schedule.epochs)
    forecast.each = expected / max(forecast.total, 1e-9)
    if not store.begun:
        check(seconds, expected, len(fitter.networks.questions), sampling.said(count, samples, seconds))
    return fitter, recipe, forecast, deadline


def _schedule(options: Mapping[str, Any]) -> tuple[Schedule, dict[str, Any]]:
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


def _looked_at(data: Data, batch_size: int) -> tuple[Tensor, int, int]:
    """A few images, how many samples there are, and how many classes or targets."""
    first, count, most = None, 0, 0
    for x, y in batches(data, batch_size):
        first, count = x if first is None else first, count + len(x)
        most = max(most, int(y.max()) + 1 if not y.is_floating_point() else (y.shape[1] if y.dim() > 1 else 1))
    if first is None or first.dim() != 4:
        shape, mend = ("none", "") if first is None else (tuple(first.shape), f"{_mended(first.shape)}; ")
        raise ValueError(
            f"discover takes images (B, C, H, W) with targets, got {shape}: {mend}give a pair of tensors, or a dataset"
        )
    return first[:8], size_of(data) or count, most


def _mended(shape: Sequence[int]) -> str:
    """How images of this shape become a batch; one image is told by its channels."""
    one = len(shape) == 3 and shape[0] in CHANNELS
    return "this looks like one image; give all of them, x in place of x[0]" if one else input_shapes.mended(shape)


def _networks(
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
    trained = isinstance(model, nn.Module) and _is_trained(model, data, likelihood)
    x = x.to(
        next((model if isinstance(model, nn.Module) else model(1)).parameters())
    )  # its device and precision, whatever the data's
    return Given(model, names, x, trained), recipe | {"name": None, "trained": trained, "free": "auto"}


@torch.no_grad()
def _is_trained(model: nn.Module, data: Data, likelihood: Likelihood) -> bool:
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


def _seconds(fitter: Fitter, network: str, width: float) -> tuple[float, float]:
    """About how long an epoch of a network takes on this machine, and what a run takes beside its epochs, for its evidence.

    Forecasts depend on it, and epochs if minutes are given; the folder of a search remembers these.
    """
    model = fitter.networks.build(network, width, 0)
    x, y = to_model(*next(iter(batches(fitter.data, fitter.schedule.batch_size))), model, "discover")
    steps = []
    for _ in range(3):
        begun = time.perf_counter()
        loss = fitter.likelihood.loss(model(x), y)
        slopes = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])
        float(slopes[0].sum())  # a GPU has then done it
        steps.append(time.perf_counter() - begun)
    with processes.alone():
        for data in ((x[:8], y[:8]), fitter.tried):  # the first warms up
            begun = time.perf_counter()
            laplace.at(model, data, fitter.likelihood, memory=fitter.options.get("memory"))
    passed = (time.perf_counter() - begun) / fitter.part_tried
    return EVIDENCE * min(steps) * math.ceil(fitter.samples / fitter.schedule.batch_size), PASSES * passed


def _idle(nothing: int, runs: int) -> list[str]:
    return [f"{nothing} of {runs} runs learned nothing: more epochs, or a larger budget, may change it"] if nothing else []


def _shortened(part: float, epochs: int, limit: str) -> list[str]:
    if part > 0.99:
        return []
    return [f"long runs had {part:.0%} of {epochs} epochs, to stay within the {limit}: more makes them longer"]


def _verdict(
    search: Search, fitter: Fitter, question: Question, finding: Finding, held_out: Data | None, left_out: str
) -> Verdict:
    """The finding, with a second opinion, and the layers in which the symmetry is broken."""
    best = search.best(*(network for network in search.plan.networks if network != question.strict))
    opinion, judgement, why = None, finding.judgement, finding.why
    if best is not None:
        with processes.alone():
            fit = fitter.fitted(best.start)
            name = f"{best.network} of width {best.width:g}"
            opinion = symmetrising.opinion(question.symmetry, name, fit, fitter.data, PART, held_out)
        its, strict = (margins.best(search.values(network)) for network in (best.network, question.strict))
        ahead = margins.margin(its, strict, *search.between(best.network, question.strict))
        if contradiction := contradicted(finding, opinion, ahead):
            judgement, why = "undecided", contradiction
        likelihood = float(fit.evidence.log_likelihood)
        if finding.stuck and mistaken(search.explained, likelihood, opinion):
            judgement, why = "no", ""
    prices = search.prices.get(question.symmetry, {})
    layers = tuple(LayerAnswer(layer, price.nats, price.needed) for layer, price in prices.items())
    margins_of, moved = (finding.breaking, finding.tie), search.moved.get(question.symmetry)
    return Verdict(question.symmetry, judgement, *margins_of, why, finding.tried, opinion, layers, moved, left_out)


def contradicted(finding: Finding, opinion: Opinion, ahead: margins.Margin) -> str:
    """Why a second opinion contradicts a finding, or nothing. ``ahead`` is what its network has more than the strict one."""
    if finding.judgement == "no" and opinion.supports:
        return f"breaking it gains {finding.breaking}, but {opinion}: a network that keeps it is as good"
    lost = -opinion.evidence > max(ahead.bound, FEW)
    if finding.judgement == "yes" and ahead.counts and ahead.nats > FEW and lost:
        return (
            f"among networks of its kind it holds, but {opinion.of} has {ahead} more than the best that keeps it, and {opinion}"
        )
    if finding.judgement == "yes" and opinion.held_out is not None and opinion.held_out.loses and lost:
        return f"by the evidence it holds, but {opinion}"
    return ""


def mistaken(explained: Callable[[float], float], log_likelihood: float, opinion: Opinion) -> bool:
    """Whether a network that explains the labels is worse than guessing when it is averaged over the group.

    It then gives moved images other labels, and is sure of them. A network that keeps the symmetry can only guess, and is not stuck.
    """
    return explained(log_likelihood) >= LITTLE and explained(log_likelihood + opinion.training.nats) < 0


def _candidates(search: Search, fitter: Fitter) -> list[Candidate]:
    """The best end of every network, the one with the most evidence first."""
    found = []
    for network in search.plan.networks:
        run = search.best(network)
        if run is None:
            continue
        outcome, runs = search.outcomes[run], sum(r.network == network and r.stage in ("short", *FITS) for r in search.outcomes)
        size = sum(p.numel() for p in fitter.networks.build(network, run.width, 0).parameters())
        found.append(Candidate(network, run.width, run.seed, outcome.log_evidence, outcome.error, runs, run.start, size))
    return sorted(found, key=lambda candidate: -candidate.log_evidence)


def _chosen(search: Search, verdicts: Sequence[Verdict]) -> str:
    """The end with the most evidence; the strict network's, if breaking gains nothing; without what layers do not need to break."""
    best = search.best(*search.plan.networks)
    if best is None:
        raise ValueError("nothing was learned: the evidence of every network has failed; train longer, or rescale the inputs")
    for question, verdict in zip(search.questions, verdicts, strict=True):
        strict = search.best(question.strict)
        if verdict.judgement == "yes" and best.network == question.relaxed and strict is not None:
            best = strict if search.outcomes[best].log_evidence - search.outcomes[strict].log_evidence < FEW else best
    own = [search.prices.get(question.symmetry, {}) for question in search.questions if question.relaxed == best.network]
    unneeded = {name for prices in own for name, price in prices.items() if not price.needed}  # of this network alone
    for run in search.outcomes:
        if run.stage == "layers" and run.start == best.start and run.left and set(run.left) == unneeded:
            return run.key
    return best.start
