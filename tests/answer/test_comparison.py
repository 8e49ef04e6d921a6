"""autosym.compare against exact linear-Gaussian evidence, and everything that it refuses or warns of."""

import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import autosym
import oracles
from autosym.answer.comparison import short_of_mode
from autosym.bayes.likelihoods import Gaussian
from autosym.bayes.priors import Prior
from autosym.evidence import laplace
from autosym.evidence.cautions import Impossible
from autosym.evidence.record import nats
from autosym.training.fitted import Fit
from autosym.training.schedule import Schedule
from models import certain, images, regression, small

NOISE, PRECISION = 0.5, 2.0


class Part(nn.Module):
    """Linear regression on some of the features."""

    def __init__(self, features):
        super().__init__()
        self.features = list(features)
        self.linear = nn.Linear(len(self.features), 2, bias=False).double()

    def forward(self, x):
        return self.linear(x[:, self.features])


def at_mode(model, x, y, away=0.0):
    """A fit at the exact posterior mode of linear regression (or ``away`` from it)."""
    phi = x[:, model.features]
    precision = phi.T @ phi / NOISE**2 + PRECISION * torch.eye(phi.shape[1], dtype=torch.float64)
    with torch.no_grad():
        model.linear.weight.copy_(torch.linalg.solve(precision, phi.T @ y / NOISE**2).T + away)
    likelihood = Gaussian(NOISE)
    at = laplace.at(model, (x, y), likelihood)
    prior = Prior(at.names, PRECISION)
    with torch.no_grad():
        return Fit(model, prior, likelihood, Schedule(step="none"), [], at(prior), at)


@pytest.fixture
def data():
    return regression(samples=40, size=5)


def test_probabilities_are_those_of_exact_evidence(data):
    x, y = data
    parts = {"all": range(5), "three": range(3), "one": range(1)}
    found = autosym.compare({name: at_mode(Part(features), x, y) for name, features in parts.items()}, data)
    exact = {n: oracles.regression_log_evidence(x[:, list(f)], y, PRECISION, NOISE) for n, f in parts.items()}
    weights = torch.tensor(list(exact.values()), dtype=torch.float64).softmax(0).tolist()
    by_name = {model.name: model for model in found}
    for (name, value), weight in zip(exact.items(), weights, strict=True):
        assert by_name[name].log_evidence == pytest.approx(value, rel=1e-10)
        assert by_name[name].probability == pytest.approx(weight, rel=1e-6, abs=1e-300)
        assert by_name[name].per_sample == pytest.approx(value / 40)
        assert by_name[name].difference == pytest.approx(value - max(exact.values()))
        assert by_name[name].short_of_mode == pytest.approx(0, abs=1e-9)
    assert sum(model.probability for model in found) == pytest.approx(1)
    assert [model.name for model in found] == sorted(exact, key=lambda name: -exact[name])
    assert found.best.difference == 0
    assert found.warnings == ()


def test_a_model_whose_evidence_cannot_be_is_never_the_best():
    (failed, data), (slow, _), (slower, _) = (certain(lr) for lr in (0.3, 0.1, 0.05))
    found = autosym.compare({"failed": failed, "slow": slow, "slower": slower}, data)
    assert float(failed.evidence.log_evidence) > float(slow.evidence.log_evidence)
    assert [model.name for model in found] == [
        *sorted(("slow", "slower"), key=lambda n: -found.fits[n].evidence.log_evidence),
        "failed",
    ]
    assert found.best.name != "failed"
    assert sum(model.probability for model in found.models[:2]) == pytest.approx(1)
    last = found.models[2]
    assert isinstance(last.failed, Impossible)
    assert last.log_evidence == pytest.approx(float(failed.evidence.log_evidence), abs=1e-6)
    assert math.isnan(last.difference)
    assert math.isnan(last.probability)
    assert last.warnings == (last.failed.unranked(),)
    assert [model.failed for model in found.models[:2]] == [None, None]
    lines = str(found).splitlines()
    assert lines[4].split()[:5] == ["failed", nats(last.log_evidence), f"{last.per_sample:.4f}", "failed", "-"]
    assert "! failed: its evidence must not be used, so it is not ranked: the log evidence, " in str(found)
    rows = json.loads(json.dumps(found.rows, allow_nan=False))
    assert [(row["failed"], row["probability"] is None, row["difference"] is None) for row in rows] == [(False,) * 3] * 2 + [
        (True,) * 3
    ]


def test_where_all_evidence_has_failed_no_model_is_the_best():
    failed, _ = certain()
    found = autosym.compare([failed, failed])
    assert [model.name for model in found] == ["0", "1"]
    with pytest.raises(
        ValueError, match="no model is the best, as the evidence of none can be used; 0: The evidence must not be used"
    ):
        found.best  # noqa: B018


def test_odds_include_errors(data):
    """Evidence of Kronecker factors, or that moved to the end of training, does not tell models apart that are so close."""
    x, y = data
    one, other = at_mode(Part(range(5)), x, y), at_mode(Part(range(3)), x, y)
    exact = autosym.compare([one, other], data)
    assert exact.models[0].error == pytest.approx(0, abs=1e-6)
    assert exact.models[1].probability == pytest.approx(exact.models[1].at_face_value)
    gap = -exact.models[1].difference
    moving = [{"log_evidence": value} for value in (0.0, 3 * gap, 0.0, 3 * gap)]
    moved = autosym.compare([replace(one, history=moving), replace(other, history=moving)], data)
    assert moved.models[0].error == pytest.approx(3 * gap / math.sqrt(2))
    assert moved.models[1].probability > 0.2 > 1e6 * moved.models[1].at_face_value
    kronecker = autosym.compare([one, other])
    gamma = float(one.laplace.effective_parameters(one.prior).detach().sum())
    assert kronecker.models[0].error == pytest.approx(0.5 / math.sqrt(12) * gamma)
    assert "+-" in str(moved)


def test_close_models_share_the_probability():
    """A feature that carries nothing: the smaller model is a little better, and the odds are those of the evidence."""
    x, y = regression(samples=40, size=5)
    x = torch.cat([x, 0.01 * torch.randn(40, 1).double()], 1)
    found = autosym.compare([at_mode(Part(range(6)), x, y), at_mode(Part(range(5)), x, y)])
    odds = found.models[0].at_face_value / found.models[1].at_face_value
    assert odds == pytest.approx(math.exp(-found.models[1].difference))
    assert 0.1 < found.models[1].probability < 0.9
    assert {model.name for model in found} == {"0", "1"}
    assert {model.short_of_mode for model in found} == {None}


def test_distance_from_a_mode_is_exact_for_a_quadratic(data):
    x, y = data
    there, away = at_mode(Part(range(5)), x, y), at_mode(Part(range(5)), x, y, away=0.1)
    lost = float(there.evidence.log_evidence - away.evidence.log_evidence)
    assert lost > 1
    assert short_of_mode(away, data) == pytest.approx(lost, rel=1e-9)
    closer = autosym.compare({"away": away, "same": at_mode(Part(range(5)), x, y, away=0.1)}, data)
    assert sum("short of a mode, more than the margin of 0 nats" in warning for warning in closer.warnings) == 2


def test_the_best_is_judged_by_its_margin_to_the_second(data):
    """Weights that are 8 nats short of a mode are warned of where 2 nats decide, not where hundreds do."""
    x, y = data
    away, further = (at_mode(Part(range(5)), x, y, away=away) for away in (0.1, 0.11))
    few = at_mode(Part(range(1)), x, y)
    clear = autosym.compare({"away": away, "few": few}, data)
    assert 1 < clear.best.short_of_mode < -clear.models[1].difference
    assert clear.warnings == ()
    close = autosym.compare({"away": away, "further": further, "few": few}, data)
    margin = -close.models[1].difference
    assert 1 < margin < close.best.short_of_mode < -close.models[2].difference
    found = f"its weights are about {{:.3g}} nats short of a mode, more than the margin of {margin:.3g} nats: train longer"
    assert close.warnings == tuple(f"{m.name}: {found.format(m.short_of_mode)}" for m in close.models[:2])


@torch.no_grad()
def test_precisions_that_could_still_gain_are_warned_of(data):
    """At a mode of weights; not where they were held on purpose, nor after steps in closed form."""
    held = at_mode(Part(range(5)), *data)

    def warned(prior, schedule):
        fit = replace(held, prior=prior, evidence=held.laplace(prior), schedule=schedule)
        found = autosym.compare([fit, fit])
        return found.best.unlearned, [w for w in found.best.warnings if "precisions" in w]

    prior = Prior(held.laplace.names, 500.0)
    gain, said = warned(prior, Schedule())
    assert gain > 10
    assert said == [f"its precisions could still gain {gain:.3g} nats, more than the margin of 0 nats: train longer"]
    assert warned(prior, Schedule(step="none")) == (gain, [])
    for _ in range(20):
        held.laplace.mackay(prior)
    gain, said = warned(prior, Schedule())
    assert gain < 0.1
    assert said == []


def test_weights_that_were_changed_after_the_fit_are_seen(data):
    fits = [at_mode(Part(range(n)), *data) for n in (4, 5)]
    with torch.no_grad():
        fits[1].model.linear.weight.add_(1)
    with pytest.raises(ValueError, match="changed after the fit"):
        autosym.compare(fits, data)


def test_targets_that_would_be_broadcast_are_refused(data):
    """Sums over samples do not tell (N,) from (N, 1)."""
    x, y = data
    fits = [at_mode(Part(range(n)), x, y) for n in (4, 5)]
    with pytest.raises(ValueError, match="do not match outputs"):
        autosym.compare(fits, (x, y[:, 0]))


def test_rows_are_json_and_print_as_a_table(data):
    found = autosym.compare({"many": at_mode(Part(range(5)), *data), "few": at_mode(Part(range(2)), *data)}, data)
    rows = json.loads(json.dumps(found.rows, allow_nan=False))
    assert [row["name"] for row in rows] == [model.name for model in found]
    assert set(rows[0]) >= {"name", "log_evidence", "per_sample", "difference", "probability", "warnings"}
    lines = str(found).splitlines()
    assert lines[0].split()[0] == "model"
    assert lines[2].startswith(found.best.name)
    assert nats(found.best.log_evidence) in lines[2]
    assert set(found.fits) == {"many", "few"}


# ---- models are trained first


def test_models_are_fitted_alike():
    x, y = images()
    options = {"epochs": 3, "batch_size": 12, "seed": 3}
    torch.manual_seed(5)
    found = autosym.compare({"conv": small("conv"), "f-fc+conv": small()}, (x, y), **options)
    torch.manual_seed(5)
    alone = {name: autosym.fit(small(name), (x, y), **options) for name in ("conv", "f-fc+conv")}
    for name, fitted in alone.items():
        assert float(found.fits[name].evidence.log_evidence) == pytest.approx(
            float(fitted.refine((x, y)).evidence.log_evidence)
        )
        assert found.fits[name].schedule.epochs == 3
    assert all(model.short_of_mode > 0 for model in found)
    (factored,) = [model for model in found if model.name == "f-fc+conv"]
    assert any("products of two factors" in warning for warning in factored.warnings)


# ---- what is refused


def fitted(likelihood="categorical", model=None, data=None, **options):
    data = data or images(likelihood)
    return autosym.fit(model or small("conv"), data, likelihood, epochs=1, **options)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: fitted("gaussian"), "categorical likelihood, 1 a gaussian one"),
        (lambda: fitted(data=images(samples=20)), "24 samples with 3 outputs, 1 to 20"),
        (lambda: fitted(data=(images()[0], (images()[1] + 1) % 3)), "different targets"),
    ],
    ids=["likelihood", "number of samples", "targets"],
)
def test_other_data_are_refused(other, message):
    with pytest.raises(ValueError, match=message):
        autosym.compare([fitted(), other()])


def test_what_is_no_fit_is_refused():
    one = fitted()
    with pytest.raises(ValueError, match="at least two"):
        autosym.compare([one])
    with pytest.raises(TypeError, match="'b' is a float"):
        autosym.compare({"a": one, "b": 1.0})
    with pytest.raises(ValueError, match="b: a model is trained before it is compared, so give its data"):
        autosym.compare({"a": one, "b": small("conv")})
    with pytest.raises(TypeError, match="epochs: options are for training models"):
        autosym.compare([one, one], images(), epochs=3)


@pytest.mark.parametrize(
    "other",
    [
        lambda x, y: (x[:20], y[:20]),
        lambda x, y: (x + 1, y),
        lambda x, y: (x, y.flip(0)),
    ],
    ids=["fewer", "inputs", "labels"],
)
def test_the_distance_from_a_mode_is_of_the_training_data(other):
    data = images()
    fits = [fitted(data=data), fitted(data=data, seed=1)]
    assert all(model.short_of_mode is not None for model in autosym.compare(fits, data))
    with pytest.raises(ValueError, match="are not the 24 that the evidence was computed on"):
        autosym.compare(fits, other(*data))


# ---- what is warned of


@pytest.mark.parametrize(
    ("other", "word"),
    [
        (lambda data: fitted(data=data, sampled_end=True), "sampled"),
        (lambda data: fitted(data=data, nu=4.0), "lower bound of the Laplace evidence under a Student-t prior"),
        (lambda data: fitted(data=data, step="none"), "were not learned"),
        (lambda data: fitted(data=data, model=small("f-fc")), "products of two factors"),
        (lambda data: fitted(data=data, model=small("s-fc")), "products of two factors"),
        (
            lambda data: fitted(data=data, model=small("gconv:c4")),
            "curvature of GroupConv, relative to the exact one, is smaller",
        ),
        (lambda data: fitted(data=(2 * data[0], data[1])), "inputs differ from the inputs of other models"),
    ],
    ids=["sampled", "bound", "map", "factored", "sparse", "group", "inputs"],
)
def test_what_does_not_compare_is_warned_of(other, word):
    data = images()
    one = fitted(data=data)
    found = autosym.compare({"one": one, "other": other(data)})
    (warned,) = [model for model in found if model.name == "other"]
    assert any(word in warning for warning in warned.warnings)
    assert all(f"! other: {warning}" in str(found) for warning in warned.warnings)
    alike = autosym.compare({"one": one, "other": fitted(data=data, seed=1)})
    assert not any(word in warning for warning in alike.warnings)


def test_a_model_that_is_no_better_than_guessing_is_warned_of():
    """Random labels, which nobody can explain; and labels that are written in the images."""
    x, y = images(samples=60)
    guess = 60 * math.log(3)
    found = autosym.compare([small("conv"), small("fc")], (x, y), epochs=2)
    for model in found:
        assert any("lower than for guessing one of 3 classes" in w for w in model.warnings) == (model.log_evidence < -guess)
    assert any("guessing" in warning for warning in found.warnings)
    x = x + 3 * torch.nn.functional.one_hot(y, 4)[:, None, :, None].float()
    easy = autosym.compare([small("fc"), small("f-fc")], (x, y), epochs=40)
    assert easy.best.log_evidence > -guess
    assert not any("lower than for guessing" in warning for warning in easy.best.warnings)


@pytest.mark.parametrize(
    ("part", "warning"),
    [
        (-0.1, "its evidence is lower than for guessing one of 3 classes"),
        (0.15, "its evidence is only 15% better than guessing one of 3 classes"),
        (0.25, None),
    ],
)
def test_a_model_that_is_little_better_than_guessing_is_warned_of(part, warning):
    """``part`` of what guessing leaves to explain."""
    fit = fitted(step="none")
    missing = -(1 - part) * fit.evidence.samples * math.log(3) - fit.evidence.log_evidence
    moved = replace(fit, evidence=replace(fit.evidence, log_likelihood=fit.evidence.log_likelihood + missing))
    found = [said for said in autosym.compare([moved, moved]).best.warnings if "guessing" in said]
    assert len(found) == (warning is not None)
    assert all(said.startswith(warning) for said in found)


def test_the_fingerprint_does_not_depend_on_order_or_batches():
    x, y = images()
    order = torch.randperm(len(x))
    likelihood = autosym.Categorical()
    model = small("conv")
    one = laplace.at(model, (x, y), likelihood).curvature.fingerprint
    two = laplace.at(model, (x[order], y[order]), likelihood, batch_size=5).curvature.fingerprint
    swapped = laplace.at(model, (x, y[order]), likelihood).curvature.fingerprint
    torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-6)
    torch.testing.assert_close(one[:4], swapped[:4])
    assert abs(one[4] - swapped[4]) > 1e-3


# ---- evidence of the whole network


def test_fits_are_compared_by_the_evidence_of_the_whole_network_if_it_costs_no_more_than_they(monkeypatch):
    x, y = images()
    fits = {name: autosym.fit(small(name), (x, y), epochs=3) for name in ("conv", "fc")}
    whole = {name: float(f.refine((x, y)).evidence.log_evidence) for name, f in fits.items()}
    given = {name: float(f.evidence.log_evidence) for name, f in fits.items()}
    for options, expected in (({}, whole), ({"curvature": "whole"}, whole), ({"curvature": "kronecker"}, given)):
        assert {m.name: m.log_evidence for m in autosym.compare(fits, (x, y), **options)} == pytest.approx(expected)
    assert {m.name: m.log_evidence for m in autosym.compare(fits)} == given, "without data there is no other"
    monkeypatch.setattr("autosym.evidence.costs.FEW", 3)  # so probes
    monkeypatch.setattr("autosym.evidence.costs.CALL", 0.0)  # and a fit that costs less
    assert not fits["conv"].affords_whole((x, y))
    assert {m.name: m.log_evidence for m in autosym.compare(fits, (x, y))} == given, "only if it is asked for"
    sampled = autosym.compare(fits, (x, y), curvature="whole")
    assert all(m.standard_error > 0 and abs(m.log_evidence - whole[m.name]) < 6 * m.standard_error + 1 for m in sampled)
    assert "+-" in str(sampled)


def test_a_margin_within_the_error_of_probes_is_said(monkeypatch):
    x, y = images()
    fit = autosym.fit(small("conv"), (x, y), epochs=3)
    refined = fit.refine((x, y), how="probes", nats=50.0)
    assert refined.evidence.standard_error > 0
    found = autosym.compare([refined, refined])
    assert all(any("twice the error" in warning for warning in model.warnings) for model in found)
    both = autosym.compare({"whole": refined, "factors": fit}, (x, y))
    assert all(m.standard_error is not None for m in both), "the other one is refined too"
    mixed = autosym.compare({"whole": refined, "factors": fit})
    assert [any("refine all" in warning for warning in m.warnings) for m in mixed] == [m.name == "whole" for m in mixed]


def test_the_whole_network_needs_data_and_a_known_name():
    fit = autosym.fit(small("conv"), images(), epochs=3)
    with pytest.raises(ValueError, match="needs the data"):
        autosym.compare([fit, fit], curvature="whole")
    with pytest.raises(ValueError, match="'kronecker', 'whole'"):
        autosym.compare([fit, fit], curvature="lanczos")


def test_frozen_and_learned_normalisation_are_not_comparable():
    x, y = images()

    def fitted(learned):
        torch.manual_seed(0)
        norm = nn.GroupNorm(1, 4).requires_grad_(learned)
        model = nn.Sequential(nn.Conv2d(x.shape[1], 4, 3), norm, nn.ReLU(), nn.Flatten(), nn.LazyLinear(3))
        model.to(x)(x[:2])
        return autosym.fit(model, (x, y), epochs=3)

    frozen, learned = fitted(False), fitted(True)
    found = {m.name: m.warnings for m in autosym.compare({"frozen": frozen, "learned": learned, "none": plain(x, y)})}
    assert any("it learned scales or shifts" in warning for warning in found["learned"])
    assert any("normalisation layers are frozen" in warning for warning in found["frozen"])
    assert not any("normalisation" in warning for warning in found["none"])
    alike = autosym.compare([learned, learned, plain(x, y)])
    assert not any("normalisation" in warning for warning in alike.warnings)


def plain(x, y):
    return autosym.fit(nn.Sequential(nn.Flatten(), nn.Linear(x[0].numel(), 3)).to(x), (x, y), epochs=3)
