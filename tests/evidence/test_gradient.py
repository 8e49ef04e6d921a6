"""d log evidence / d eta against central differences, at fixed weights and draws, in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from autosym.bayes.likelihoods import Gaussian
from autosym.bayes.priors import Prior
from autosym.evidence import exact, gradient, laplace
from autosym.nn import nets
from autosym.nn.layers import Relaxed, conv
from autosym.nn.symmetrised import symmetrise
from models import convnet, draw, mlp, randomised

WIDTHS = {"rotation": 0.8, "x-translation": 0.2, "y-scale": 0.3}


def dense_net():
    return randomised(nn.Sequential(nn.Flatten(), nn.Linear(60, 6), nn.Tanh(), nn.Linear(6, 3)))


def normalised_net(norm):
    first, *rest = convnet(activation=nn.Tanh)
    return randomised(nn.Sequential(first, norm, *rest)).eval()


MODELS = {
    "dense": dense_net,
    "batch normalisation": lambda: normalised_net(nn.BatchNorm2d(4)),
    "layer normalisation": lambda: normalised_net(nn.LayerNorm((6, 5))),
    "group normalisation": lambda: normalised_net(nn.GroupNorm(2, 4)),
    "conv": lambda: convnet(activation=nn.Tanh),
    "relu": convnet,
    "circular": lambda: convnet("circular", nn.Tanh),
    "f-fc+conv": lambda: randomised(nets.build("f-fc+conv", (2, 6, 5), 3, 2, channels=(1,), strides=(1,), hidden=3)),
}


def problem(name, kind, samples=6, seed=0, copies=3, **more):
    torch.manual_seed(seed)
    model = symmetrise(MODELS[name](), WIDTHS, copies, **more).double()
    model.transformations.redraw(seed)
    data = draw(kind, samples, (2, 6, 5))
    return model, data, Gaussian(0.7) if kind == "gaussian" else kind


def prior_of(at):
    return Prior(at.names, {name: math.exp(0.3 * i - 1) for i, name in enumerate(at.names)})


def central(model, data, likelihood, prior, leaf, step=1e-5, **options):
    slopes = torch.zeros_like(leaf)
    with torch.no_grad():
        for i in range(leaf.numel()):
            values = []
            for sign in (1, -1):
                leaf[i] += sign * step
                values.append(float(laplace.at(model, data, likelihood, **options)(prior).log_evidence))
                leaf[i] -= sign * step
            slopes[i] = (values[0] - values[1]) / (2 * step)
    return slopes


def both(model, data, likelihood, batch_size=4, **options):
    at = laplace.at(model, data, likelihood, **options)
    prior, raw = prior_of(at), model.transformations.raw
    found = gradient.gradient(model, data, prior, at, {"widths": raw}, batch_size=batch_size, **options)["widths"]
    return found, central(model, data, likelihood, prior, raw, **options)


@pytest.mark.parametrize("kind", ["categorical", "gaussian"])
@pytest.mark.parametrize("name", MODELS)
def test_the_gradient_is_that_of_central_differences(name, kind):
    found, expected = both(*problem(name, kind))
    assert expected.abs().min() > 1e-3
    assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{"sampled": True, "seed": 3}, {"subset": 4, "seed": 1}, {"sampled": True, "subset": 3}])
def test_sampled_and_subset_curvature_have_their_own_exact_gradients(options):
    found, expected = both(*problem("conv", "categorical"), **options)
    assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("activation", "seen"), [(nn.ReLU, False), (nn.SiLU, True), (nn.Tanh, True)])
def test_the_derivative_does_not_see_units_turn_on_and_differences_do(activation, seen):
    """Over many samples the log-determinant has a slope of its own by ReLU's jumps."""
    torch.manual_seed(0)
    net = randomised(nn.Sequential(nn.Flatten(), nn.Linear(36, 12), activation(), nn.Linear(12, 3)))
    model = symmetrise(net, {"rotation": 1.0, "x-scale": 0.3}, 5).double()
    data = draw("categorical", 300, (1, 6, 6))
    at = laplace.at(model, data)
    prior, raw = prior_of(at), model.transformations.raw
    before = raw.clone()
    found, near = (way(model, data, prior, at, {"w": raw})["w"] for way in (gradient.gradient, gradient.differences))
    assert torch.equal(raw, before)
    assert_close(near, central(model, data, "categorical", prior, raw, step=gradient.STEP))
    assert torch.allclose(found, near, rtol=0.05, atol=0.05) == seen
    assert gradient.kinked(model, data[0][:1]) is not seen


def test_kinks_are_found_in_functions_too():
    class Functions(nn.Module):
        def __init__(self, kind):
            super().__init__()
            self.linear, self.kind = nn.Linear(4, 4), kind

        def forward(self, x):
            return self.kind(self.linear(x)).sum(1)

    kinks = (F.selu, torch.nn.RReLU().eval(), lambda h: torch.maximum(h, -h), lambda h: h.amax(1, keepdim=True))
    kinks += (
        torch.relu,
        F.leaky_relu,
        F.hardtanh,
        torch.abs,
        lambda h: h.clamp(0),
        lambda h: F.max_pool1d(h[:, None], 2)[:, 0],
    )
    assert all(gradient.kinked(Functions(kind), torch.ones(1, 4)) for kind in kinks)
    assert not any(gradient.kinked(Functions(kind), torch.ones(1, 4)) for kind in (torch.tanh, F.silu, F.gelu, F.softplus))
    assert gradient.kinked(MODELS["f-fc+conv"](), torch.ones(1, 2, 6, 5, dtype=torch.float64))


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("hooked", [False, True])
def test_a_choice_of_a_polyphase_grid_is_a_kink(stride, hooked):
    layer = Relaxed({"conv": conv((1, 8, 8), (2, 8 // stride, 8 // stride))}, {}, stride)
    if hooked:  # it then computes the whole map
        layer["conv"].register_forward_hook(lambda module, inputs, output: None)
    assert gradient.kinked(nn.Sequential(layer, nn.Tanh(), nn.Flatten()), torch.ones(1, 1, 8, 8)) == (stride == 2)


def test_another_seed_has_another_gradient():
    model, data, likelihood = problem("dense", "categorical")
    at = laplace.at(model, data, likelihood, sampled=True, seed=3)
    grads = [
        gradient.gradient(model, data, prior_of(at), at, {"w": model.transformations.raw}, sampled=True, seed=seed)["w"]
        for seed in (3, 4)
    ]
    assert not torch.allclose(*grads, rtol=1e-3)


def test_the_gradient_does_not_depend_on_the_batch_size():
    model, data, likelihood = problem("conv", "categorical", 7)
    at = laplace.at(model, data, likelihood)
    grads = [
        gradient.gradient(model, data, prior_of(at), at, {"w": model.transformations.raw}, batch_size=size, **more)["w"]
        for size, more in ((7, {}), (2, {}), (7, {"memory": 1e-6}))
    ]
    assert_close(grads[1], grads[0], rtol=1e-10, atol=1e-10)
    assert_close(grads[2], grads[0], rtol=1e-10, atol=1e-10)


def test_the_curvature_has_a_part_in_it():
    """The log-likelihood alone, what a point estimate follows, has another slope."""
    model, (x, y), _ = problem("dense", "categorical")
    found, _ = both(model, (x, y), "categorical")
    with gradient.asking([model.transformations.raw]):
        fit = -nn.functional.cross_entropy(model(x), y, reduction="sum")
        (alone,) = torch.autograd.grad(fit, model.transformations.raw)
    assert not torch.allclose(found, alone, rtol=0.1)


def test_weights_in_place_of_inputs():
    found, expected = both(*problem("dense", "categorical", where="weights"))
    assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_student_priors():
    model, data, likelihood = problem("dense", "gaussian")
    at = laplace.at(model, data, likelihood)
    prior = Prior(at.names, 0.5, nu=3.0)
    at = at.with_scales(prior)
    raw = model.transformations.raw
    found = gradient.gradient(model, data, prior, at, {"w": raw})["w"]

    def value():
        curvature = laplace.at(model, data, likelihood).curvature
        total = likelihood.log_likelihood(curvature.statistic, curvature.samples * curvature.outputs)
        for i, (name, (lam_mu, _, _)) in enumerate(curvature.eigenvectors(prior.scales).items()):
            assert name == at.names[i]
            total = total - 0.5 * torch.log(likelihood.scale() * lam_mu + prior.precision()[name]).sum()
        return float(total.detach())

    expected = torch.zeros_like(raw)
    with torch.no_grad():
        for i in range(len(raw)):
            raw[i] += 1e-5
            up = value()
            raw[i] -= 2e-5
            expected[i] = (up - value()) / 2e-5
            raw[i] += 1e-5
    assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_it_is_the_gradient_of_exact_evidence_for_a_linear_model_at_its_mode():
    torch.manual_seed(0)
    x, y = draw("gaussian", 12, (1, 4, 4), 1)
    model = symmetrise(nn.Sequential(nn.Flatten(), nn.Linear(16, 1, bias=False)), {"rotation": 0.7, "x-scale": 0.2}, 5).double()
    raw, noise, delta = model.transformations.raw, 0.6, 1.7

    def features():
        return model.transformations(x).mean(1).flatten(1)

    one = torch.full((16,), delta, dtype=torch.float64)
    mean, _ = exact.posterior(features(), y, one, torch.tensor(noise**2, dtype=torch.float64))
    model.model[1].weight.data.copy_(mean.T)
    at = laplace.at(model, (x, y), Gaussian(noise))
    found = gradient.gradient(model, (x, y), Prior(at.names, delta), at, {"w": raw})["w"]
    with gradient.asking([raw]):
        record = exact.at(features(), y, delta, noise**2)
        (expected,) = torch.autograd.grad(record.log_evidence, raw)
    with torch.no_grad():
        assert_close(at(Prior(at.names, delta)).log_evidence, record.log_evidence.detach(), rtol=1e-8, atol=1e-8)
    assert_close(found, expected, rtol=1e-8, atol=1e-8)


def test_confident_predictions_have_a_finite_gradient():
    model, (x, y), likelihood = problem("dense", "categorical")
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data *= 30
    model = model.float()
    at = laplace.at(model, (x.float(), y), likelihood)
    found = gradient.gradient(model, (x.float(), y), prior_of(at), at, {"w": model.transformations.raw})["w"]
    assert torch.isfinite(found).all()


def test_lengthscales_of_paths_are_refused():
    model = nets.build("s-fc+s-conv", (2, 6, 6), 3, 2, channels=(1,), strides=(1,), hidden=3)
    name, omega = next((name, t) for name, t in model.named_buffers() if name.endswith("omega"))
    data = torch.randn(3, 2, 6, 6), torch.arange(3)
    at = laplace.at(model, data)
    with pytest.raises(ValueError, match="learn_omega"):
        gradient.gradient(model, data, prior_of(at), at, {name: omega})


def test_the_model_is_left_as_it_was():
    model, data, likelihood = problem("conv", "categorical")
    at = laplace.at(model, data, likelihood)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    gradient.gradient(model, data, prior_of(at), at, {"w": model.transformations.raw})
    assert not model.transformations.raw.requires_grad
    assert all(p.requires_grad for name, p in model.named_parameters() if not name.endswith("raw"))
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_what_cannot_be_a_hyperparameter_is_refused():
    model, data, likelihood = problem("dense", "categorical")
    at = laplace.at(model, data, likelihood)
    with pytest.raises(ValueError, match="integrates over"):
        gradient.gradient(model, data, prior_of(at), at, {"w": model.model[1].weight})
    with pytest.raises(ValueError, match="must be a leaf"):
        gradient.gradient(model, data, prior_of(at), at, {"w": model.transformations.widths() * model.model[1].bias[0]})
    with pytest.raises(ValueError, match="not the same"):
        gradient.gradient(model, (data[0][:3], data[1][:3]), prior_of(at), at, {"w": model.transformations.raw})
    model.model[1].bias.data += 1
    with pytest.raises(ValueError, match=r"model.1.bias changed"):
        gradient.gradient(model, data, prior_of(at), at, {"w": model.transformations.raw})


def test_a_hyperparameter_of_ones_own():
    """Any frozen tensor of the forward pass: here the slope of an activation."""

    class Slope(nn.Module):
        def __init__(self):
            super().__init__()
            self.slope = nn.Parameter(torch.tensor([0.7]), requires_grad=False)

        def forward(self, x):
            return torch.tanh(self.slope * x)

    torch.manual_seed(0)
    model = mlp(4, 5, 3)
    model[1] = Slope().double()
    data, raw = draw("categorical", 6, (4,)), model[1].slope
    at = laplace.at(model, data)
    found = gradient.gradient(model, data, prior_of(at), at, {"slope": raw})["slope"]
    assert_close(found, central(model, data, "categorical", prior_of(at), raw), rtol=1e-5, atol=1e-6)
