import copy
import math

import pytest
import torch
from torch import nn

import oracles
from anchors import SPARSE, dense_weights, set_omega
from autosym import Prior, fit
from autosym.bayes.likelihoods import LIKELIHOODS
from autosym.curvature.kronecker import kfac
from autosym.curvature.owners import sites
from autosym.evidence import laplace
from autosym.linear.conv import Conv
from autosym.linear.factored import FactoredIn, FactoredOut
from autosym.linear.sparse import SMOOTH, Basis, SparseConv, SparseIn, grid, spread
from autosym.nn import layers, nets
from models import KINDS, curvature, draw, randomised

DENSE = {
    "conv": lambda u: (Conv(2, 3), u),
    "in": lambda u: (FactoredIn((2, 4, 3), 5), u),
    "out": lambda u: (FactoredOut(3, (5, 2, 4)), u),
}


# ---- the two ends of omega


@pytest.mark.parametrize(("name", "make", "positions", "shape"), SPARSE)
def test_anchors_everywhere_and_a_large_omega_are_the_dense_form(name, make, positions, shape):
    sparse = set_omega(randomised(make(positions)), 10.0)
    dense, _ = DENSE[name](None)
    dense = dense.double()
    dense.weight.data = sparse.weight.detach().clone()
    x = torch.randn(3, *shape, dtype=torch.float64)
    torch.testing.assert_close(sparse(x), dense(x), rtol=1e-12, atol=1e-12)
    assert (set_omega(sparse, 1.0)(x) - dense(x)).abs().max() > 0.1, "any omega would do"


@pytest.mark.parametrize(("name", "make", "positions", "shape"), SPARSE)
@pytest.mark.parametrize("omega", [0.0, 0.7, 1.0, 3.0])
def test_a_sparse_path_is_the_dense_one_with_weights_by_equation_6(omega, name, make, positions, shape):
    """w(t) = sum_j u_j exp(-omega^2 |t - z_j|^2 / 2), written out."""
    sparse = set_omega(randomised(make(positions // 2)), omega)
    z, t = sparse.basis.z, sparse.basis.positions
    for j in range(len(z)):
        for s in range(len(t)):
            expected = math.exp(-(omega**2) * float((z[j] - t[s]).square().sum()) / 2)
            assert float(sparse.basis()[j, s]) == pytest.approx(expected, abs=1e-12)
    dense, _ = DENSE[name](None)
    dense = dense.double()
    dense.weight.data = dense_weights(sparse)
    x = torch.randn(3, *shape, dtype=torch.float64)
    torch.testing.assert_close(sparse(x), dense(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("name", "make", "positions", "shape"), SPARSE)
def test_at_omega_0_weights_are_constant_in_space(name, make, positions, shape):
    def variation(omega):
        path = set_omega(randomised(make(positions // 2)), omega)
        weights = dense_weights(path)
        weights = weights.mT if name == "out" else weights.unflatten(-1, (-1, positions))
        return float(weights.std(-1).max() / weights.abs().mean())

    assert variation(0.0) < 1e-12
    assert variation(1e-3) < 1e-3, "near 0 it is nearly so: a prior on omega has something to pull at"
    assert variation(1.0) > 0.1


@pytest.mark.parametrize("out_shape", [(3, 6, 8), (3, 3, 4)], ids=["full", "half"])
@pytest.mark.parametrize("shift", [(1, 0), (0, 1), (3, 2), (5, 7)], ids=str)
def test_equivariant_s_fc_at_omega_0_and_not_at_1(shift, out_shape):
    layer = randomised(layers.SparseFactored((2, 6, 8), out_shape, 24, out_shape[1] * out_shape[2] // 2))
    x = torch.randn(3, 2, 6, 8, dtype=torch.float64)

    def error(omega):
        y = set_omega(layer, omega)(x).detach()
        moved = y.roll(shift, (-2, -1)) if out_shape[1] == 6 else y  # constant maps: any shift of the output will do
        return float((layer(x.roll(shift, (-2, -1))).detach() - moved).norm() / y.norm())

    assert error(0.0) < 1e-12
    assert error(1.0) > 0.1


def test_equivariant_s_fc_networks_at_omega_0():
    net = randomised(nets.build("s-fc+s-conv", (1, 8, 8), 3, 2, (1, 2, 2), (1, 2, 2), hidden=4, prior="omega"))
    x = torch.randn(5, 1, 8, 8, dtype=torch.float64)

    def error():
        y = net(x).detach()
        return float((net(x.roll((3, 2), (-2, -1))).detach() - y).abs().max() / y.abs().max())

    assert error() > 1e-3
    for name, module in net.named_modules():
        if "s-fc" in name and isinstance(module, Basis):
            set_omega(module, 0.0)
    assert error() < 1e-12


# ---- omega as a parameter


@pytest.mark.parametrize("scalar", ["omega", "shift"])
@pytest.mark.parametrize(("name", "make", "positions", "shape"), SPARSE)
@pytest.mark.parametrize("omega", [0.4, 1.3])
def test_tangents_are_finite_differences(omega, name, make, positions, shape, scalar):
    path = set_omega(randomised(make(positions // 2, True, True)), omega)
    x = torch.randn(2, *shape, dtype=torch.float64)
    parameter, step = path.get_parameter(f"basis.{scalar}"), 1e-5
    tangents = path.definition(f"basis.{scalar}")(x).tangents
    assert tangents.shape == (2, parameter.numel(), *path(x).shape[1:])
    assert tangents.abs().max() > 1e-3
    with torch.no_grad():
        for i in range(parameter.numel()):
            outputs = []
            for sign in (1, -1):
                parameter.view(-1)[i] += sign * step
                outputs.append(path(x))
                parameter.view(-1)[i] -= sign * step
            torch.testing.assert_close(tangents[:, i], (outputs[0] - outputs[1]) / (2 * step), rtol=1e-6, atol=1e-8)
    given = parameter.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda t: torch.func.functional_call(path, {f"basis.{scalar}": t}, (x,)), given)


@pytest.mark.parametrize("likelihood", KINDS)
def test_block_of_moving_anchors_is_exact_at_one_sample(likelihood):
    conv = SparseConv(1, 2, 3, 4, learn_omega=True, learn_z=True)
    model = randomised(nn.Sequential(conv, nn.Tanh(), nn.Flatten(), nn.Linear(2 * 12, 3)))
    x, y = draw(likelihood, 1, (1, 4, 3))
    found = kfac(model, (x, y), LIKELIHOODS[likelihood]())
    for name in ("0.basis.shift", "0.basis.omega"):
        exact = oracles.block_ggn(model, name, x, y, likelihood)
        assert exact.abs().max() > 1e-8
        torch.testing.assert_close(oracles.kron_blocks(found, name)[0], exact, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("likelihood", KINDS)
@pytest.mark.parametrize("name", ["s-fc", "s-conv", "s-fc+s-conv+conv"])
def test_block_of_omega_is_the_exact_one(name, likelihood):
    """With several samples, and shared positions: the block of one number is exact."""
    net = randomised(nets.build(name, (2, 4, 4), 3, 2, channels=(1, 2), strides=(1, 2), hidden=2, prior="omega"))
    for i, parameter in enumerate(p for n, p in net.named_parameters() if n.endswith("omega")):
        parameter.data.fill_(0.5 + 0.2 * i)
    x, y = draw(likelihood, 6, (2, 4, 4))
    found = kfac(net, (x, y), LIKELIHOODS[likelihood]())
    omegas = [site.name for site in sites(net) if site.name.endswith("basis.omega")]
    assert len(omegas) == 2 * (2 * ("s-fc" in name) + ("s-conv" in name))
    for omega in omegas:
        exact = oracles.block_ggn(net, omega, x, y, likelihood)
        assert exact.abs().max() > 1e-10
        torch.testing.assert_close(oracles.kron_blocks(found, omega)[0], exact, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("likelihood", KINDS)
def test_one_sample_is_exact_for_the_factors_of_s_fc(likelihood):
    net = randomised(nets.build("s-fc", (2, 4, 4), 3, 2, channels=(1, 2), strides=(1, 2), hidden=2))
    x, y = draw(likelihood, 1, (2, 4, 4))
    found = kfac(net, (x, y), LIKELIHOODS[likelihood]())
    for path in ("blocks.0.s-fc.u_2", "blocks.0.s-fc.u_1", "blocks.1.s-fc.u_2", "blocks.1.s-fc.u_1"):
        blocks = len(net.get_submodule(path).weight)
        exact = oracles.blocks(oracles.block_ggn(net, f"{path}.weight", x, y, likelihood), blocks)
        torch.testing.assert_close(oracles.kron_blocks(found, path), exact, rtol=1e-9, atol=1e-10)


def test_evidence_with_a_prior_on_omega_is_finite_and_differentiable():
    def taken(prior):
        torch.manual_seed(0)
        net = nets.build("s-fc+s-conv", (1, 4, 4), 3, 2, channels=(1, 2), strides=(1, 2), hidden=2, prior=prior).double()
        return laplace.at(net, draw("categorical", 12, (1, 4, 4)))

    found, plain = taken("omega"), taken("u")
    added = [name for name in found.names if name not in plain.names]
    assert added == [f"blocks.{i}.{path}.basis.omega" for i in (0, 1) for path in ("s-conv.linear", "s-fc.u_2", "s-fc.u_1")]
    prior = Prior(found.names, {name: 0.5 + 0.1 * i for i, name in enumerate(found.names)})
    record = found(prior)
    assert torch.isfinite(record.log_evidence)
    record.log_evidence.backward()
    gamma = found.effective_parameters(prior).detach()
    expected = (gamma - prior.log_precision.detach().exp() * found.square_norms) / 2
    torch.testing.assert_close(prior.log_precision.grad, expected, rtol=1e-9, atol=1e-9)
    which = [found.names.index(name) for name in added]
    assert found.square_norms[which].tolist() == [1.0] * 6, "omega starts at 1"
    assert (gamma[which] > 0).all()
    assert (gamma[which] < 1).all()


@pytest.mark.parametrize("step", ["gradient", "mackay"])
def test_fit_moves_omega_and_its_precision(step):
    torch.manual_seed(1)
    net = nets.build("s-fc+s-conv", (1, 4, 4), 2, 2, channels=(1, 2), strides=(1, 2), hidden=2, prior="omega")
    x = torch.randn(60, 1, 4, 4)
    y = (x[:, 0, 0].sum(1) > 0).long()
    found = fit(net, (x, y), epochs=12, step=step, burn_in=2, batch_size=20)
    omegas = {name: p for name, p in net.named_parameters() if name.endswith("omega")}
    precision = found.prior.precision()
    assert len(omegas) == 6
    for name, omega in omegas.items():
        assert abs(float(omega.detach()) - 1) > 1e-3
        assert math.isfinite(precision[name])
        assert abs(math.log(precision[name])) > 1e-2
    assert math.isfinite(found.evidence.log_evidence)
    shown = [part for path in found.symmetry() for part in path.precision]
    assert len([part for part in shown if part.endswith("omega")]) == 6


def test_fit_with_omega_under_a_student_prior():
    net = nets.build("s-conv", (1, 4, 4), 2, 1, channels=(1,), strides=(1,), hidden=2, prior="omega")
    x = torch.randn(20, 1, 4, 4)
    found = fit(net, (x, (x[:, 0, 0].sum(1) > 0).long()), nu=4.0, epochs=6, burn_in=1, batch_size=10)
    assert found.prior.scales["blocks.0.s-conv.linear.basis.omega"].shape == (1, 1)
    assert math.isfinite(found.evidence.log_evidence)


# ---- the basis


def test_far_from_an_anchor_a_basis_function_is_zero_and_nowhere_subnormal():
    phi = SparseIn((1, 32, 32), 2, 512).basis().detach()
    assert (phi == 0).any()
    assert phi[phi != 0].min() > 1e-30, "products with smaller numbers are many times slower on a CPU"
    assert phi.max() == 1


def test_basis_is_kept_until_something_changes():
    basis = Basis(grid(4, 4), 6)
    first = basis()
    assert basis() is first
    with torch.no_grad():
        basis.omega.fill_(2.0)
    second = basis()
    assert second is not first
    assert not torch.equal(first, second)
    assert basis() is second
    with torch.no_grad():
        basis.z[0] += 0.5
    third = basis()
    assert not torch.equal(third, second)
    basis.omega = torch.tensor(0.5)
    torch.testing.assert_close(basis(), third ** (0.25 / 4))
    basis.load_state_dict({"omega": torch.tensor(2.0), "z": basis.z.clone()})
    torch.testing.assert_close(basis(), third)
    assert basis.double()().dtype == torch.float64


def test_a_learned_basis_is_made_anew():
    """Also while it takes no gradient, as in a curvature pass: a replayed step changes what it is made of unseen."""
    basis = Basis(grid(4, 4), 6, learn_omega=True)
    assert basis().requires_grad
    assert basis() is not basis()
    basis.omega.requires_grad_(False)
    before = basis()
    basis.omega.data.fill_(2.0)
    torch.testing.assert_close(basis(), before**4)
    moving = Basis(grid(4, 4), 6, learn_z=True)
    (moving() * torch.randn(16)).sum().backward()
    assert moving.shift.grad.abs().min() > 0
    before = moving()
    with torch.no_grad():
        moving.shift += 0.1
    assert not torch.equal(moving(), before)


def test_the_curvature_of_omega_that_changed_unseen():
    """Without a version, as by the replay of a graph: a second pass is that of a model that never had a first."""
    layer = layers.s_conv((2, 4, 6), (3, 4, 6), 4, learn_omega=True)
    model = randomised(nn.Sequential(layer, nn.Tanh(), layers.fc((3, 4, 6), (3,))))
    data = draw("categorical", 6, (2, 4, 6))
    first = curvature(model, data).factors["0.linear"].A
    layer.linear.basis.omega.data.fill_(3.0)
    fresh = copy.deepcopy(model)
    fresh[0].linear.basis._kept = None
    second = curvature(model, data).factors["0.linear"].A
    torch.testing.assert_close(second, curvature(fresh, data).factors["0.linear"].A)
    assert (second - first).norm() > 0.1 * first.norm()


def test_basis_kept_in_inference_mode_serves_training():
    net = nets.build("s-fc+s-conv", (1, 4, 4), 2, 2, channels=(1,), strides=(1,), hidden=2).double()
    x = torch.randn(2, 1, 4, 4, dtype=torch.float64)
    with torch.inference_mode():
        net(x)
    net(x).sum().backward()


@pytest.mark.parametrize("anchors", [3, 8, 16])
@pytest.mark.parametrize("omega", [0.5, 1.0])
def test_fit_of_anchors_reproduces_what_is_in_their_span(anchors, omega):
    basis = set_omega(Basis(grid(4, 4), anchors).double(), omega)
    u = torch.randn(3, 2, anchors, dtype=torch.float64)
    torch.testing.assert_close(basis.fit(u @ basis()) @ basis(), u @ basis(), rtol=1e-7, atol=1e-7)


def test_fit_of_anchors_is_the_least_squares_optimum():
    """The residual is orthogonal to the basis, and any other u is farther from the target; one fit for all of them."""
    basis = Basis(grid(4, 4), 7).double()
    target = torch.randn(3, 2, 16, dtype=torch.float64)
    u = basis.fit(target)
    assert u.shape == (3, 2, 7)
    residual = target - u @ basis()
    assert residual.norm() > 0.1
    torch.testing.assert_close(residual @ basis().T, torch.zeros(3, 2, 7, dtype=torch.float64), rtol=0, atol=1e-10)
    for _ in range(5):
        other = u + 0.1 * torch.randn_like(u)
        assert ((target - other @ basis()).flatten(2).norm(dim=-1) > residual.norm(dim=-1)).all()
    torch.testing.assert_close(u[1, 1], torch.linalg.lstsq(basis().T, target[1, 1]).solution, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("name", "make", "positions", "shape"), SPARSE)
def test_initial_weights_are_the_smooth_part_of_the_dense_paths(name, make, positions, shape):
    """Projected on the directions that the basis does not shrink away, of which each has the variance of the dense weights."""
    deviation = {"conv": math.sqrt(2 / 18), "in": math.sqrt(1 / 12), "out": math.sqrt(1 / 3)}[name]
    paths = [make(positions) for _ in range(20)]
    singular = torch.linalg.svdvals(paths[0].basis().double())
    kept = int((singular > SMOOTH * singular[0]).sum())
    assert kept < positions, "a basis that shrinks nothing tests nothing"
    weights = torch.cat([dense_weights(path).flatten() for path in paths])
    assert float(weights.std()) == pytest.approx(deviation * math.sqrt(kept / positions), rel=0.1)
    anchors = torch.cat([path.weight.flatten() for path in paths])
    assert float(anchors.detach().square().mean().sqrt()) <= 1.1 * deviation / (SMOOTH * float(singular[0]))


@pytest.mark.parametrize(("name", "make", "positions", "shape"), SPARSE)
def test_steps_of_its_size_move_the_weights_of_a_sparse_path_by_their_own(name, make, positions, shape):
    torch.manual_seed(0)
    path = make(positions - 2)
    before, size = dense_weights(path).clone(), path.size()
    changes = []
    for _ in range(200):
        with torch.no_grad():
            step = size * (2 * torch.randint(2, path.weight.shape) - 1)
            path.weight.add_(step)
            changes.append((dense_weights(path) - before).square().mean())
            path.weight.sub_(step)
    assert float(torch.stack(changes).mean().sqrt()) == pytest.approx(float(before.square().mean().sqrt()), rel=0.1)
    assert size < 0.7 * float(path.weight.detach().square().mean().sqrt()), "anchor values are larger than what they make"


@pytest.mark.parametrize("anchors", [0, -1, 10])
def test_number_of_anchors_is_checked(anchors):
    with pytest.raises(ValueError, match=f"anchors must lie between 1 and the 9 positions, got {anchors}"):
        SparseConv(1, 1, 3, anchors)


@pytest.mark.parametrize("count", [1, 4, 7, 20])
def test_anchors_are_different_positions_far_apart(count):
    positions = grid(4, 5)
    chosen = spread(positions, count)
    assert len({tuple(z.tolist()) for z in chosen}) == count
    assert {tuple(z.tolist()) for z in chosen} <= {tuple(t.tolist()) for t in positions}
    if count == 4:
        assert torch.cdist(chosen, chosen).add(10 * torch.eye(4)).min() > 1.9, "neighbours were chosen"
    assert chosen[0].abs().max() <= 0.5 or count == 20, "the first is the most central"
