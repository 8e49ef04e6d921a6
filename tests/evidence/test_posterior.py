"""The posterior of the whole network, against dense matrices in float64."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call, jacrev
from torch.testing import assert_close

import autosym
from autosym import Categorical, Gaussian
from autosym.curvature.gauss_newton import GaussNewton, flat
from autosym.curvature.krylov import solve
from autosym.curvature.owners import sites
from autosym.evidence import laplace, posterior
from autosym.evidence.leave_one_out import Tuning, cavity
from models import draw, eye, mlp, relaxed

CLOSE = {"rtol": 1e-6, "atol": 1e-8}


def at_weights(model, data, likelihood):
    """A fit that leaves the weights where they are, with another precision for every path."""
    precision = {site.name: 0.3 + 0.2 * i for i, site in enumerate(sites(model))}
    return autosym.fit(model, data, likelihood, prior_precision=precision, step="none", epochs=1, lr=1e-30)


def jacobian(model, x):
    """(B, D, weights), the parameters in the order of the sites."""
    names = {id(p): name for name, p in model.named_parameters()}
    parameters = {names[id(site.parameter)]: site.parameter.detach() for site in sites(model)}
    found = jacrev(lambda p: functional_call(model, p, (x,)))(parameters)
    return torch.cat([found[name].flatten(2) for name in parameters], 2)


def case(kind="categorical", make=lambda: mlp(5, 4, 3), shape=(5,), samples=12):
    """A fit, its data, the dense Jacobian, the diagonal of D, and new inputs."""
    torch.manual_seed(0)
    model, data = make(), draw(kind, samples, shape)
    fit = at_weights(model, data, Categorical() if kind == "categorical" else Gaussian(0.6))
    precision = fit.prior.precision()
    D = torch.cat([torch.full((site.parameter.numel(),), precision[site.name]) for site in sites(model)]).double()
    return fit, data, jacobian(model, data[0]), D, torch.randn(4, *shape, dtype=torch.float64)


def of(fit, data, **options):
    return posterior.at(fit.model, data, fit.laplace, fit.prior, **options)


def laplace_covariance(fit, J, D, x):
    """J (H + D)^-1 J^T at new inputs."""
    root = fit.likelihood.root(fit.model(x[1]).detach()) * fit.likelihood.scale().detach().sqrt()
    rows = (root.mT @ J).flatten(0, 1)
    new = jacobian(fit.model, x[0])
    return new @ torch.linalg.inv(rows.mT @ rows + torch.diag(D)) @ new.mT


@pytest.fixture(autouse=True)
def exactly(monkeypatch):
    monkeypatch.setattr(posterior, "RESIDUAL", 1e-10)


@pytest.mark.parametrize("kind", ["categorical", "gaussian"])
def test_drawn_covariances_are_the_dense_ones_up_to_their_standard_error(kind):
    fit, data, J, D, new = case(kind)
    draws = 400
    found = of(fit, data, rounds=0, draws=draws).predictive(new)
    dense = laplace_covariance(fit, J, D, (new, data[0]))
    variances = dense.diagonal(dim1=1, dim2=2)
    error = ((variances[:, :, None] * variances[:, None] + dense.square()) / draws).sqrt()
    assert ((found.covariance - dense).abs() < 4.5 * error).all()
    assert error.max() < 0.2 * variances.max(), "the test would see nothing"
    assert_close(found.mean, fit.model(new).detach(), **CLOSE)


@pytest.mark.parametrize("kind", ["categorical", "gaussian"])
@pytest.mark.parametrize(("make", "shape"), [(lambda: mlp(5, 4, 3), (5,)), (relaxed, (2, 4, 4))], ids=["dense", "relaxed"])
def test_rows_and_steps_agree(kind, make, shape):
    fit, data, _, _, _ = case(kind, make, shape)
    rows, steps = (of(fit, data, draws=4, rounds=1, how=how) for how in ("rows", "steps"))
    assert_close(rows.draws, steps.draws, **CLOSE)
    assert_close(rows.offset, steps.offset, **CLOSE)
    assert rows.draws.abs().min() > 0


def test_one_round_is_a_newton_step_with_averages_over_the_draws():
    fit, data, J, D, _ = case()
    first, found = (of(fit, data, draws=5, rounds=rounds) for rounds in (0, 1))
    f = fit.model(data[0]).detach()
    away = torch.einsum("ndw,kw->knd", J, first.draws)
    p = torch.cat([f + away, f - away]).softmax(-1)
    slope = p.mean(0) - F.one_hot(data[1].long(), 3)
    hessian = (torch.diag_embed(p) - p[..., None] * p[..., None, :]).mean(0)
    matrix = torch.einsum("ndw,nde,nev->wv", J, hessian, J) + torch.diag(D)
    weights = flat([site.parameter for site in sites(fit.model)])
    expected = -torch.linalg.solve(matrix, D * weights + torch.einsum("ndw,nd->w", J, slope))
    assert_close(found.offset, expected, **CLOSE)
    assert expected.abs().max() > 0.1


def test_regression_moves_to_the_mode_of_the_linearised_network():
    fit, (x, y), J, D, _ = case("gaussian")
    found, scale = of(fit, (x, y), draws=2, rounds=1), float(fit.likelihood.scale().detach())
    slope = fit.model(x).detach() + torch.einsum("ndw,w->nd", J, found.offset) - y
    weights = flat([site.parameter for site in sites(fit.model)]) + found.offset
    assert_close(D * weights + scale * torch.einsum("ndw,nd->w", J, slope), torch.zeros_like(D), rtol=0, atol=1e-6)


@pytest.mark.parametrize("how", ["rows", "steps"])
def test_batches_do_not_matter(how):
    fit, data, _, _, new = case()
    whole, parts = (of(fit, data, draws=3, batch_size=size, how=how) for size in (None, 5))
    assert_close(parts.draws, whole.draws, **CLOSE)
    assert_close(parts.offset, whole.offset, **CLOSE)
    for link in ("probit", "monte-carlo"):
        together = whole.predictive(new, link).probabilities
        assert_close(torch.cat([whole.predictive(x, link).probabilities for x in new.split(1)]), together, rtol=1e-10, atol=0)


def test_a_network_sure_of_its_data_is_less_timid_than_by_laplace():
    fit, data, _, _, _ = case()
    fit.model[-1].weight.data *= 20
    fit = at_weights(fit.model, (data[0], fit.model(data[0]).argmax(1)), "categorical")
    own = (data[0], fit.model(data[0]).argmax(1))
    by_laplace, averaged = (of(fit, own, rounds=rounds).predictive(data[0]).covariance.sum() for rounds in (0, 1))
    assert averaged < 0.7 * by_laplace


@pytest.mark.parametrize("link", ["probit", "monte-carlo"])
def test_a_fit_predicts_by_its_data(link):
    """Classes by the tuned posterior, or at a scale; regression by the posterior as it is."""
    fit, data, _, _, new = case()
    at = (fit.model, data, fit.laplace, fit.prior)
    tuned, plain = posterior.tuned(*at, link=link).predictive(new, link), of(fit, data).predictive(new, link)
    assert_close(fit.predictive(new, link, data=data).probabilities, tuned.probabilities, rtol=0, atol=0)
    assert_close(fit.predictive(new, link, data=data, scale=1.0).probabilities, plain.probabilities, rtol=0, atol=0)
    none = fit.predictive(new, link, data=data, scale=0.0)
    assert_close(none.probabilities, plain.mean.softmax(1), rtol=1e-12, atol=0)
    assert torch.equal(none.covariance, plain.covariance)
    fit, regression, _, _, new = case("gaussian")
    found, plain = fit.predictive(new, link, data=regression), of(fit, regression).predictive(new, link)
    assert_close(found.variance, plain.variance, rtol=0, atol=0)


def test_data_of_another_fit_are_refused():
    fit, data, _, _, new = case()
    with pytest.raises(ValueError, match="are not the 12 that the evidence was computed on"):
        fit.predictive(new, data=(data[0][:6], data[1][:6]))


def test_a_tuned_posterior_predicts_by_its_temperature_and_scale():
    fit, data, _, _, new = case()
    found = posterior.tuned(fit.model, data, fit.laplace, fit.prior, draws=8)
    laplace = of(fit, data, rounds=0, draws=8)
    assert torch.equal(found.draws, laplace.draws)
    assert not found.offset.any()
    found = replace(found, tuning=Tuning(0.6, 0.3)).predictive(new)
    plain = laplace.predictive(new)
    by_hand = Categorical().predict(plain.mean / 0.6, plain.covariance * 0.3 / 0.36, None)["probabilities"]
    assert_close(found.probabilities, by_hand, rtol=1e-12, atol=0)
    assert torch.equal(found.covariance, plain.covariance)


@pytest.mark.parametrize("how", ["rows", "steps"])
def test_what_the_others_say_is_by_the_dense_covariance(how):
    """f_-i and V_-i; by steps the covariance is that of the draws."""
    fit, data, J, D, _ = case()
    linearised = posterior._Linearised(fit.model, data, fit.laplace, fit.prior, 8, 0, how, None, None)
    slope, hessian = posterior.averages(fit.likelihood, linearised.f[None], data[1])
    moved = linearised.H.along(linearised.solved(hessian)[1])[1]
    found = linearised.without(slope, hessian, lambda: moved)
    drawn = torch.einsum("kni,knj->nij", moved, moved) / 8
    covariance = laplace_covariance(fit, J, D, (data[0], data[0])) if how == "rows" else drawn
    expected = cavity(linearised.f, covariance, slope, hessian)
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert (expected[0] - linearised.f).abs().max() > 0.1


def test_regression_is_not_tuned():
    fit, data, *_ = case("gaussian")
    with pytest.raises(ValueError, match="the gaussian likelihood has no classes, so there is nothing to tune"):
        posterior.tuned(fit.model, data, fit.laplace, fit.prior)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draws": 1}, "draws must be at least 2"),
        ({"rounds": -1}, "rounds not negative"),
        ({"how": "lu"}, "how must be 'rows'"),
    ],
)
def test_settings_without_sense_are_refused(options, message):
    fit, data, *_ = case()
    with pytest.raises(ValueError, match=message):
        of(fit, data, **options)


def test_products_with_the_jacobian_are_the_dense_ones():
    fit, data, J, D, _ = case()
    H = GaussNewton(fit.model, data, fit.likelihood, batch_size=5)
    vectors, cotangents = torch.randn(2, len(D)).double(), torch.randn(2, 12, 3).double()
    f, along = H.along(vectors)
    assert_close(f, fit.model(data[0]).detach(), **CLOSE)
    assert_close(along, torch.einsum("ndw,kw->knd", J, vectors), **CLOSE)
    assert_close(H.back(cotangents), torch.einsum("ndw,knd->kw", J, cotangents), **CLOSE)
    H.roots = torch.randn(12, 3, 2).double()
    rows = (H.roots.mT @ J).flatten(0, 1)
    assert_close(H(vectors), vectors @ rows.mT @ rows, **CLOSE)


def test_residuals_are_those_of_the_solution():
    root = torch.randn(8, 8).double()
    matrix, right = root @ root.mT + eye(8), torch.randn(3, 8).double()
    found = solve(lambda v: v @ matrix, right, lambda _: False, 4)
    assert_close(found.residuals, (right - found.x @ matrix).norm(dim=1) / right.norm(dim=1), **CLOSE)
    assert found.residuals.min() > 1e-8


def test_predictions_by_rows_are_those_along_draws(monkeypatch):
    fit, data, _, _, new = case(make=relaxed, shape=(2, 4, 4))
    found = of(fit, data)
    by_rows = found.predictive(new)
    monkeypatch.setattr(posterior, "NUMBERS", 0)
    monkeypatch.setattr(posterior.Posterior, "_by_rows", None)
    along = found.predictive(new)
    for name in ("mean", "covariance"):
        assert_close(getattr(by_rows, name), getattr(along, name), rtol=1e-9, atol=1e-9)


def test_rows_are_taken_where_they_fit_into_memory_or_are_asked_for():
    model, data = mlp(5, 4, 3), draw("categorical", 20)
    at = laplace.at(model, data)
    needs = 8 * 5 * 60**2 + 2 * 8 * 60 * float(at.sizes.sum())
    for memory, route in ((None, "rows"), (1.01 * needs / 2**30, "rows"), (0.99 * needs / 2**30, "steps")):
        assert posterior._route(at, None, memory) == route
    assert posterior._route(at, "rows", 1e-9) == "rows"
