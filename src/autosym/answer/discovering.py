"""discover: which symmetries do these data have, for this network? Verdicts with margins, and the best network.

hypotheses   networks that keep a symmetry, that may break it, and that are without the tie               (``hypotheses``)
search       short runs, long ones, and from each other's ends; at two widths and several seeds          (``search``, ``routes``)
verdicts     by two margins of evidence with their errors                                                (``margins``)
opinion      the best network that breaks a symmetry, averaged over its group: a contradiction leaves it undecided  (``symmetrising``)
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path as File
from typing import Any

import torch
from torch import nn

from autosym.answer import guessing, inputs, margins, moving, notes, sampling, symmetrising
from autosym.answer.answers import Answer, Candidate, LayerAnswer, Verdict
from autosym.answer.deadline import Deadline, Pace, check
from autosym.answer.forecast import Forecast, spoken, told
from autosym.answer.hypotheses import USUAL, Built, Given, Networks, checked
from autosym.answer.margins import FEW
from autosym.answer.plans import FITS, Question, planned, sure_cost
from autosym.answer.routes import Fitter, Store
from autosym.answer.sampling import MEASURED, Draw
from autosym.answer.search import NOTHING, Finding, Search
from autosym.answer.symmetrising import Opinion
from autosym.bayes import likelihoods
from autosym.bayes.likelihoods import Likelihood
from autosym.curvature import input_shapes
from autosym.evidence import laplace
from autosym.evidence.verdicts import LITTLE
from autosym.runtime import processes
from autosym.runtime.batching import Data, batches, check_repeatable, targets_of, to_model

BUDGET = (6.0, 7.0)  # fits for the first symmetry, and for each further one
TIMED = 3.0  # times as many where minutes are given, for longer runs and for what is optional: time is what bounds them
EVIDENCE = 1.5  # times as long as its weight steps an epoch takes, about, with trials of the rate and sampled curvature
PASSES = 2.0  # exact passes of a run, about, of the largest network: smaller ones take less

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
    by shorter runs if need be. With ``minutes`` all of it takes about that long, by fewer epochs (``deadline``), and the budget is three
    times as large by default. If even the shortest search takes longer, some of the samples are drawn, by class (``sampling``); a warning
    and a note say how many. If the fewest, 200 or 10 times as many as classes, take longer, a warning says so beforehand; if they take ten
    times as long, it is refused.

    ``seeds``: of long runs. ``held_out`` data serve the second opinion only. ``resume`` names a folder: what is done is kept there, and a
    search that was stopped goes on as if it had not been. ``options`` are those of ``fit``: fields of its schedule, augment, memory,
    capture, deterministic. With torchrun, processes share the runs.
    """
    begun = time.perf_counter()
    check_repeatable(data, data)
    schedule, more = inputs.schedule(options)
    x, samples, outputs = inputs.looked_at(data, schedule.batch_size)
    if minutes is not None and not minutes > 0:
        raise ValueError(f"minutes must be positive, got {minutes}")
    names, likelihood = checked(symmetries, x.shape[-2:]), likelihoods.of(likelihood)

    def made(some: Data, count: int) -> tuple[Built | Given, dict[str, Any]]:
        with input_shapes.explained(model, x):
            networks, recipe = inputs.networks(model, names, x, count, outputs, some, likelihood, network)
        missing = [name for name in USUAL if name not in names] if tuple(symmetries) == USUAL else []
        networks.notes += tuple(f"{name} was left out: images are {x.shape[-2]}x{x.shape[-1]}, not square" for name in missing)
        return networks, recipe

    networks, recipe = made(data, samples)
    planned_for = BUDGET[0] + BUDGET[1] * (len(names) - 1) if budget is None else float(budget)
    budget = planned_for * (TIMED if budget is None and minutes is not None else 1.0)
    settings = {"symmetries": names, "seeds": seeds, "budget": budget, "minutes": minutes, "schedule": repr(schedule)}
    settings |= {"options": sorted(more), "likelihood": likelihood.name}
    settings |= {} if resume is None else inputs.known(model, data, recipe)
    store = Store(None if resume is None else File(resume), settings)
    fitter = Fitter(networks, data, samples, likelihood, schedule, store, **more)
    if minutes is None:
        forecast, deadline, left_out = _planned(fitter, seeds, planned_for)[0], None, ""
    else:
        draw = Draw(data, likelihoods.classes(likelihood, outputs))
        fitter, recipe, forecast, deadline = _within(
            fitter, recipe, made, draw, seeds, (planned_for, budget), 60 * minutes, begun
        )
        left_out = sampling.said(fitter.samples, samples, 60 * minutes)
    store.begin()
    with told(progress, forecast, fitter.price) as (fitter.say, tell):
        tell(f"{len(fitter.plan.networks)} networks, up to {budget:g} fits of the largest: about {spoken(forecast.left)}")
        perform = fitter.perform if deadline is None else deadline.perform
        steps = (perform, fitter.share, tell, fitter.networks.route, cache(fitter.layers))
        classes, questions = _classes(fitter.networks, likelihood), fitter.networks.questions
        explained = guessing.explained(targets_of(fitter.data), likelihood, classes)
        moved = store.moved(lambda: _moved(names, fitter.data, fitter.samples, classes))
        search = Search(questions, fitter.plan, *steps, explained, moved, little=LITTLE if classes else NOTHING).run()
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
    with processes.alone():
        fit = fitter.fitted(key)
    seconds = processes.agreed(fitter.before + time.perf_counter() - begun)
    said = (
        *fitter.networks.notes,
        *([left_out] if left_out else []),
        *notes.shortened(fitter.plan.part("long") * fitter.schedule.epochs, fitter.asked, minutes is not None),
        *(notes.idle(*search.idle()) if any(verdict.judgement == "undecided" for verdict in verdicts) else []),
        *notes.unpriced([v.symmetry for v in verdicts if v.judgement == "no" and not v.layers]),
        *notes.few(fitter.samples),
        *search.cautions(),
        *notes.late(seconds, minutes),
    )
    found = (
        tuple(verdicts),
        tuple(_candidates(search, fitter)),
        fitter.samples,
        search.spent,
        seconds,
    )
    return Answer(*found, said, recipe, fit)


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
    fitter: Fitter,
    recipe: dict[str, Any],
    made: Made,
    draw: Draw,
    seeds: int,
    budgets: tuple[float, float],
    seconds: float,
    begun: float,
) -> tuple[Fitter, dict[str, Any], Forecast, Deadline]:
    """What keeps the search within so many seconds, and its fitter: with fewer epochs, at one width, and of fewer samples, in this order.

    The plan is for the first of two ``budgets``; time that is left may be spent up to the second. A search that takes far longer is
    refused, if not yet begun.
    """
    store, schedule, samples = fitter.store, fitter.schedule, fitter.samples
    count, widths = store.begun_with("samples", samples), store.begun_with("widths", len(fitter.networks.widths))
    while True:
        if count < fitter.samples:
            some = draw.first(count)
            networks, recipe = made(some, count)
            shorter = sampling.shortened(schedule, samples, count)
            fitter = Fitter(networks, some, count, fitter.likelihood, shorter, store, **fitter.options)
        if widths < len(fitter.networks.widths):
            fitter.networks.widths = fitter.networks.widths[:widths]
            fitter.networks.notes += (notes.narrow(seconds),)
        if count > MEASURED:
            fitter.tried, fitter.part_tried = draw.first(MEASURED), MEASURED / count
        forecast, *measured = _planned(fitter, seeds, budgets[0])
        deadline = Deadline(fitter, fitter.networks.questions, Pace.measured(fitter, *measured), seconds, begun, budgets[1])
        if deadline.tight and widths > 1 and not store.begun:
            widths = 1
            continue
        allowed = count if store.begun else deadline.samples(draw.least(samples))
        if allowed == count:
            break
        count = allowed
    store.begun_with("samples", count)
    store.begun_with("widths", widths)
    fitter.schedule = store.schedule(replace(fitter.schedule, epochs=deadline.epochs()))
    fitter.work.clear()
    expected = deadline.expected(fitter.schedule.epochs)
    forecast.each = expected / max(forecast.total, 1e-9)
    if not store.begun:
        left_out, few = sampling.said(count, samples, seconds), count <= draw.least(samples)
        check(seconds, expected, len(fitter.networks.questions), left_out, few)
    return fitter, recipe, forecast, deadline


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
            opinion = symmetrising.opinion(question.symmetry, name, fit, fitter.data, held_out)
        its, strict = (margins.best(search.values(network)) for network in (best.network, question.strict))
        ahead = margins.margin(its, strict, *search.between(best.network, question.strict))
        if contradiction := contradicted(finding, opinion, ahead):
            judgement, why = "undecided", contradiction
        likelihood = float(fit.evidence.log_likelihood)
        if finding.stuck and mistaken(search.explained, search.little, likelihood, opinion):
            judgement, why = "no", ""
    prices = search.prices.get(question.symmetry, {})
    layers = tuple(LayerAnswer(layer, price.nats, price.needed) for layer, price in prices.items())
    margins_of, moved = (finding.breaking, finding.tie), search.moved.get(question.symmetry)
    return Verdict(question.symmetry, judgement, *margins_of, why, finding.tried, opinion, layers, moved, left_out)


def contradicted(finding: Finding, opinion: Opinion, ahead: margins.Margin) -> str:
    """Why a second opinion contradicts a finding, or nothing. ``ahead`` is what its network has more than the strict one."""
    if finding.judgement == "no" and opinion.supports:
        return f"breaking it gains {finding.breaking}, but {opinion}: a network that keeps it is as good"
    lost = opinion.training.loses and -opinion.training.nats > max(ahead.bound, FEW)
    if finding.judgement == "yes" and ahead.counts and ahead.nats > FEW and lost:
        return (
            f"among networks of its kind it holds, but {opinion.of} has {ahead} more than the best that keeps it, and {opinion}"
        )
    if finding.judgement == "yes" and opinion.held_out is not None and opinion.held_out.loses and lost:
        return f"by the evidence it holds, but {opinion}"
    return ""


def mistaken(explained: Callable[[float], float], little: float, log_likelihood: float, opinion: Opinion) -> bool:
    """Whether a network that explains the labels is worse than guessing when it is averaged over the group.

    It then gives moved images other labels, and is sure of them. A network that keeps the symmetry can only guess, and is not stuck.
    """
    return explained(log_likelihood) >= little and explained(log_likelihood + opinion.training.nats) < 0


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
        strict, shut = search.best(question.strict), search.shut(question)
        if verdict.judgement == "yes" and best.network == question.relaxed and strict is not None:
            if search.outcomes[best].log_evidence - search.outcomes[strict].log_evidence < FEW:
                best = strict
            elif shut is not None and shut.start == best.start and search.closed(question) < FEW:
                return shut.key
    own = [search.prices.get(question.symmetry, {}) for question in search.questions if question.relaxed == best.network]
    unneeded = {name for prices in own for name, price in prices.items() if price.needed is False}  # of this network alone
    for run in search.outcomes:
        if run.stage == "layers" and run.start == best.start and run.left and set(run.left) == unneeded:
            return run.key
    return best.start
