"""Kernel evidence, against the Laplace evidence with the dense Gauss-Newton matrix of all parameters."""

import math

import pytest
import torch
from torch import nn
from torch.func import functional_call, hessian, jacrev, vmap

import autosym
import oracles
from autosym import Prior
from autosym.bayes import likelihoods
from autosym.curvature.owners import sites
from autosym.curvature.passes import alike
from autosym.curvature.tape import Tape
from autosym.evidence import kernel, laplace
from autosym.nn import nets
from models import convnet, draw, mlp, randomised

MODELS = {
    "averaged": lambda: (autosym.symmetrise(mlp(2, 5, 3), {"rotation": 1.0}, samples=4).double(), (2,)),
    "mlp": lambda: (mlp(5, 4, 3), (5,)),
    "convolutions": lambda: (convnet(), (2, 6, 5)),
    "batch normalisation": lambda: (randomised(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), mlp(4, 3))).eval(), (5,)),
    "layer normalisation": lambda: (
        randomised(nn.Sequential(nn.Conv1d(2, 3, 3), nn.LayerNorm(4), nn.Flatten(), mlp(12, 3))),
        (2, 6),
    ),
    "f-fc+conv": lambda: (
        randomised(nets.build("f-fc+conv", (1, 4, 4), 3, width=2, channels=(1, 2), strides=(1, 2), hidden=2)),
        (1, 4, 4),
    ),
}
KINDS = ("categorical", "gaussian")


def problem(name, kind, samples=9):
    torch.manual_seed(0)
    model, shape = MODELS[name]()
    return model, draw(kind, samples, shape)


def full_log_evidence(model, data, kind, precision, sigma=1.0):
    """log lik + log prior + P/2 log 2 pi - 1/2 log det of the whole GGN plus the prior's precisions, dense."""
    x, y = data
    parameters = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    f = model(x).detach()
    jacobians = jacrev(lambda p: functional_call(model, p, (x,)))(parameters)
    jacobian = torch.cat([jacobians[name].reshape(*f.shape, -1) for name in parameters], -1)
    loss = oracles.negative_log_likelihood(kind, sigma)
    ggn = torch.einsum("ncp,ncd,ndq->pq", jacobian, vmap(hessian(loss))(f, y), jacobian)
    delta = torch.cat([torch.full((p.numel(),), precision[name], dtype=f.dtype) for name, p in parameters.items()])
    w = torch.cat([p.flatten() for p in parameters.values()])
    log_likelihood = -vmap(loss)(f, y).sum()
    if kind == "gaussian":
        log_likelihood = log_likelihood - f.numel() * math.log(sigma * math.sqrt(2 * math.pi))
    log_prior = 0.5 * (delta.log().sum() - (delta * w.square()).sum())
    return float(log_likelihood + log_prior - 0.5 * torch.linalg.slogdet(ggn + torch.diag(delta))[1])


def owned_names(model):
    """Name of the parameter by that of its path."""
    names = {id(p): name for name, p in model.named_parameters()}
    return {site.name: names[id(site.parameter)] for site in sites(model)}


@pytest.mark.parametrize("batch_size", [2, 64])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_of_all_samples_and_outputs_it_is_laplace_with_the_full_ggn(name, kind, batch_size):
    model, data = problem(name, kind)
    likelihood = likelihoods.Gaussian(0.7) if kind == "gaussian" else kind
    at = kernel.at(model, data, likelihood, batch_size=batch_size)
    deltas = {path: 0.3 + 0.2 * i for i, path in enumerate(at.names)}
    record = at(Prior(at.names, deltas))
    by_parameter = {parameter: deltas[path] for path, parameter in owned_names(model).items()}
    expected = full_log_evidence(model, data, kind, by_parameter, 0.7)
    assert float(record.log_evidence.detach()) == pytest.approx(expected, rel=1e-9)
    assert record.bound_of is None
    block_wise = autosym.log_evidence(model, data, likelihood, deltas)
    assert block_wise != pytest.approx(expected, rel=1e-4), "cross terms between paths are what it adds"


@pytest.mark.parametrize("options", [{}, {"samples": 4}, {"outputs": "one"}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_effective_parameters_are_the_slope_of_the_log_determinant(kind, options):
    """Also where a part of the rows stands for all."""
    model, data = problem("convolutions", kind)
    at = kernel.at(model, data, kind, **options)
    prior = Prior(at.names, 0.5)
    (slope,) = torch.autograd.grad(at(prior).log_evidence, prior.log_precision)
    expected = 0.5 * (at.effective_parameters(prior) - 0.5 * at.square_norms)
    torch.testing.assert_close(slope, expected.detach(), rtol=1e-9, atol=1e-9)
    before = at(prior).log_evidence.item()
    at.mackay(prior, damping=0.1)
    assert at(prior).log_evidence.item() > before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parts", [2, 3])
def test_parts_of_the_data_give_a_lower_bound(kind, parts):
    model, data = problem("convolutions", kind, 12)
    whole = kernel.at(model, data, kind)
    prior = Prior(whole.names, 0.5)
    for seed in range(10):
        at = kernel.at(model, data, kind, parts=parts, seed=seed)
        record = at(prior)
        assert record.log_evidence.item() < whole(prior).log_evidence.item()
        assert record.bound_of == kernel.FULL


@pytest.mark.parametrize(("samples", "parts"), [(4, 1), (4, 2), (None, 3), (None, 2)])
def test_parts_are_blocks_of_the_whole_kernel(samples, parts):
    """Of exactly as many samples as were asked for, none in two parts; 13 are not divisible."""
    model, data = problem("mlp", "gaussian", 13)
    whole, at = kernel.at(model, data, "gaussian"), kernel.at(model, data, "gaussian", samples=samples, parts=parts)
    each = samples or 13 // parts
    rows = 3 * each  # outputs
    assert at.weight == pytest.approx(13 / (parts * each))
    assert f"from {parts * each} of 13 samples" in at.bound_of
    for all_rows, own in zip(whole.kernels, at.kernels, strict=True):
        assert own.shape == (parts, rows, rows)
        for part, found in enumerate(own):
            inside = slice(part * rows, (part + 1) * rows)
            torch.testing.assert_close(found, all_rows[0, inside, inside])


@pytest.mark.parametrize("kind", KINDS)
def test_one_output_of_each_sample_is_a_lower_bound_in_expectation(kind):
    model, data = problem("mlp", kind)
    whole = kernel.at(model, data, kind)
    prior = Prior(whole.names, 0.5)
    values = torch.tensor(
        [kernel.at(model, data, kind, outputs="one", seed=seed)(prior).log_evidence.item() for seed in range(60)]
    )
    assert values.mean() + 3 * values.std() / math.sqrt(60) < whole(prior).log_evidence.item()
    assert values.std() > 1e-3
    assert "in expectation: an estimate from 9 of 9 samples, one output" in kernel.at(model, data, kind, outputs="one").bound_of


def test_columns_of_one_output_make_up_the_output_hessian():
    f = torch.randn(4, 5, dtype=torch.float64)
    for likelihood in (likelihoods.Categorical(), likelihoods.Gaussian()):
        columns = torch.stack([likelihood.column(f, torch.full((4,), c)) for c in range(5)], 2)
        torch.testing.assert_close(columns @ columns.mT, likelihood.root(f) @ likelihood.root(f).mT, rtol=1e-12, atol=1e-12)


def test_a_random_part_of_the_samples_estimates_the_bound_by_parts():
    model, data = problem("mlp", "categorical", 12)
    prior = Prior(kernel.at(model, data).names, 0.5)
    bounds = [kernel.at(model, data, parts=3, seed=s)(prior).log_evidence.item() for s in range(40)]
    estimates = torch.tensor([kernel.at(model, data, samples=4, seed=s)(prior).log_evidence.item() for s in range(40)])
    assert float(estimates.mean()) == pytest.approx(sum(bounds) / 40, abs=4 * float(estimates.std()) / math.sqrt(40))


@pytest.mark.parametrize("classes", [3, 50])
def test_the_cost_of_one_output_does_not_depend_on_their_number(classes, monkeypatch):
    passes = []
    backward = Tape.backward
    monkeypatch.setattr(Tape, "backward", lambda self, f, cotangent: passes.append(1) or backward(self, f, cotangent))
    model = mlp(5, 4, classes)
    data = draw("categorical", 9, outputs=classes)
    kernel.at(model, data, outputs="one")
    assert len(passes) == 2, "one to verify the model, one for all outputs"
    kernel.at(model, data)
    assert len(passes) == 2 + 1 + classes - 1


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"samples": 10}, "1 parts of 10 samples cannot be taken from 9"),
        ({"samples": 0}, "cannot be taken"),
        ({"parts": 0}, "cannot be taken"),
        ({"parts": 4, "samples": 3}, "cannot be taken"),
        ({"outputs": "some"}, "'all' or 'one'"),
    ],
)
def test_what_cannot_be_chosen_is_refused(options, match):
    model, data = problem("mlp", "categorical")
    with pytest.raises(ValueError, match=match):
        kernel.at(model, data, **options)


def test_a_student_t_prior_and_one_of_another_model_are_refused():
    model, data = problem("mlp", "categorical")
    at = kernel.at(model, data)
    with pytest.raises(ValueError, match="Gaussian priors"):
        at(Prior(at.names, nu=4))
    with pytest.raises(ValueError, match="this prior is over"):
        at(Prior(["other"]))


def test_data_that_are_not_finite_or_not_countable_are_refused():
    model, (x, y) = problem("mlp", "categorical")
    with pytest.raises(ValueError, match="length is known"):
        kernel.at(model, [(x, y)])
    with torch.no_grad():
        model[0].weight[0, 0] = 1e300
    assert isinstance(model[0], nn.Linear)
    model[0].weight.data.mul_(1e300)
    with pytest.raises(ValueError, match="not finite"):
        kernel.at(model, (x, y))


def test_it_knows_its_data_as_the_laplace_evidence_does():
    model, (x, y) = problem("mlp", "categorical")
    own, laplaces = kernel.at(model, (x, y), batch_size=3).fingerprint, laplace.at(model, (x, y)).fingerprint
    assert alike(own, laplaces)
    assert not alike(own, laplace.at(model, (x, y.flip(0))).fingerprint)


def test_the_prior_of_a_fit_is_one_of_its_kernel_evidence():
    """Whatever the order in which the layers of a relaxed model run."""
    model, data = problem("f-fc+conv", "categorical")
    fit = autosym.fit(model, data, epochs=1)
    assert torch.isfinite(kernel.at(model, data)(fit.prior).log_evidence)
