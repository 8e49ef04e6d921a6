"""Models averaged over transformations: the transformations, their two forms, invariance, curvature, and bad input."""

import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import autosym
import oracles
from autosym.bayes.priors import Prior
from autosym.evidence import laplace
from autosym.nn.symmetrised import GENERATORS, Augmentation, Transformations, ranges, symmetrise
from autosym.training.ranges import Ranges
from models import EXACT, curvature, draw, exact_blocks, mlp, owned, randomised

ALL = {"translation": 0.3, "rotation": 1.2, "scale": 0.4, "shear": 0.2}
FULL = torch.ones(1, 1, dtype=torch.float64)


def images(count=2, channels=1, height=6, width=6):
    return torch.randn(count, channels, height, width, dtype=torch.float64)


def at_end(width, **keys):
    """One generator, at the end of its range."""
    return Transformations(width, 1, **keys), FULL


# ---- the transformations


def test_transformations_are_exponentials_of_generators():
    T = Transformations({**ALL, "rotation": 3.0}, 40)
    T.redraw(0)
    total = torch.zeros(40, 3, 3, dtype=torch.float64)
    for eps, eta, name in zip(T.draws.T, T.widths(), T.names, strict=True):
        for (row, column), value in GENERATORS[name].items():
            total[:, row, column] += eps * eta * value
    assert_close(T.matrices(), torch.linalg.matrix_exp(total), **EXACT)


@pytest.mark.parametrize(
    ("name", "width", "expected"),
    [
        ("rotation", math.pi / 2, [[0, -1, 0], [1, 0, 0]]),
        ("x-translation", 0.5, [[1, 0, 0.5], [0, 1, 0]]),
        ("y-translation", 0.5, [[1, 0, 0], [0, 1, 0.5]]),
        ("x-scale", math.log(2), [[2, 0, 0], [0, 1, 0]]),
        ("y-scale", math.log(2), [[1, 0, 0], [0, 2, 0]]),
        ("shear", 0.5, [[math.cosh(0.5), math.sinh(0.5), 0], [math.sinh(0.5), math.cosh(0.5), 0]]),
    ],
)
def test_each_generator_moves_coordinates_and_images_alike(name, width, expected):
    T, end = at_end({name: width})
    matrix = torch.tensor(expected, dtype=torch.float64)
    x = torch.randn(5, 2, dtype=torch.float64)
    assert_close(T(x, end)[:, 0], x @ matrix[:, :2].T + matrix[:, 2], rtol=1e-6, atol=1e-6)
    # A bright pixel of an 81 x 81 image, at a point (x, y) in halves of the side, is brightest where the matrix takes it.
    start = torch.tensor([10.0, -20.0], dtype=torch.float64)
    image = torch.zeros(1, 1, 81, 81, dtype=torch.float64)
    image[0, 0, 40 + int(start[1]), 40 + int(start[0])] = 1
    goal = matrix[:, :2] @ start + 40.5 * matrix[:, 2]
    moved = T(image, end)[0, 0, 0]
    row, column = divmod(int(moved.argmax()), 81)
    assert abs(column - 40 - float(goal[0])) <= 1
    assert abs(row - 40 - float(goal[1])) <= 1


def test_a_quarter_turn_moves_pixels_and_interpolates_none():
    T, end = at_end({"rotation": math.pi / 2})
    x = images(2, 3)
    assert_close(T(x, end)[:, 0], x.rot90(-1, (2, 3)), rtol=1e-6, atol=1e-6)


def test_images_that_are_no_squares_are_turned_without_distortion():
    T, end = at_end({"rotation": math.pi / 2})
    x = torch.zeros(1, 1, 5, 9, dtype=torch.float64)
    x[0, 0, 2, 5:7] = torch.tensor([1.0, 2.0])  # one and two to the right of the centre: to be one and two below it
    moved = T(x, end)[0, 0, 0]
    assert_close(moved[3:, 4], torch.tensor([1.0, 2.0], dtype=torch.float64), rtol=1e-6, atol=1e-6)
    assert float(moved.sum()) == pytest.approx(3, abs=1e-6)


def test_outside_of_the_frame_is_zero_or_the_border():
    x = torch.ones(1, 1, 4, 4, dtype=torch.float64)
    for padding, least in (("zeros", 0.0), ("border", 1.0)):
        T, end = at_end({"x-translation": 1.0}, padding=padding)
        assert float(T(x, end).min()) == least


def test_draws_cover_the_cube_evenly_and_repeat_by_seed():
    T = Transformations(ALL, 64)
    means = []
    for seed in range(50):
        T.redraw(seed)
        assert T.draws.shape == (64, 6)
        assert T.draws.abs().max() <= 1
        means.append(T.draws.mean(0))
    assert torch.stack(means).abs().max() < 0.1  # of independent ones some would be near 0.2
    first = T.draws.clone()
    T.redraw(7)
    assert not torch.equal(T.draws, first)
    T.redraw(49)
    assert torch.equal(T.draws, first)
    T.settle()
    still = T.draws.clone()
    T.redraw(1)
    T.settle()
    assert torch.equal(T.draws, still)


def test_draws_of_one_generator_are_an_even_grid_and_a_grid_is_a_product():
    T = Transformations("rotation", 4)
    assert_close(T.draws[:, 0], torch.tensor([-0.75, -0.25, 0.25, 0.75], dtype=torch.float64))
    T = Transformations("translation", 4)
    T.grid(3)
    assert T.draws.shape == (9, 2)
    assert sorted(set(T.draws.flatten().tolist())) == pytest.approx([-2 / 3, 0, 2 / 3])


def test_draws_are_uniform_each():
    T = Transformations("scale", 5)
    seen = []
    for seed in range(400):
        T.redraw(seed)
        seen.append(T.draws[3].clone())
    seen = torch.stack(seen)
    for edge in (-0.5, 0.0, 0.5):
        assert ((seen < edge).double().mean(0) - (edge + 1) / 2).abs().max() < 0.08


# ---- the model


def test_no_width_gives_back_the_model_exactly_and_bypasses_the_resampler(monkeypatch):
    net = mlp(36, 5, 3)
    model = symmetrise(nn.Sequential(nn.Flatten(), net), {"rotation": 0.0, "scale": 0.0})
    monkeypatch.setattr("autosym.nn.symmetrised.warped", lambda *_: pytest.fail("the resampler was used"))
    x = images(4)
    assert torch.equal(model(x), net(x.flatten(1)))
    assert model.copies == 1
    data = x, torch.arange(4) % 3
    assert laplace.at(model, data)(Prior(laplace.at(model, data).names)).samples == 4
    assert model.ranges() == {}


@pytest.mark.parametrize("where", ["input", "weights"])
def test_the_average_is_that_of_the_copies(where):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), mlp(36, 5, 3))
    model = symmetrise(net, ALL, 7, where)
    x = images(4)
    moved = model.transformations(x) if where == "input" else model.transformations.adjoint(x)
    assert_close(model(x), torch.stack([net(moved[:, s]) for s in range(7)]).mean(0), **EXACT)


def test_a_sample_does_not_depend_on_its_batchmates():
    model = symmetrise(nn.Sequential(nn.Flatten(), mlp(36, 5, 3)), ALL, 5).double()
    x = images(6)
    assert_close(model(x)[2:3], model(x[2:3]), **EXACT)


@pytest.mark.parametrize("shape", [(1, 6, 5), (2, 4, 4)])
def test_weights_are_resampled_by_the_adjoint_of_resampling(shape):
    torch.manual_seed(0)
    T = Transformations(ALL, 9)
    x, w = (torch.randn(count, *shape, dtype=torch.float64) for count in (3, 4))
    resampled = torch.einsum("osp,bp->bso", T(w).flatten(2), x.flatten(1))
    seen = torch.einsum("op,bsp->bso", w.flatten(1), T.adjoint(x).flatten(2))
    assert_close(seen, resampled, **EXACT)


def test_both_forms_agree_up_to_interpolation():
    """Smooth weights and images of 32 x 32, turned and shifted: R^T x is x moved by T^-1."""
    line = torch.linspace(-1, 1, 32, dtype=torch.float64)
    y, x = torch.meshgrid(line, line, indexing="ij")
    bump = torch.exp(-8 * ((x - 0.2).square() + 2 * y.square()))[None, None]
    weight = (torch.exp(-4 * (x.square() + y.square())) * torch.sin(3 * x + y))[None, None]
    T = Transformations({"rotation": 1.0, "translation": 0.2}, 8)
    by_weights = (T.adjoint(bump) * weight[:, None]).sum((2, 3, 4))[0]
    by_inputs = (T(bump, -T.draws) * weight[:, None]).sum((2, 3, 4))[0]
    assert_close(by_weights, by_inputs, rtol=0.02, atol=0.02 * float(by_inputs.abs().max()))
    other = (T(bump) * weight[:, None]).sum((2, 3, 4))[0]
    assert (other - by_weights).abs().max() > 0.2 * float(by_inputs.abs().max())


def test_both_forms_are_the_same_of_coordinates():
    net = mlp(2, 6, 3)
    x = torch.randn(5, 2, dtype=torch.float64)
    by_input, by_weights = (symmetrise(net, ALL, 9, where)(x) for where in ("input", "weights"))
    assert torch.equal(by_input, by_weights)
    W, b = net[0].weight, net[0].bias
    T = symmetrise(net, ALL, 9).transformations.matrices()
    hidden = torch.einsum("hi,sij,bj->bsh", W, T[:, :2, :2], x) + T[:, :2, 2] @ W.T + b
    assert_close(by_weights, net[1:](hidden).mean(1), **EXACT)


@pytest.mark.parametrize("degrees", [30, 90, 123])
def test_a_fully_averaged_model_is_invariant_and_a_partly_averaged_one_is_not(degrees):
    torch.manual_seed(0)
    net, x = mlp(2, 8, 3), torch.randn(20, 2, dtype=torch.float64)
    angle = math.radians(degrees)
    turn = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]], dtype=torch.float64)
    errors = {}
    for width in (math.pi, 0.5):
        model = symmetrise(net, {"rotation": width}, 64)
        errors[width] = float(((model(x @ turn.T) - model(x)).norm() / model(x).norm()).detach())
    assert errors[math.pi] < 1e-3
    assert errors[0.5] > 0.05


def test_ranges_are_in_units():
    model = symmetrise(
        nn.Sequential(nn.Flatten(), nn.Linear(40, 3)), {"rotation": math.pi / 4, "translation": 0.25, "x-scale": 0.5}
    )
    assert ranges(model)["x-translation"].unit == "units of the coordinates"
    model(torch.randn(2, 1, 5, 8))
    found = ranges(model)
    assert found["rotation"].value == pytest.approx(45, rel=1e-5)
    assert found["rotation"].unit == "degrees"
    assert found["x-translation"].value == pytest.approx(1.0, rel=1e-5)  # a quarter of half of eight
    assert found["x-translation"].unit == "pixels"
    assert found["x-scale"].value == pytest.approx(math.exp(0.5), rel=1e-5)
    assert str(found["rotation"]) == "rotation ±45 degrees"
    assert (found["rotation"].start, found["rotation"].started) == (None, ""), "which no fit has learned"
    Ranges(model, 0.1).begin()
    model.transformations.raw.data += 0.1
    found = ranges(model)
    assert found["x-scale"].value > found["x-scale"].start
    assert [found[name].started for name in ("rotation", "x-translation", "x-scale")] == [
        "rotation ±45 degrees",
        "x-translation ±1 pixels",
        "x-scale by up to 1.65",
    ]
    fixed = symmetrise(nn.Identity(), {"rotation": 1.0}, learn=False)
    Ranges(fixed, 0.1).begin()
    assert ranges(fixed)["rotation"].start is None, "which is not learned"
    two = nn.Sequential(symmetrise(nn.Identity(), "rotation"), symmetrise(nn.Identity(), "shear"))
    assert set(ranges(two)) == {"0.transformations.rotation", "1.transformations.shear"}


def test_rotation_stops_at_pi_and_comes_back():
    T = Transformations({"rotation": 3.0, "x-scale": 3.0}, 3)
    T.raw.data += 5
    assert float(T.widths()[0]) == pytest.approx(math.pi)
    assert float(T.widths()[1]) > 7
    T.limit()
    assert float(T.widths()[0]) == pytest.approx(math.pi, rel=1e-5)
    T.raw.requires_grad_()
    (slope,) = torch.autograd.grad(T.widths()[0], T.raw)
    assert float(slope[0]) > 0.9  # it can go back


def test_widths_survive_a_state_dict():
    one, two = (symmetrise(nn.Linear(2, 2), {"rotation": width}, 5) for width in (1.0, 0.2))
    two.load_state_dict(one.state_dict())
    assert_close(two.transformations.widths(), one.transformations.widths())
    assert not any("draws" in key for key in one.state_dict())


# ---- curvature


@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
def test_the_curvature_of_an_average_of_logits_is_exact_for_linear_models_at_one_sample(likelihood):
    torch.manual_seed(0)
    net = randomised(nn.Sequential(nn.Flatten(), nn.Linear(30, 4), nn.Linear(4, 3)))
    model = symmetrise(net, {"rotation": 1.0, "scale": 0.3}, 7).double()
    x, y = draw(likelihood, 1, (1, 6, 5))
    found = curvature(model, (x, y), likelihood)
    for name, parameter in owned(model):
        expected = exact_blocks(model, parameter, x, y, likelihood, 1)
        assert_close(oracles.kron_blocks(found, name), expected, **EXACT)


def test_it_is_exact_for_linear_models_with_squared_loss_at_any_number_of_samples():
    torch.manual_seed(0)
    net = randomised(nn.Sequential(nn.Flatten(), nn.Linear(30, 4), nn.Linear(4, 3)))
    for where in ("input", "weights"):
        model = symmetrise(net, {"rotation": 1.0, "scale": 0.3}, 7, where).double()
        x, y = draw("gaussian", 9, (1, 6, 5))
        found = curvature(model, (x, y), "gaussian")
        for name, parameter in owned(model):
            assert_close(
                oracles.kron_blocks(found, name), exact_blocks(model, parameter, x, y, "gaussian", 1), rtol=1e-8, atol=1e-8
            )


def test_copies_are_reduced_and_positions_expanded():
    """A network of convolutions that is linear: averaged copies are as good as one averaged input, whose positions are expanded."""
    torch.manual_seed(0)
    net = randomised(nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Flatten(), nn.Linear(60, 3)))
    model = symmetrise(net, ALL, 5).double()
    x, y = draw("categorical", 4, (1, 6, 5))
    found = curvature(model, (x, y))
    plain = curvature(net, (model.transformations(x).mean(1).detach(), y))
    for name, f in plain.factors.items():
        assert_close((found.factors[f"model.{name}"].A, found.factors[f"model.{name}"].G), (f.A, f.G), **EXACT)


def test_the_factors_of_a_nonlinear_model_are_means_of_columns_and_sums_of_rows():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), *mlp(36, 5, 3))
    model = symmetrise(net, ALL, 6).double()
    x, y = draw("gaussian", 4, (1, 6, 6))
    found = curvature(model, (x, y), "gaussian").factors
    moved = model.transformations(x).detach()
    hidden = net[:2](moved.flatten(0, 1)).detach().requires_grad_()
    f = net[2:](hidden).unflatten(0, (4, 6)).mean(1)
    a, G, unreduced = moved.flatten(2).mean(1), 0, 0
    for output in range(3):
        g = torch.autograd.grad(f[:, output].sum(), hidden, retain_graph=True)[0].unflatten(0, (4, 6))
        G = G + torch.einsum("no,np->op", g.sum(1), g.sum(1))
        unreduced = unreduced + torch.einsum("nso,nsp->op", g, g)
    assert_close(found["model.1.weight"].A[0], a.T @ a / 4, **EXACT)
    assert_close(found["model.1.weight"].G[0], G, **EXACT)
    assert not torch.allclose(G, unreduced, rtol=0.1)


def test_an_averaged_part_of_a_model_has_its_own_copies():
    torch.manual_seed(0)
    features = symmetrise(nn.Sequential(nn.Flatten(), mlp(36, 5, 4)), {"rotation": 1.0}, 3)
    model = nn.Sequential(features, nn.Tanh(), nn.Linear(4, 3)).double()
    x, y = draw("categorical", 5, (1, 6, 6))
    found = curvature(model, (x, y))
    a = torch.tanh(features(x)).detach()
    assert_close(found.factors["2.weight"].A[0], a.T @ a / 5, **EXACT)


# ---- a transform for other pipelines


def test_the_augmentation_moves_every_sample_by_its_own_draw_of_the_learned_range():
    model = symmetrise(nn.Linear(2, 2), {"rotation": 0.5, "x-translation": 0.3}, 5)
    augment = model.augmentation()
    assert isinstance(augment, Augmentation)
    assert not any(p.requires_grad for p in augment.parameters())
    torch.manual_seed(0)
    x = torch.tensor([[1.0, 0.0]]).repeat(4000, 1)
    moved = augment(x)
    angles = torch.atan2(moved[:, 1], moved[:, 0])
    assert len(set(angles.tolist())) > 3000
    assert 0.4 < float(angles.max()) < 0.6
    assert abs(float(angles.mean())) < 0.02
    torch.manual_seed(0)
    assert torch.equal(augment(x), moved)
    fresh = Augmentation(Transformations({"rotation": 0.1, "x-translation": 0.1}))
    fresh.load_state_dict(augment.state_dict())
    torch.manual_seed(0)
    assert torch.equal(fresh(x), moved)


def test_the_augmentation_takes_images_alone_and_in_batches():
    augment = symmetrise(nn.Flatten(), {"rotation": 1.0}).augmentation()
    x = torch.rand(3, 1, 8, 8)
    assert augment(x).shape == x.shape
    assert augment(x[0]).shape == x[0].shape
    assert not torch.allclose(augment(x), x)
    assert torch.equal(symmetrise(nn.Flatten(), {"rotation": 0.0}).augmentation()(x), x)


# ---- bad input


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"symmetry": "turning"}, "no transformation is called 'turning'"),
        ({"symmetry": {"rotation": -0.1}}, "must be 0 or more"),
        ({"symmetry": {"scale": math.nan}}, "must be 0 or more"),
        ({"symmetry": {"rotation": 3.2}}, "more than pi"),
        ({"symmetry": "rotation", "samples": 0}, "at least 1"),
        ({"symmetry": "rotation", "where": "outputs"}, "'input' or 'weights'"),
        ({"symmetry": "rotation", "padding": "mirror"}, "'zeros' or 'border'"),
    ],
)
def test_what_is_no_symmetry_is_refused(keys, match):
    with pytest.raises(ValueError, match=match):
        symmetrise(nn.Linear(2, 2), **keys)


@pytest.mark.parametrize(
    ("x", "match"),
    [
        (torch.randn(3, 3), r"neither images \(B, C, H, W\) nor coordinates in the plane"),
        (torch.randn(3, 784), "give flattened images their shape"),
        (torch.randn(3, 8, 8), "neither images"),
        (torch.ones(3, 1, 8, 8, dtype=torch.uint8), "floating point"),
    ],
)
def test_inputs_that_cannot_be_moved_are_refused(x, match):
    with pytest.raises(ValueError, match=match):
        symmetrise(nn.Flatten(), "rotation")(x)


def test_too_many_points_and_too_large_images_are_refused():
    T = Transformations("affine")
    with pytest.raises(ValueError, match="has 4096 of them"):
        T.grid(4)
    T.grid(3)
    with pytest.raises(ValueError, match="outside of 1 to 1024"):
        T.grid(0)
    with pytest.raises(ValueError, match="use where='input'"):
        symmetrise(nn.Flatten(), "rotation", where="weights")(torch.randn(1, 1, 65, 64))


def test_steps_may_average_fewer_copies_than_inference():
    model = symmetrise(nn.Flatten(), "rotation", samples=9, in_steps=4)
    part = model.transformations
    assert model.copies == 9
    part.redraw(0)
    assert model.copies == 4
    few = part.draws
    assert_close(few.sort(0).values.diff(dim=0), torch.full((3, 1), 0.5, dtype=torch.float64))
    part.settle()
    assert_close(part.draws, symmetrise(nn.Flatten(), "rotation", samples=9).transformations.draws)
    part.redraw(1)
    assert part.draws is few, "a recorded step reads the same memory, whatever came in between"
    assert symmetrise(nn.Flatten(), "rotation", samples=9).transformations.in_steps == 9
    for wrong in (0, 10):
        with pytest.raises(ValueError, match="in_steps"):
            symmetrise(nn.Flatten(), "rotation", samples=9, in_steps=wrong)


def test_a_fit_with_fewer_copies_in_steps_ends_with_all(monkeypatch):
    seen, forward = [], Transformations.forward
    monkeypatch.setattr(Transformations, "forward", lambda self, x, *a: seen.append(len(self.draws)) or forward(self, x, *a))
    torch.manual_seed(0)
    data = torch.randn(12, 1, 4, 4), torch.arange(12) % 2
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
    model = symmetrise(net, "rotation", samples=7, in_steps=3)
    autosym.fit(model, data, epochs=2, every=1, burn_in=0)
    assert set(seen) == {3, 7}
    assert seen[-1] == 7
    assert model.copies == 7, "and inference has all"
