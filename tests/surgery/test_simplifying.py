"""simplify: which paths are worth their evidence, and what is left of a fit without the others."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import autosym
from autosym.evidence import laplace
from autosym.nn import layers, nets
from autosym.surgery import simplifying
from autosym.surgery.simplifying import STEPS

SMALL = {"width": 4, "channels": (1, 1), "strides": (2, 2), "hidden": 2}


def planted(free: bool, samples=200):
    """Numbers given by a random network, dense or convolutional, with noise."""
    torch.manual_seed(3)
    teacher = nets.build("fc" if free else "conv", (1, 8, 8), 1, **SMALL)
    wave = torch.tensor([(1, 0), (0, 1), (1, 1), (2, 1)])[torch.randint(4, (samples,))].float()
    phases = wave[:, :, None] * torch.arange(8.0) * math.pi / 4 + math.pi * torch.rand(samples, 2, 1)
    x = torch.cos(phases[:, 0, :, None] + phases[:, 1, None, :])[:, None] + 0.1 * torch.randn(samples, 1, 8, 8)
    with torch.no_grad():
        y = teacher(x)
    y = (y - y.mean()) / y.std()
    return x, y + 0.1 * torch.randn_like(y)


def fitted(data, name="f-fc+conv", **options):
    torch.manual_seed(1)
    outputs = 1 if options.get("likelihood") == "gaussian" else 2
    return autosym.fit(nets.build(name, (1, 8, 8), outputs, **SMALL), data, **{"epochs": 60, **options})


@pytest.fixture(scope="module")
def strict():
    data = planted(free=False)
    return data, fitted(data, likelihood="gaussian")


@pytest.fixture(scope="module")
def free():
    data = planted(free=True)
    return data, fitted(data, likelihood="gaussian")


def test_a_planted_symmetry_is_strict_without_the_paths_that_have_no_evidence(strict):
    data, fit = strict
    before = copy.deepcopy(fit.model.state_dict())
    simple = autosym.simplify(fit, data)
    assert fit.symmetry().network_share() > 1e-3
    assert simple.symmetry().network_share() < 1e-9
    assert all(path.left_out for path in simple.model.simplification.paths)
    assert all(not p.any() for name, p in simple.model.named_parameters() if ".f-fc" in name)
    gone = [value for name, value in simple.prior.precision().items() if ".f-fc" in name]
    assert gone == pytest.approx([1e12] * len(gone)), "what is left out does not come back if training goes on"
    assert_close(fit.model.state_dict(), before, rtol=0, atol=0)
    found, left = simple.model.simplification.log_evidence
    assert left == pytest.approx(simple.evidence.log_evidence.item())
    assert left > found, "paths without evidence for them cost some"
    assert "left out" in str(simple.model.simplification)


def test_a_path_that_breaks_a_symmetry_with_evidence_stays(free):
    data, fit = free
    simple = autosym.simplify(fit, data)
    worth = {path.layer: path for path in simple.model.simplification.paths}
    assert worth["blocks.0"].nats > 20
    assert not worth["blocks.0"].left_out
    assert simple.symmetry().network_share() > 0.3
    assert "autosym.simplify" in str(fit.symmetry())
    assert "autosym.simplify" not in str(simple.symmetry())
    assert set(simple.model.simplification.cautions) == set(fit.symmetry().cautions)
    assert not simple.schedule.sampled_end
    assert autosym.simplify(fit, data, sampled=True, refit=0).schedule.sampled_end, "compare must know"
    everything = autosym.simplify(fit, data, nats=math.inf)
    assert everything.symmetry().network_share() < 1e-9, "no path is worth infinitely many"
    found, left = everything.model.simplification.log_evidence
    assert found - left > worth["blocks.0"].nats - 1


def test_nats_are_the_evidence_that_is_lost(free):
    data, fit = free
    first, _ = autosym.simplify(fit, data, curvature="kronecker", refit=0).model.simplification.paths

    def log_evidence(model, prior):
        estimate = laplace.at(model, data, copy.deepcopy(fit.likelihood))
        for _ in range(STEPS):
            estimate.mackay(prior)
        return float(estimate(prior).log_evidence.detach())

    model, prior = copy.deepcopy(fit.model), copy.deepcopy(fit.prior)
    with torch.no_grad():
        for parameter in model.blocks[0]["f-fc"].parameters():
            parameter.zero_()
        for index, name in enumerate(prior.names):
            if name.startswith("blocks.0.f-fc"):
                prior.log_precision[index] = math.log(1e12)
    lost = log_evidence(copy.deepcopy(fit.model), copy.deepcopy(fit.prior)) - log_evidence(model, prior)
    assert first.nats == pytest.approx(lost, rel=1e-6)


@pytest.fixture(scope="module")
def twice():
    """Two free paths that do the same: each hides what the other is worth."""
    torch.manual_seed(1)
    shape = (1, 4, 4)
    paths = {"f-fc": layers.Factored(shape, shape), "fc": layers.fc(shape, shape)}
    model = nn.Sequential(layers.Relaxed({"conv": layers.conv(shape, shape)}, paths), nn.Flatten(), nn.Linear(16, 1)).double()
    x = torch.randn(1000, *shape).double()
    with torch.no_grad():
        first, second = paths["f-fc"].theta_1.weight, paths["f-fc"].theta_2.weight
        first *= 3
        paths["fc"].linear.weight.copy_(torch.einsum("dtc,cds->dtcs", first, second).reshape(1, 16, 16))
        y = model(x)
        y += 0.5 * y.std() * torch.randn_like(y)
    return (x, y), autosym.fit(model, (x, y), "gaussian", epochs=1, every=1, burn_in=0, lr=1e-9)


def test_a_path_is_compared_with_the_step_before_it(twice):
    """Not with the start, from which the loss of all adds up; nor by what it alone is worth."""
    data, fit = twice

    def left_out(nats):
        found = autosym.simplify(fit, data, nats, refit=0).model.simplification
        return {path.path for path in found.paths if path.left_out}, found

    both, found = left_out(math.inf)
    assert both == {"f-fc", "fc"}
    worth = sorted(path.nats for path in found.paths)
    total = found.log_evidence[0] - found.log_evidence[1]
    last = total - worth[0]  # what the second costs once the first is gone
    assert 0 < worth[0] < worth[1] < last - 5 < last < total - 5, "the test would be empty"
    assert left_out((worth[1] + last) / 2)[0] == {"fc"}, "the other is worth more without it"
    assert left_out((last + total) / 2)[0] == both
    assert left_out(worth[0] - 1)[0] == set()


def test_what_is_left_out_hardens_away(strict):
    data, fit = strict
    plain = autosym.harden(autosym.simplify(fit, data, refit=0), data)
    assert {part.path for part in plain.hardening.parts if part.dropped} == {"f-fc"}
    assert plain.hardening.cost.change < 1e-5


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("f-fc+conv", {"f-fc"}),
        ("f-fc+conv+gconv:c4", {"f-fc", "conv"}),
        ("conv+gconv:c4+gconv:d4", {"conv", "gconv:c4"}),
        ("gconv:d4+turn:d4+turn:c4+turn:c2", {"turn:d4", "turn:c4", "turn:c2"}),
        ("conv", set()),
        ("f-fc", set()),
    ],
)
def test_the_paths_that_break_what_another_keeps(name, expected):
    torch.manual_seed(0)
    data = torch.randn(20, 1, 8, 8), torch.arange(20) % 2
    found = fitted(data, name, epochs=1, step="none").symmetry()
    assert {path.path for path in found.optional()} == expected
    assert {path.layer for path in found.optional()} == ({"blocks.0", "blocks.1"} if expected else set())


def test_what_cannot_be_simplified_is_refused(strict):
    (x, y), fit = strict
    with pytest.raises(ValueError, match="data of the fit"):
        autosym.simplify(fit, (x, y + 1))
    with pytest.raises(ValueError, match="data of the fit"):
        autosym.simplify(fit, (x[:50], y[:50]))
    with pytest.raises(ValueError, match="iterator"):
        autosym.simplify(fit, iter([(x, y)]))
    with pytest.raises(ValueError, match="step='none'"):
        autosym.simplify(fitted((x, y), epochs=2, likelihood="gaussian", step="none"), (x, y))
    with pytest.raises(ValueError, match="nothing to leave out"):
        autosym.simplify(fitted((x, y), "conv", epochs=2, likelihood="gaussian"), (x, y))
    with pytest.raises(ValueError, match="Student-t"):
        autosym.simplify(fitted((x, y), epochs=2, likelihood="gaussian", nu=4.0), (x, y))
    with pytest.raises(ValueError, match="kernel"):
        autosym.simplify(fitted((x, y), epochs=2, likelihood="gaussian", kernel=20), (x, y))


def test_what_all_paths_give_up_together_is_said(strict, free):
    for (data, fit), nats in ((strict, 10.0), (free, math.inf)):
        found = autosym.simplify(fit, data, nats, curvature="kronecker", refit=0).model.simplification
        before, after = found.log_evidence
        assert found.given_up == before - after
        changed = "gained" if fit is strict[1] else "given up"
        assert f"{abs(before - after):.1f} nats {changed} in all" in str(found)


def test_the_most_valuable_paths_are_put_back_where_all_together_give_up_too_much(free):
    data, fit = free
    everything = autosym.simplify(fit, data, math.inf, "kronecker", refit=0).model.simplification
    assert all(path.left_out and not path.put_back for path in everything.paths)
    worth = sorted(everything.paths, key=lambda path: path.nats)
    simple = autosym.simplify(fit, data, math.inf, "kronecker", total=everything.given_up - 1, refit=0)
    found = simple.model.simplification
    assert found.given_up <= everything.given_up - 1
    assert found.log_evidence[1] == pytest.approx(float(simple.evidence.log_evidence))
    kept = {(path.layer, path.path) for path in found.paths if path.put_back}
    assert kept == {(path.layer, path.path) for path in worth[-len(kept) :]}
    assert 0 < len(kept) < len(worth)
    for path in found.paths:
        weights = [p for name, p in simple.model.named_parameters() if name.startswith(f"{path.layer}.{path.path}.")]
        assert weights
        assert any(p.any() for p in weights) is path.put_back is not path.left_out
    assert "put back" in str(found)
    nothing = autosym.simplify(fit, data, math.inf, "kronecker", total=0, refit=0).model.simplification
    assert nothing.given_up <= 0
    with pytest.raises(ValueError, match="total must be"):
        autosym.simplify(fit, data, total=-1.0)


def test_paths_without_evidence_are_left_out_in_one_step(strict, monkeypatch):
    data, fit = strict
    passes, at = [], laplace.at
    monkeypatch.setattr(laplace, "at", lambda *a, **k: passes.append(1) or at(*a, **k))
    found = autosym.simplify(fit, data, curvature="kronecker", refit=0).model.simplification
    assert all(path.left_out for path in found.paths)
    assert len(passes) == len(found.paths) + 2, "before, without each, without all"


def test_of_two_paths_that_stand_in_for_each_other_one_stays(strict, monkeypatch):
    """Either is worth nothing, both together are worth 100 nats."""
    data, fit = strict
    tried = []

    def without(fitted, stems, **_):
        tried.append(len(stems))
        return SimpleNamespace(model=SimpleNamespace(), estimate=fit.estimate, evidence=fit.evidence, stems=stems)

    monkeypatch.setattr(simplifying, "_without", without)
    monkeypatch.setattr(simplifying, "_log_evidence", lambda one: -100.0 * (len(one.stems) == 2))
    found = autosym.simplify(fit, data, curvature="kronecker", refit=0).model.simplification
    assert sum(path.left_out for path in found.paths) == 1
    assert tried == [0, 1, 1, 2, 1, 2], "as it is, without each, without both, without one half, then the other"


def test_paths_are_priced_by_the_evidence_of_the_whole_network(strict):
    data, fit = strict
    simple = autosym.simplify(fit, data, curvature="whole", refit=0)
    found = simple.model.simplification
    given = autosym.simplify(fit, data, curvature="kronecker", refit=0).model.simplification
    assert simple.evidence.standard_error == 0
    assert "log evidence of the whole network" in str(found)
    assert "log evidence of" not in str(given)
    assert found.log_evidence[0] > given.log_evidence[0], "Kronecker factors are too large"
    assert found.log_evidence[1] == pytest.approx(float(simple.evidence.log_evidence))
    assert [p.nats for p in found.paths] != [p.nats for p in given.paths]
    with pytest.raises(ValueError, match="'kronecker', 'whole' or None"):
        autosym.simplify(fit, data, curvature="all")


@pytest.mark.parametrize("enough", [True, False])
def test_paths_are_priced_by_the_whole_network_where_that_costs_no_more_than_the_fit(strict, monkeypatch, enough):
    data, fit = strict
    asked = []
    monkeypatch.setattr(type(fit), "affords_whole", lambda self, data, times=1: asked.append(times) or enough)
    simple = autosym.simplify(fit, data, curvature=None, refit=0)
    assert asked == [2 * len(simple.model.simplification.paths) + 1]
    again = autosym.simplify(fit, data, curvature=None, total=1e9, refit=0)
    assert asked[1:] == [3 * len(again.model.simplification.paths) + 1], "each may be put back too"
    assert (simple.evidence.standard_error is not None) == enough
    assert autosym.simplify(fit, data, subset=50, refit=0).evidence.standard_error is None, (
        "whoever wants less is not given more"
    )


@pytest.mark.parametrize("which", ["strict", "free", "twice"])
@pytest.mark.parametrize("nats", [0.5, 10.0, 1000.0])
def test_the_fast_way_leaves_out_the_same_paths(which, nats, request):
    data, fit = request.getfixturevalue(which)
    slow, fast = (
        autosym.simplify(fit, data, nats, "kronecker", fast=fast, refit=0).model.simplification for fast in (False, True)
    )
    assert [path.left_out for path in fast.paths] == [path.left_out for path in slow.paths]
    assert fast.log_evidence == pytest.approx(slow.log_evidence, rel=1e-9)
    for one, exact in zip(fast.paths, slow.paths, strict=True):
        assert not exact.estimated
        assert (one.nats < nats) is (exact.nats < nats)
        if not one.estimated:
            assert one.nats == pytest.approx(exact.nats, rel=1e-6, abs=1e-6)
    assert ("~" in str(fast)) is any(path.estimated for path in fast.paths)
    assert "~" not in str(slow)


def test_the_fast_way_takes_two_passes_where_nothing_is_in_doubt(strict, monkeypatch):
    data, fit = strict
    passes, at = [], laplace.at
    monkeypatch.setattr(laplace, "at", lambda *a, **k: passes.append(1) or at(*a, **k))
    found = autosym.simplify(fit, data, 50.0, fast=True).model.simplification
    assert all(path.left_out and path.estimated for path in found.paths)
    assert len(passes) == 2, "before, and without all"
    assert found.curvature == "kronecker"


def test_a_path_near_the_threshold_has_its_evidence_computed(free):
    data, fit = free
    first = autosym.simplify(fit, data, curvature="kronecker", refit=0).model.simplification.paths[0]
    near = autosym.simplify(fit, data, first.nats + 1, fast=True).model.simplification.paths[0]
    assert not near.estimated
    assert near.nats == pytest.approx(first.nats, rel=1e-6)
    with pytest.raises(ValueError, match="fast estimates from Kronecker factors"):
        autosym.simplify(fit, data, curvature="whole", fast=True)


def test_estimates_do_not_choose_among_paths_that_cannot_be_left_out_together(strict, monkeypatch):
    """Either is worth nothing by its estimate. The first is worth 3 nats, the second 1, both together 100."""
    data, fit = strict
    tried = []

    def without(fitted, stems, **_):
        tried.append(len(stems))
        return SimpleNamespace(model=SimpleNamespace(), estimate=fit.estimate, evidence=fit.evidence, stems=stems)

    def log_evidence(one):
        return -100.0 if len(one.stems) == 2 else -sum({"blocks.0.f-fc": 3.0, "blocks.1.f-fc": 1.0}[stem] for stem in one.stems)

    monkeypatch.setattr(simplifying, "_without", without)
    monkeypatch.setattr(simplifying, "_log_evidence", log_evidence)
    monkeypatch.setattr(simplifying, "_screened", lambda fitted, data, stems, *_: dict.fromkeys(stems, 0.0))
    found = autosym.simplify(fit, data, fast=True).model.simplification
    assert {path.layer for path in found.paths if path.left_out} == {"blocks.1"}
    assert [path.nats for path in found.paths] == [3.0, 1.0]
    assert not any(path.estimated for path in found.paths)
    assert tried == [0, 2, 1, 1, 1, 2], "as it is, without both, then the price of each, then without one half and the other"
    monkeypatch.setattr(simplifying, "_log_evidence", lambda one: -20.0 * ("blocks.0.f-fc" in one.stems))
    tried.clear()
    found = autosym.simplify(fit, data, fast=True).model.simplification
    assert [path.left_out for path in found.paths] == [False, True]
    assert tried == [0, 2, 1, 1, 1], "the one that is worth more than the threshold is not tried again"
