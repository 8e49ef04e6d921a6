"""The variational bound of a last layer against exact evidence, torch's own divergence, and what it learns."""

import copy
import math
import warnings

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from autosym.bayes.likelihoods import Categorical, Gaussian
from autosym.evidence import exact
from autosym.nn.symmetrised import ranges, symmetrise
from autosym.papers import bound as bounds
from autosym.papers import last_layer
from autosym.papers.last_layer import LastLayer, RandomFeatures, ReluFeatures
from models import regression


def head_at(mean, root, precision):
    head = LastLayer(mean.shape[1], mean.shape[0], precision).double()
    head.log_precision.data.fill_(math.log(precision))
    head.mean.data.copy_(mean)
    head.lower.data.copy_(root)
    head.log_diagonal.data.copy_(root.diagonal(dim1=-2, dim2=-1).log())
    return head


def right(phi, y, precision, variance):
    """The exact posterior as q."""
    delta = torch.full((phi.shape[1],), precision, dtype=torch.float64)
    mean, root = exact.posterior(phi, y, delta, torch.tensor(variance, dtype=torch.float64))
    covariance = torch.cholesky_inverse(root)
    return head_at(mean.T, torch.linalg.cholesky(covariance).expand(y.shape[1], -1, -1), precision)


def test_the_bound_is_exact_evidence_at_the_right_posterior():
    phi, y = regression(15, 4, 2, 0.3)
    head = right(phi, y, 1.7, 0.09)
    record = last_layer.at(nn.Identity(), head, (phi, y), Gaussian(0.3))
    expected = exact.at(phi, y, 1.7, 0.09).log_evidence
    assert float(record.log_evidence) == pytest.approx(float(expected), rel=1e-10)
    assert record.bound_of == "the log evidence"
    assert float(record.occam) == pytest.approx(-float(head.kl().detach()), rel=1e-10)


@pytest.mark.parametrize("seed", range(10))
def test_the_bound_is_never_above_exact_evidence(seed):
    phi, y = regression(15, 4, 2, 0.3)
    torch.manual_seed(seed)
    for head in (right(phi, y, 1.7, 0.09), LastLayer(4, 2, 1.7).double()):
        head.log_precision.data.fill_(math.log(1.7))
        for parameter in (head.mean, head.lower, head.log_diagonal):
            parameter.data += 0.3 * torch.randn_like(parameter)
        bound = last_layer.at(nn.Identity(), head, (phi, y), Gaussian(0.3)).log_evidence
        assert float(bound) < float(exact.at(phi, y, 1.7, 0.09).log_evidence) - 1e-3


def test_the_divergence_is_that_of_torch():
    torch.manual_seed(0)
    head = LastLayer(5, 3, 0.6).double()
    for parameter in head.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    q = torch.distributions.MultivariateNormal(head.mean, scale_tril=head.root())
    p = torch.distributions.MultivariateNormal(torch.zeros(5).double(), torch.eye(5).double() / head.log_precision.exp())
    assert_close(head.kl(), torch.distributions.kl_divergence(q, p).sum(), rtol=1e-10, atol=1e-10)


def test_noise_in_outputs_is_noise_in_weights():
    torch.manual_seed(0)
    head = LastLayer(4, 3).double()
    for parameter in head.parameters():
        parameter.data += 0.4 * torch.randn_like(parameter)
    phi, y = torch.randn(6, 4).double(), torch.arange(6) % 3
    terms = [
        last_layer.expected_log_likelihood(head, phi, y, Categorical(), torch.randn(6, 3).double()).detach()
        for _ in range(4000)
    ]
    weights = head.mean + torch.einsum("cij,ncj->nci", head.root(), torch.randn(4000, 3, 4).double())
    logits = torch.einsum("bi,nci->nbc", phi, weights).log_softmax(-1)
    by_weights = logits[:, torch.arange(6), y].sum(1)
    error = math.sqrt(float((torch.stack(terms).var() + by_weights.var()).detach()) / 4000)
    assert abs(float(torch.stack(terms).mean() - by_weights.mean().detach())) < 4 * error


def test_a_likelihood_without_a_closed_form_needs_noise():
    with pytest.raises(ValueError, match="pass noise"):
        last_layer.expected_log_likelihood(LastLayer(2, 2), torch.ones(1, 2), torch.zeros(1).long(), Categorical())


def test_random_features_have_unit_norm_and_relu_features_train():
    x = torch.randn(50, 1, 4, 4)
    assert float(RandomFeatures(16, 2000)(x).square().sum(1).mean()) == pytest.approx(1, abs=0.05)
    assert not list(RandomFeatures(16, 8).parameters())
    assert len(list(ReluFeatures(16, 8).parameters())) == 2


def rings(count=160):
    """Two classes by the distance from the centre: invariant to rotation. Half of the plane is seen."""
    torch.manual_seed(0)
    radius, angle = torch.tensor([0.5, 1.2]).repeat(count // 2), (2 * torch.rand(count) - 1) * math.pi
    x = torch.stack([radius * angle.cos(), radius * angle.sin()], 1) + 0.05 * torch.randn(count, 2)
    return x, (radius > 0.8).long()


@pytest.mark.parametrize("kind", ["rff", "relu"])
def test_the_bound_learns_rotation_where_data_are_invariant(kind):
    torch.manual_seed(0)
    inner = RandomFeatures(2, 64, 5.0) if kind == "rff" else ReluFeatures(2, 64)
    features = symmetrise(inner, {"rotation": 0.3}, 8, where="weights")
    fitted = last_layer.learn(features, rings(), 2, epochs=60 if kind == "rff" else 240, batch_size=80, lr=0.02, range_lr=0.05)
    assert fitted.history[-1]["bound"] > fitted.history[0]["bound"]
    assert fitted.history[-1]["ranges"]["rotation (degrees)"] == pytest.approx(ranges(features)["rotation"].value, rel=1e-5)
    assert ranges(features)["rotation"].value > 60
    x, y = rings()
    assert float((fitted(x).argmax(1) == y).double().mean()) > 0.95
    assert not features.transformations.raw.requires_grad


def test_widths_are_learned_before_a_hidden_layer_moves():
    """It is a point estimate, free of charge: once it fits the data alone, the bound no longer asks for invariance."""
    early = {}
    for point_estimate in (False, True):
        torch.manual_seed(0)
        features = symmetrise(ReluFeatures(2, 64), {"rotation": 0.3}, 8, where="weights")
        start, moved = features.model.linear.weight.detach().clone(), []
        fitted = last_layer.learn(
            features,
            rings(),
            2,
            epochs=60,
            batch_size=80,
            lr=0.02,
            range_lr=0.3,
            point_estimate=point_estimate,
            log=lambda _, layer=features.model.linear, start=start, moved=moved: moved.append(
                (layer.weight.detach() - start).norm()
            ),
        )
        early[point_estimate] = float(moved[20] / moved[-1])
        if not point_estimate:
            angles = [line["ranges"]["rotation (degrees)"] for line in fitted.history]
            assert angles[1] == pytest.approx(math.degrees(0.3), rel=1e-5)  # q comes first
            assert angles[20] > 90
    assert early[False] < 0.05
    assert early[True] > 0.2


@pytest.mark.parametrize(("kind", "moves"), [("relu", 12), ("rff", 16)])
def test_beside_weights_widths_take_no_step_before_q_has_settled(kind, moves, monkeypatch):
    """Not even one of rate 0: Adam would remember its slope."""
    calls, real = [], last_layer._Steps.move_widths
    monkeypatch.setattr(last_layer._Steps, "move_widths", lambda self: calls.append(1) or real(self))
    inner = RandomFeatures(2, 16, 5.0) if kind == "rff" else ReluFeatures(2, 16)
    features = symmetrise(inner, {"rotation": 0.3}, 4, where="weights")
    last_layer.learn(features, rings(), 2, epochs=8, batch_size=4, lr=0.01)
    assert len(calls) == moves  # two in an epoch


def test_q_follows_as_long_as_weights_move(monkeypatch):
    """Each at its part of its largest rate: a q that has come to rest before them is that of other features."""
    rates, real = [], last_layer._Steps.set_rates
    monkeypatch.setattr(
        last_layer._Steps,
        "set_rates",
        lambda self, lr, wide, rate, least: rates.append((lr / 0.01, 20 * rate)) or real(self, lr, wide, rate, least),
    )
    (x, y) = rings()
    last_layer.learn(ReluFeatures(2, 16), (x, y), 2, epochs=20, batch_size=len(x) // 20, lr=0.01)
    assert all(of_q >= 0.99 * of_weights for of_weights, of_q in rates)
    assert max(of_weights for of_weights, _ in rates) > 0.99


def test_a_point_estimate_does_not():
    torch.manual_seed(0)
    features = symmetrise(RandomFeatures(2, 64, 5.0), {"rotation": 0.3}, 8, where="weights")
    by_bound = copy.deepcopy(features)
    last_layer.learn(features, rings(), 2, epochs=60, batch_size=80, lr=0.02, range_lr=0.05, point_estimate=True)
    last_layer.learn(by_bound, rings(), 2, epochs=60, batch_size=80, lr=0.02, range_lr=0.05)
    assert ranges(features)["rotation"].value < ranges(by_bound)["rotation"].value - 20


def test_gaussian_noise_is_learned_and_the_given_likelihood_is_left_alone():
    torch.manual_seed(0)
    x = torch.randn(200, 3)
    y = x @ torch.randn(3, 1) + 0.2 * torch.randn(200, 1)
    given = Gaussian(1.0)
    fitted = last_layer.learn(nn.Identity(), (x, y), 1, given, epochs=50, batch_size=50)
    assert math.exp(float(fitted.likelihood.log_variance.detach()) / 2) == pytest.approx(0.2, rel=0.25)
    assert float(given.log_variance.detach()) == 0
    precision = math.exp(float(fitted.head.log_precision.detach()))
    variance = math.exp(float(fitted.likelihood.log_variance.detach()))
    best = float(exact.at(x.double(), y.double(), precision, variance).log_evidence)
    assert best - 1 < float(fitted.evidence.log_evidence) <= best + 1e-4  # of float32


def test_features_that_are_no_rows_are_refused():
    with pytest.raises(ValueError, match="one row for each sample"):
        last_layer.learn(nn.Identity(), (torch.randn(4, 2, 2), torch.arange(4) % 2), 2)


def test_adam_is_that_of_torch():
    torch.manual_seed(0)
    ours, theirs = ([torch.ones(3, dtype=torch.float64, requires_grad=True)] for _ in range(2))
    adam, reference = last_layer.Adam(ours), torch.optim.Adam(theirs, 0.1)
    for step in range(5):
        theirs[0].grad = torch.randn(3, dtype=torch.float64)
        adam.rate.fill_(0.1 / (step + 1))
        reference.param_groups[0]["lr"] = 0.1 / (step + 1)
        adam.step([theirs[0].grad])
        reference.step()
    assert_close(ours[0], theirs[0], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("error", [0.01, 0.5])
def test_the_curvature_is_in_units_of_the_noise_that_was_learned(error):
    """Sigma is that of the new variance at the next factorisation already, before any curvature is gathered at it."""
    phi, y = regression(15, 4, 2, 0.3)
    head, likelihood = LastLayer(4, 2, 1.7).double(), Gaussian(0.3)
    natural = last_layer.Natural(head, likelihood, len(phi))
    natural.memory.fill_(1)
    natural.gather((phi.T @ phi / 0.09).expand(2, -1, -1), torch.tensor(error * y.numel()))
    natural.refresh()
    variance = float(likelihood.log_variance.detach().exp())
    assert abs(math.log(variance / 0.09)) == pytest.approx(bounds.TRUST), "it moved, towards the error"
    assert (variance > 0.09) == (error > 0.09)
    assert_close(natural.data, (phi.T @ phi / variance).expand(2, -1, -1))


def test_natural_steps_come_to_the_exact_posterior():
    """Of a linear model with Gaussian noise: one full step of H, and of means, is all it takes."""
    phi, y = regression(15, 4, 2, 0.3)
    head, likelihood = LastLayer(4, 2, 1.7).double(), Gaussian(0.3)
    natural = last_layer.Natural(head, likelihood, len(phi))
    natural.memory.fill_(1)
    natural.rate.fill_(1)
    natural.gather((phi.T @ phi / 0.09).expand(2, -1, -1), torch.tensor(0.09 * y.numel()))  # the noise is what it should be
    natural.refresh()
    head.log_precision.data.fill_(math.log(1.7))
    natural.move(y.T @ phi / 0.09, (phi.T @ phi / 0.09).expand(2, -1, -1))
    expected = right(phi, y, 1.7, 0.09)
    assert_close(head.mean, expected.mean, rtol=1e-6, atol=1e-8)
    assert_close(head.root(), expected.root(), rtol=1e-6, atol=1e-8)
    bound = last_layer.at(nn.Identity(), head, (phi, y), likelihood).log_evidence
    assert float(bound) == pytest.approx(float(exact.at(phi, y, 1.7, 0.09).log_evidence), rel=1e-8)


def test_the_curvature_of_the_data_follows_the_noise():
    """H is in units of it: the noise that doubles its variance, by TRUST a time, shrinks H with it."""
    head, likelihood = LastLayer(4, 2, 1.7).double(), Gaussian(0.3)
    natural = last_layer.Natural(head, likelihood, 10)
    natural.memory.fill_(1)
    natural.gather(torch.ones(2, 4, 4).double(), torch.tensor(2 * 0.09 * 20))
    natural.refresh()
    assert float(likelihood.log_variance.detach()) == pytest.approx(math.log(0.09) + bounds.TRUST)
    assert_close(natural.data, torch.full((2, 4, 4), math.exp(-bounds.TRUST)).double())


@pytest.mark.parametrize("bounded", [True, False])
def test_a_step_by_an_old_curvature_goes_no_further_than_the_present_one_allows(bounded):
    """H knows nothing yet of where features vary: its whole step would end below the start."""
    phi, y = regression(15, 4, 2, 0.3)
    head, likelihood = LastLayer(4, 2, 1e-3).double(), Gaussian(0.3)
    natural = last_layer.Natural(head, likelihood, len(phi))
    natural.rate.fill_(1)
    natural.refresh()
    head.log_precision.data.fill_(math.log(1e-3))
    before = likelihood.statistic(head(phi), y)
    natural.move(y.T @ phi / 0.09, (phi.T @ phi / 0.09).expand(2, -1, -1) * bounded)
    assert (likelihood.statistic(head(phi), y) < before) == bounded


@pytest.mark.parametrize("searched", [True, False])
def test_a_step_from_where_samples_are_certain_is_no_longer_than_it_gains_by(searched):
    """There the curvature is next to nothing, and a whole Newton step from one wrong sample is far too long."""
    phi = torch.tensor([[1.0, 0.0], [1.0, 0.1]], dtype=torch.float64)
    y, likelihood = torch.tensor([0, 1]), Categorical()
    head = LastLayer(2, 2, 1e-6).double()
    head.mean.data.copy_(
        torch.tensor([[3.0, 0.0], [-3.0, 0.0]])
    )  # the first is right and the second wrong, and both are certain
    natural = last_layer.Natural(head, likelihood, 2)
    natural.rate.fill_(1)
    natural.memory.fill_(1)

    def fit(mean):
        return likelihood.statistic(phi @ mean.T, y)

    outputs = (phi @ head.mean.T).detach().requires_grad_()
    (slope,) = torch.autograd.grad(likelihood.statistic(outputs, y), outputs)
    curvature = torch.einsum("bd,bm,bn->dmn", likelihood.diagonal(outputs).detach(), phi, phi)
    natural.gather(curvature, torch.tensor(0.0))
    natural.refresh()
    before = float(fit(head.mean.detach()))
    natural.move(slope.T @ phi, curvature, fit if searched else None)
    assert (float(fit(head.mean.detach())) > before) == searched


def test_the_end_of_a_run_is_an_optimum_of_q():
    """No direction from there leads up, of means and of the root: the slope of the bound is small beside what it was at the start."""
    torch.manual_seed(0)
    features = RandomFeatures(2, 16, 3.0)
    fitted = last_layer.learn(features, rings(), 2, epochs=20, batch_size=80)
    x, y = rings()
    noise = torch.randn(1000, len(x), 2, generator=torch.Generator().manual_seed(1))
    slopes = []
    for head in (LastLayer(16, 2), fitted.head):
        bound = last_layer.expected_log_likelihood(head, features(x), y, Categorical(), noise) - head.kl()
        grads = torch.autograd.grad(bound, [head.mean, head.log_diagonal, head.log_precision])
        scale = [head.root().diagonal(dim1=1, dim2=2), 1.0, 1.0]  # in units of standard deviations
        slopes.append(math.sqrt(sum((g * s).square().sum().item() for g, s in zip(grads, scale, strict=True))))
    assert slopes[1] < 0.1 * slopes[0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("point_estimate", [False, True])
def test_a_recorded_run_is_that_without_graphs(point_estimate):
    """Every step has draws, noise and rates of its own, though it is replayed."""
    x, y = torch.rand(200, 1, 8, 8).cuda(), (torch.arange(200) % 3).cuda()
    runs = []
    for capture in (True, False):
        torch.manual_seed(0)
        features = symmetrise(ReluFeatures(64, 32), "rotation", 6, where="weights").cuda()
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*CUDA graph.*")
            fitted = last_layer.learn(
                features, (x, y), 3, epochs=8, batch_size=50, range_lr=0.2, capture=capture, point_estimate=point_estimate
            )
        runs.append([line["bound"] for line in fitted.history] + [ranges(features)["rotation"].value])
    assert runs[0] == pytest.approx(runs[1], rel=1e-3)
    assert len(set(runs[0])) >= 8, "it moves (in the first epoch, of a point estimate, by less than float32 shows)"


@pytest.mark.parametrize("batch", [16, 160])
def test_a_loader_of_other_batches_learns_as_well(batch):
    """Rates follow the batches that come, not those that were asked for."""
    x, y = rings()
    features = RandomFeatures(2, 16, 3.0)
    loader = DataLoader(TensorDataset(x, y), batch, shuffle=True, generator=torch.Generator().manual_seed(0))
    own, theirs = (last_layer.learn(features, data, 2, epochs=30).evidence.log_evidence for data in ((x, y), loader))
    assert float(theirs) == pytest.approx(float(own), rel=0.15)


@pytest.mark.parametrize(
    ("features", "data", "said"),
    [
        (nn.Identity(), lambda x, y: DataLoader(TensorDataset(x, y), 7, drop_last=True), "drop_last"),
        (nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5)), lambda x, y: (x, y), "eval"),
        (nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), lambda x, y: (x, y), "eval"),
        (nn.Identity(), lambda x, y: iter([(x, y)]), "only once"),
    ],
    ids=["drop_last", "dropout", "batch normalisation", "iterator"],
)
def test_what_would_go_wrong_silently_is_refused(features, data, said):
    with pytest.raises(ValueError, match=said):
        last_layer.learn(features, data(*rings()), 2, epochs=1)


def test_features_in_double_precision_have_a_head_of_their_own_kind():
    x, y = rings()
    fitted = last_layer.learn(nn.Linear(2, 5).double(), (x.double(), y), 2, epochs=1)
    assert fitted.head.mean.dtype == torch.float64


def test_a_point_estimate_has_no_evidence():
    assert last_layer.learn(nn.Identity(), rings(), 2, epochs=1, point_estimate=True).evidence is None


def test_the_last_passes_see_the_features_that_they_keep(monkeypatch):
    """Kept or computed anew for every pass, they lead to the same bound; kept, they are computed once."""
    x, y = torch.randn(40, 3), torch.arange(40) % 2
    bounds = []
    for kept, passes in ((last_layer.KEPT, 1), (0, last_layer.POLISH)):
        monkeypatch.setattr(last_layer, "KEPT", kept)
        torch.manual_seed(0)
        phi, calls = ReluFeatures(3, 6), []
        phi.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        fitted = last_layer.learn(phi, (x, y), 2, epochs=1, batch_size=20, log=lambda _, calls=calls: calls.clear())
        bounds.append(fitted.evidence.log_evidence.item())
        assert len(calls) == passes + 1, "one more is for the bound"
    assert bounds[0] == bounds[1]
