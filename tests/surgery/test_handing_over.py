"""Networks with more or fewer paths: the function, the prior of what each path computes, and the evidence stay the same."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import autosym
from autosym.bayes.priors import Prior
from autosym.evidence import laplace
from autosym.nn import nets
from autosym.runtime.arithmetic import NotFinite
from autosym.surgery import simplifying
from autosym.surgery.handing_over import hand_over, relaxed, silence, wake, without
from autosym.surgery.refitting import fitted_on
from autosym.surgery.widening import anew, widened
from autosym.training.guarding import NothingLearned
from searched import pictures

SMALL = {"in_shape": (1, 8, 8), "classes": 3, "width": 4, "channels": (1, 2), "strides": (2, 2), "hidden": 2}


def net(name, seed=0, **changes):
    torch.manual_seed(seed)
    made = nets.build(name, **(SMALL | changes)).double()
    for parameter in made.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return made


@pytest.fixture
def data():
    return pictures(dtype=torch.float64)


@pytest.mark.parametrize(
    ("small", "large"),
    [
        ("conv", "f-fc+conv"),
        ("f-fc", "f-fc+conv"),
        ("conv", "fc+where+conv"),
        ("gconv:c4", "gconv:c4+turn:c4"),
        ("gconv:d4", "gconv:d4+turn:d4+turn:c4"),
        ("s-conv", "s-fc+s-conv"),
    ],
)
def test_opening_keeps_the_function_and_leaving_out_gives_it_back(small, large, data):
    source, target = net(small), net(large, 1)
    precision = dict.fromkeys(Prior(laplace.at(source, data).names).names, 2.0)
    given = hand_over(source, target, precision)
    assert_close(target(data[0]), source(data[0]))
    back = net(small, 2)
    again = hand_over(target, back, given)
    assert_close(back.state_dict(), source.state_dict())
    assert again == pytest.approx(precision)


def test_the_evidence_of_an_opened_network_is_that_of_the_given_one(data):
    """What the free paths bring in is silent, and the prior of what is there is the same: by exact curvature, nothing changes."""
    source, target = net("conv"), net("f-fc+conv", 1)
    at = laplace.at(source, data)
    prior = Prior(at.names, {name: 1.5 + place for place, name in enumerate(at.names)})
    given = hand_over(source, target, prior.precision())
    opened = laplace.at(target, data)
    found = opened(Prior(opened.names, given))
    assert float(found.log_evidence.detach()) == pytest.approx(float(at(prior).log_evidence.detach()), rel=1e-9)


def test_without_computes_the_same_as_with_these_paths_at_zero(data):
    model = net("f-fc+where+conv")
    silent = copy.deepcopy(model)
    for layer in relaxed(silent).values():
        silence(layer["f-fc"])
    made = without(model, [f"{name}.f-fc" for name in relaxed(model)])
    assert_close(made(data[0]), silent(data[0]))
    assert all(layer.free == ("where",) and "f-fc" not in layer for layer in relaxed(made).values())
    assert "f-fc" in relaxed(model)["blocks.0"], "the given model is left alone"


def test_what_cannot_be_left_out_or_handed_over_is_refused():
    model = net("f-fc+conv")
    with pytest.raises(ValueError, match=r"blocks\.0 would have no path left"):
        without(model, ["blocks.0.f-fc", "blocks.0.conv"])
    with pytest.raises(ValueError, match=r"no relaxed layer has the path blocks\.0\.spam"):
        without(model, ["blocks.0.spam"])
    with pytest.raises(ValueError, match="is a relaxed layer of the target only"):
        hand_over(nn.Linear(2, 2), model)


def test_a_silent_path_wakes_at_the_size_that_it_had(data):
    model = net("f-fc+conv")
    path = relaxed(model)["blocks.0"]["f-fc"]
    size = path.theta_1.size()
    silence(path)
    assert not path(data[0]).any()
    assert path.theta_1.size() == size, "the unit of its steps"
    torch.manual_seed(0)
    wake(path, 0.3)
    assert path.theta_1.size() == pytest.approx(0.3 * size, rel=0.3)
    before = path.theta_1.weight.clone()
    wake(path, 1.0)
    assert torch.equal(path.theta_1.weight, before), "what is awake stays as it is"


@pytest.fixture(scope="module")
def fit():
    torch.manual_seed(0)
    data = pictures()
    return autosym.fit(nets.build("f-fc+conv", **SMALL), data, epochs=30, batch_size=16, seed=0), data


def test_fitting_on_never_loses_what_the_smaller_network_had(fit):
    fitted, data = fit
    stems = [f"{name}.f-fc" for name in relaxed(fitted.model)]
    model, prior, likelihood = fitted_on(fitted, stems, data, 4)
    as_it_is = simplifying._without(fitted, stems, data, {}, refined=False, refit=0)
    at = laplace.at(model, data, likelihood)
    for _ in range(20):
        at.mackay(prior)
    assert float(at(prior).log_evidence.detach()) >= float(as_it_is.evidence.log_evidence) - 1.0
    assert not any(p.any() for name, p in model.named_parameters() if name.endswith("f-fc.theta_1.weight"))
    gone = [value for name, value in prior.precision().items() if ".f-fc." in name and "theta_1" in name]
    assert gone == pytest.approx([1e12] * len(gone))


def test_simplify_prices_paths_after_refitting_and_says_so(fit):
    fitted, data = fit
    fast = autosym.simplify(fitted, data, curvature="kronecker", refit=0).model.simplification
    slow = autosym.simplify(fitted, data, curvature="kronecker", refit=3)
    assert "with the other weights as they are" in str(fast)
    text = str(slow.model.simplification)
    assert "after 3 more epochs without it" in text
    assert " before (after 3 more epochs), " in text, "which is not the fit that was given"
    assert slow.model.simplification.refit == 3
    assert [p.nats for p in slow.model.simplification.paths] != [p.nats for p in fast.paths]
    fitted.check_weights()
    with pytest.raises(ValueError, match="refit is a number of epochs"):
        autosym.simplify(fitted, data, refit=-1)


def test_simplify_refits_for_a_tenth_of_the_fit_unless_its_data_were_augmented(fit, monkeypatch):
    fitted, data = fit
    asked = []

    def fitted_on(fitted, stems, data, epochs, memory):
        asked.append(epochs)
        raise NotFinite("as if it had failed")

    monkeypatch.setattr(simplifying, "fitted_on", fitted_on)
    as_they_are = autosym.simplify(fitted, data, curvature="kronecker", refit=0).model.simplification
    assert not asked
    for epochs, expected in ((20, 5), (99, 10), (200, 20)):
        asked.clear()
        longer = replace(fitted, history=[{}] * epochs)
        found = autosym.simplify(longer, data, curvature="kronecker").model.simplification
        assert asked == [expected], "if all paths together cannot be fitted on, no network is"
        assert found.refit == 0
        assert [p.nats for p in found.paths] == [p.nats for p in as_they_are.paths]
    asked.clear()
    autosym.simplify(replace(fitted, augmented=True), data, curvature="kronecker")
    autosym.simplify(fitted, data, fast=True)
    with pytest.raises(ValueError, match="data of the fit"):
        autosym.simplify(fitted, (data[0] + 1, data[1]))
    assert not asked, "nothing is trained on other data"


def test_a_network_that_cannot_be_fitted_on_is_priced_as_it_is(fit, monkeypatch):
    """Beside the others with all paths, which can be."""
    fitted, data = fit
    monkeypatch.setattr(simplifying, "IDLE", 0.0)
    options = {"curvature": "kronecker", "nats": -1e9}
    refitted = autosym.simplify(fitted, data, refit=3, **options).model.simplification
    as_they_are = autosym.simplify(fitted, data, refit=0, **options).model.simplification
    monkeypatch.setattr(simplifying, "fitted_on", lambda *given: fitted_on(*given) if not given[1] else _fail())
    found = autosym.simplify(fitted, data, refit=3, **options).model.simplification
    assert found.refit == 3
    assert found.log_evidence[0] == refitted.log_evidence[0]
    alone = [as_they_are.log_evidence[0] - p.nats for p in as_they_are.paths]
    assert [found.log_evidence[0] - p.nats for p in found.paths] == pytest.approx(alone)


def test_paths_that_do_nothing_are_priced_as_they_are_and_told(fit, monkeypatch, capsys):
    fitted, data = fit
    stems = [f"{name}.f-fc" for name in relaxed(fitted.model)]
    monkeypatch.setattr(simplifying, "IDLE", 1e9)
    found = autosym.simplify(fitted, data, curvature="kronecker", refit=3, progress=True)
    as_they_are = autosym.simplify(fitted, data, curvature="kronecker", refit=0).model.simplification
    assert [p.nats for p in found.model.simplification.paths] == [p.nats for p in as_they_are.paths]
    assert found.model.simplification.refit == 0, "nothing is fitted on if no path does anything"
    said = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in said] == [f"without {stem}" for stem in stems]
    first = fitted.symmetry().optional()[0].effective_parameters
    monkeypatch.setattr(simplifying, "IDLE", first + 1e-9)
    asked = []
    monkeypatch.setattr(simplifying, "fitted_on", lambda *given: asked.append(tuple(given[1])) or fitted_on(*given))
    autosym.simplify(fitted, data, curvature="kronecker", nats=-1e9, refit=3)
    others = [(stem,) for p, stem in zip(fitted.symmetry().optional(), stems, strict=True) if p.effective_parameters > first]
    assert asked == [(), *others]


def _fail():
    raise NothingLearned("as if it had failed")


def test_a_fit_knows_whether_it_was_trained_on_other_data_than_its_evidence_is_of(fit, tmp_path):
    _, (x, y) = fit
    options, net = {"epochs": 2}, nets.build("conv", **SMALL)
    assert not autosym.fit(copy.deepcopy(net), (x, y), **options).augmented
    changed = [{"augment": lambda x, generator: x + 1}, {"evidence_data": (x, y)}]
    for more in changed:
        found = autosym.fit(copy.deepcopy(net), (x.clone(), y), **options, **more)
        assert found.augmented
        found.save(tmp_path / "fit")
        assert autosym.load(tmp_path / "fit", copy.deepcopy(net)).augmented


# ---- wider networks


def cnn():
    layers = (nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=4), nn.GroupNorm(2, 4))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).eval()


def test_a_wider_network_has_more_channels_everywhere_but_at_its_ends():
    x = torch.randn(2, 1, 8, 8)
    wide = widened(cnn(), x, 3)
    shapes = [tuple(m.weight.shape) for m in wide.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    assert shapes == [(12, 1, 3, 3), (12, 1, 3, 3), (18, 12), (3, 18)]
    assert wide(x).shape == (2, 3)
    assert not any(module.training for module in wide.modules())


def test_anew_is_another_network_of_the_same_form():
    model, x = cnn(), torch.randn(2, 1, 8, 8)
    torch.manual_seed(5)
    one = anew(model)
    torch.manual_seed(5)
    assert_close(anew(model)(x), one(x))
    assert not torch.equal(one(x), model(x))


def test_a_network_without_layers_to_widen_is_refused():
    with pytest.raises(ValueError, match="give a factory"):
        widened(nn.Flatten(), torch.randn(2, 1, 8, 8), 2)
