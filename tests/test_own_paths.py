"""A user's own paths go where ours go: fit, shares, curvature, reports, equivariance, comparison, harden."""

import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import autosym
import oracles
from autosym.curvature.owners import frames, sites, sizes
from autosym.evidence.shares import limits
from autosym.linear import Bias, Dense
from autosym.linear.frames import Frame
from autosym.linear.groups import GROUPS, Group, translations
from autosym.nn import Affine, Relaxed, conv, fc
from autosym.report import findings
from models import curvature, randomised
from own import Cross, Gained, LowRank, Mix, RowMean, row_mean

SHAPE, MAPS = (1, 6, 4), (2, 6, 4)


def model(free=True, dtype=torch.float32):
    """A convolution, own symmetric paths, and a free branch of one's own."""
    torch.manual_seed(0)
    symmetric = {"conv": conv(SHAPE, MAPS), "row mean": row_mean(SHAPE, MAPS), "cross": Cross(1, 2)}
    layer = Relaxed(symmetric, {"low rank": LowRank(SHAPE, MAPS, 2)} if free else {})
    return nn.Sequential(layer, nn.ReLU(), fc(MAPS, (3,))).to(dtype)


def pairs(samples=60):
    torch.manual_seed(1)
    x = torch.randn(samples, *SHAPE)
    return x, x.mean(-1)[:, 0, :3].argmax(1)


@pytest.fixture(scope="module")
def fit():
    return autosym.fit(model(), pairs(), epochs=8)


def test_shares(fit):
    found = fit.symmetry()
    assert [(path.path, path.symmetric) for path in found] == [
        ("conv", True), ("row mean", True), ("cross", True), ("low rank", False),
    ]  # fmt: skip
    assert sum(path.share for path in found) == pytest.approx(1)
    assert all(path.effective_parameters > 0 for path in found)


@pytest.mark.parametrize("data", [None, pairs()], ids=["by shares", "on data"])
def test_harden_keeps_the_function(fit, data):
    x, _ = pairs()
    hard = autosym.harden(fit, data, tolerance=0.0)
    assert not any(part.dropped for part in hard.hardening.parts)
    assert {(part.path, part.part) for part in hard.hardening.parts} == {
        ("conv", "weights"), ("conv", "bias"), ("row mean", "weights"), ("row mean", "bias"), ("cross", "weights"),
        ("low rank", "weights"), ("low rank", "bias"),
    }  # fmt: skip
    assert_close(hard(x), fit.model(x), rtol=1e-4, atol=1e-5)
    assert all(type(module).__module__.startswith("torch.nn") for module in hard.modules())


@pytest.mark.parametrize("gone", ["row mean", "cross", "low rank"])
def test_harden_drops_what_adds_nothing_and_nothing_else(gone):
    net = randomised(model())
    x, y = pairs()
    x = x.double()
    with torch.no_grad():
        for parameter in net[0][gone].parameters():
            parameter.zero_()
    hard = autosym.harden(net, (x, y), tolerance=1e-9)
    assert {part.path for part in hard.hardening.parts if part.dropped} == {gone}
    assert_close(hard(x), net(x), rtol=1e-9, atol=1e-9)


def test_a_part_is_judged_without_it_and_put_back_whole():
    net = randomised(model())
    x, y = pairs()
    x, before = x.double(), net(pairs()[0].double()).detach()
    hard = autosym.harden(net, (x, y), tolerance=0.0)
    assert_close(hard(x), before, rtol=1e-9, atol=1e-9)
    (part,) = [p for p in hard.hardening.parts if (p.path, p.part) == ("low rank", "weights")]
    nn.init.zeros_(net[0]["low rank"].up.weight)
    change = (net(x) - before).norm() / (before - before.mean(0)).norm()
    assert part.change == pytest.approx(float(change.detach()))


def test_a_shape_that_only_data_show():
    net = nn.Sequential(Relaxed({"row mean": row_mean(SHAPE, MAPS)}, {}), nn.ReLU(), fc(MAPS, (3,)))
    fit = autosym.fit(net, pairs(), epochs=2)
    with pytest.raises(ValueError, match=r"no plain form for row mean of 0 \(Affine\).* pass data"):
        autosym.harden(fit)
    x, _ = pairs()
    assert_close(autosym.harden(fit, pairs(), tolerance=0.0)(x), net(x), rtol=1e-4, atol=1e-5)


# ---- reports


def test_filters_and_limits_are_in_the_report(fit, tmp_path):
    found = {(one["path"], one["part"]): one for one in findings.filters(fit.model)}
    assert set(found) == {("conv", "linear"), ("row mean", "linear"), ("cross", ""), ("low rank", "down")}
    shown = found["row mean", "linear"]
    weights = fit.model[0]["row mean"].linear.weight.detach().reshape(2, 3, 1)
    order = weights.flatten(1).norm(dim=1).argsort(descending=True)
    assert_close(torch.tensor(shown["pictures"]) * shown["scale"] / 127, weights[order], rtol=0, atol=shown["scale"] / 254)
    crosses = torch.tensor(found["cross", ""]["pictures"])
    assert (crosses != 0).tolist() == [[[False, True, False], [True, True, True], [False, True, False]]] * 2
    assert findings.filters(nn.Sequential(Relaxed({"mix": Mix(1, 1)}, {}))) == []  # the control: it says nothing of pictures
    assert limits(fit.model) == {"0": ("the shape of a cross",)}
    assert limits(nn.Sequential(Relaxed({"row mean": RowMean(1, 2)}, {"cross": Cross(1, 2)}))) == {}
    text = fit.report(tmp_path / "report.html", data=pairs()).read_text()
    assert "row mean" in text
    assert "low rank" in text


# ---- equivariance


def test_equivariance_of_own_paths():
    x = torch.randn(4, 1, 6, 4, dtype=torch.float64)
    autosym.assert_equivariant(RowMean(1, 2).double(), "translations", x)
    autosym.assert_equivariant(randomised(model(free=False))[0], "translations", x)
    with pytest.raises(AssertionError, match="not equivariant"):
        autosym.assert_equivariant(randomised(model())[0], "translations", x)
    down = translations(6, 4)
    rows = Group("shifts of rows", down.matrices[::4], down.shifts[::4], down.size)
    with pytest.raises(AssertionError, match="LowRank is not equivariant"):
        autosym.assert_equivariant(randomised(LowRank(SHAPE, MAPS, 2)), rows, x)


def test_lifted_features_of_own_paths(monkeypatch):
    x = torch.randn(3, 8, 5, 5, dtype=torch.float64)
    lifts = Affine(Mix(2, 3), Bias((3, 1, 1, 1), (3, 4, 5, 5)))
    for layer in (Mix(2, 3), lifts, Relaxed({"mix": lifts}, {}, lifted=GROUPS["c4"])):
        autosym.assert_equivariant(randomised(layer), "c4", x)
    monkeypatch.setattr(Mix, "lifted", GROUPS["c4"])
    monkeypatch.setattr(Mix, "takes", None)
    with pytest.raises(AssertionError, match="Mix is not equivariant"):
        autosym.assert_equivariant(randomised(Mix(2, 3)), "c4", x)


# ---- comparison


def test_what_sets_own_paths_apart_is_said(fit, monkeypatch):
    plain = autosym.fit(model(free=False), pairs(), epochs=8)

    def warnings():
        return "\n".join(autosym.compare({"free": fit, "plain": plain}, pairs()).warnings)

    assert "free: it has maps that are products of two factors" in warnings()
    assert "Kronecker curvature" not in warnings()
    monkeypatch.setattr(fit.model[0]["low rank"].up, "factored", False)
    assert "products of two factors" not in warnings()
    monkeypatch.setattr(fit.model[0]["low rank"].up, "understated", True)
    assert "free: the Kronecker curvature of Dense, relative to the exact one, is smaller" in warnings()


# ---- curvature


@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
def test_a_parameter_that_an_own_path_defines_has_its_exact_block(likelihood):
    net = randomised(nn.Sequential(Gained(4, 5), nn.Tanh(), nn.Linear(5, 3)))
    x = torch.randn(6, 4, dtype=torch.float64)
    y = torch.randint(3, (6,)) if likelihood == "categorical" else torch.randn(6, 3).double()
    found = curvature(net, (x, y), likelihood)
    assert "0.gain" in found.factors
    assert_close(oracles.kron_blocks(found, "0.gain")[0], oracles.block_ggn(net, "0.gain", x, y, likelihood))
    fit = autosym.fit(net, (x, y), likelihood, epochs=2)
    assert math.isfinite(float(fit.evidence.log_evidence))


def test_a_parameter_that_no_path_defines_is_refused(monkeypatch):
    monkeypatch.delattr(Gained, "definition")
    with pytest.raises(ValueError, match="no path owns the parameter gain of Gained"):
        sites(Gained(4, 3))


def test_a_derivative_that_is_wrong_is_refused(monkeypatch):
    right = Gained.definition

    def wrong(self, name):
        made = right(self, name)
        return made if name == "weight" else lambda x: made(2 * x)

    monkeypatch.setattr(Gained, "definition", wrong)
    with pytest.raises(ValueError, match=r"gradient of 0\.gain is not what its layer's inputs and outputs give"):
        curvature(randomised(nn.Sequential(Gained(4, 3))), (torch.randn(5, 4).double(), torch.arange(5) % 3))


def test_size_and_coordinates_are_what_an_own_path_says():
    class Own(Dense):
        def size(self):
            return 7.0

        def frame(self):
            return Frame(torch.eye(4), across=True)

    owned = sites(nn.Sequential(Own((4,), (3,)), Dense((3,), (2,))))
    assert sizes(owned)["0"] == 7.0
    assert set(frames(owned)) == {"0"}
