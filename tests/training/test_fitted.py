"""What a fit returns: it notices that its weights were changed, and can do after loading what it could before saving."""

import copy
import math
import shutil

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

import autosym
from autosym.linear import Dense
from autosym.nn import nets
from autosym.report import findings
from models import draw, mlp

IMAGES = (1, 4, 4)


def network():
    return nets.build("f-fc+conv", IMAGES, 3, width=2, channels=(1, 2), strides=(1, 2), hidden=2).double()


# name: (a model, likelihood, shape of the inputs, options of fit)
FITS = {
    "relaxed": (network, "categorical", IMAGES, {}),
    "regression": (lambda: mlp(5, 4, 3), "gaussian", (5,), {"step": "gradient"}),
    "Student-t": (lambda: mlp(5, 4, 3), "categorical", (5,), {"nu": 4.0}),
    "few columns": (lambda: mlp(140, 4, 3), "categorical", (140,), {}),
    "kernel": (lambda: mlp(5, 4, 3), "categorical", (5,), {"kernel": 8}),
    "map": (network, "categorical", IMAGES, {"step": "none", "clip": 2.0}),
    "omega": (
        lambda: nets.build("s-fc+s-conv", IMAGES, 3, 2, channels=(1,), strides=(1,), hidden=2, prior="omega").double(),
        "categorical",
        IMAGES,
        {},
    ),
    "symmetrised": (
        lambda: autosym.symmetrise(nn.Sequential(nn.Flatten(1), mlp(16, 4, 3)), {"rotation": 0.5}, samples=3).double(),
        "categorical",
        IMAGES,
        {},
    ),
}


@pytest.fixture(scope="module", params=FITS)
def made(request, tmp_path_factory):
    """A fit, its data, the folder it was saved to, and a new model of the same kind."""
    build, likelihood, shape, options = FITS[request.param]
    torch.manual_seed(0)
    data = draw(likelihood, 24, shape)
    fitted = autosym.fit(build(), data, likelihood, epochs=3, burn_in=0, **options)
    folder = tmp_path_factory.mktemp("saved") / "deep" / "er"
    fitted.save(folder)
    torch.manual_seed(1)
    return fitted, data, folder, build()


def test_what_was_saved_is_loaded_to_the_bit(made):
    fitted, (x, _), folder, other = made
    loaded = autosym.load(folder, other)
    assert loaded.model is other
    assert repr(loaded) == repr(fitted)
    assert str(loaded.symmetry()) == str(fitted.symmetry())
    assert loaded.schedule == fitted.schedule
    assert loaded.history == fitted.history
    assert loaded.seed == fitted.seed
    assert loaded.prior.precision() == fitted.prior.precision()
    assert loaded.prior.nu == fitted.prior.nu
    for part in ("log_likelihood", "log_prior", "complexity"):
        assert float(getattr(loaded.evidence, part)) == float(getattr(fitted.evidence, part))
    assert torch.equal(loaded.model(x), fitted.model(x))
    with torch.no_grad():
        assert float(loaded.estimate(loaded.prior).log_evidence) == float(fitted.estimate(fitted.prior).log_evidence)
    if not isinstance(fitted.estimate, autosym.evidence.kernel.Kernel):
        for one, two in zip(vars(loaded.predictive(x)).values(), vars(fitted.predictive(x)).values(), strict=True):
            assert one is two or torch.equal(one, two)


def test_reports_of_a_loaded_fit_say_the_same(made):
    fitted, data, folder, other = made
    one, two = (findings.contents(f, data) for f in (fitted, autosym.load(folder, other)))
    assert one == two


def test_a_loaded_fit_is_compared_hardened_and_saved_again(tmp_path):
    torch.manual_seed(0)
    data = draw("categorical", 24, IMAGES)
    fitted = autosym.fit(network(), data, epochs=3, burn_in=0)
    fitted.save(tmp_path)
    loaded = autosym.load(tmp_path, network())
    rows = [autosym.compare({"a": f, "b": autosym.fit(network(), data, epochs=3, seed=1)}, data).rows for f in (fitted, loaded)]
    assert rows[0][0].keys() == rows[1][0].keys()
    hardened = [autosym.harden(f, data)(data[0]) for f in (fitted, loaded)]
    assert torch.equal(*hardened)
    simple = [autosym.simplify(f, data, nats=math.inf) for f in (fitted, loaded)]
    assert str(simple[0].model.simplification) == str(simple[1].model.simplification)
    simple[1].save(tmp_path / "simple")
    again = autosym.load(tmp_path / "simple", network())
    assert again.symmetry().simplified
    assert str(again.symmetry()) == str(simple[0].symmetry())


def test_a_likelihood_of_ones_own_is_given_to_load(tmp_path):
    class Halved(autosym.Categorical):
        name = "halved"

    data = draw("categorical", 24)
    autosym.fit(mlp(5, 3), data, Halved(), epochs=1).save(tmp_path)
    with pytest.raises(ValueError, match=r"likelihood of your own, 'halved': give it too"):
        autosym.load(tmp_path, mlp(5, 3))
    assert isinstance(autosym.load(tmp_path, mlp(5, 3), Halved()).likelihood, Halved)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("one")
    autosym.fit(mlp(5, 4, 3), draw("categorical", 24), epochs=1).save(folder)
    return folder


def test_another_model_is_refused_and_left_as_it_was(saved):
    for other, why in (
        (mlp(5, 6, 3), "of another model"),
        (mlp(5, 3), "of another model"),
        (mlp(5, 4, 3).float(), "of another model"),
    ):
        before = copy.deepcopy(other.state_dict())
        with pytest.raises(ValueError, match=why):
            autosym.load(saved, other)
        for name, tensor in other.state_dict().items():
            assert torch.equal(tensor, before[name])


def test_other_files_are_refused(saved, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"name a folder that fit\.save\(folder\) or autosym fit wrote"):
        autosym.load(tmp_path, mlp(5, 4, 3))
    autosym.fit(mlp(5, 4, 3), draw("categorical", 24), epochs=1, checkpoint=tmp_path / "fit.safetensors")
    with pytest.raises(ValueError, match="not an autosym fit"):
        autosym.load(tmp_path, mlp(5, 4, 3))
    shutil.copy(saved / "fit.safetensors", tmp_path / "run.safetensors")
    with pytest.raises(ValueError, match="not an autosym checkpoint"):
        autosym.fit(mlp(5, 4, 3), draw("categorical", 24), epochs=1, checkpoint=tmp_path / "run.safetensors", resume=True)


@pytest.mark.parametrize("change", ["weights", "curvature", "history", "no checksum"])
def test_numbers_that_were_changed_in_the_file_are_refused(change, saved, tmp_path):
    from autosym.training import checkpoint, fitted

    tensors, state = checkpoint.read(saved / fitted.FILE, fitted.KIND)
    if change == "weights":
        tensors["model/0.weight"] = 10 * tensors["model/0.weight"]
    elif change == "curvature":
        name = next(name for name in tensors if name.startswith("estimate/curvature/factors"))
        tensors[name] = 100 * tensors[name]
    elif change == "history":
        state["history"]["list"][0]["dict"]["loss"] = 0.0
    else:
        del state["checksum"]
    checkpoint.write(tmp_path / fitted.FILE, tensors, state, fitted.KIND)
    with pytest.raises(ValueError, match="is damaged: its checksum is another"):
        autosym.load(tmp_path, mlp(5, 4, 3))


@pytest.mark.parametrize("part", ["likelihood", "evidence", "prior", "estimate", "schedule"])
@pytest.mark.parametrize("value", [5, None, ["a"], {"a": 1}, "a", 10**400], ids=lambda value: str(value)[:9])
def test_what_no_fit_writes_is_refused_by_name(part, value, saved, tmp_path):
    """Also where the checksum is right: whoever writes a file can make one."""
    from autosym.training import checkpoint, fitted

    tensors, state = checkpoint.read(saved / fitted.FILE, fitted.KIND)
    del state["checksum"]
    state[part] = value
    checkpoint.write(tmp_path / fitted.FILE, tensors, {**state, "checksum": fitted._checksum(tensors, state)}, fitted.KIND)
    with pytest.raises(ValueError, match=r"fit\.safetensors"):
        autosym.load(tmp_path, mlp(5, 4, 3))


def test_files_that_do_not_say_what_evidence_can_be_are_read(saved, tmp_path):
    from autosym.training import checkpoint, fitted

    tensors, state = checkpoint.read(saved / fitted.FILE, fitted.KIND)
    now = autosym.load(saved, mlp(5, 4, 3))
    assert now.estimate.classes_seen == 3
    assert now.evidence.most == pytest.approx(-math.log(6))
    del state["checksum"], state["evidence"]["fields"]["most"]
    del state["estimate"]["fields"]["curvature"]["fields"]["classes_seen"]
    checkpoint.write(tmp_path / fitted.FILE, tensors, {**state, "checksum": fitted._checksum(tensors, state)}, fitted.KIND)
    older = autosym.load(tmp_path, mlp(5, 4, 3))
    assert (older.estimate.classes_seen, older.evidence.most) == (0, math.inf)
    assert older.symmetry().cautions == now.symmetry().cautions


def test_another_likelihood_is_refused(saved):
    assert autosym.load(saved, mlp(5, 4, 3), "categorical").likelihood.name == "categorical"
    with pytest.raises(ValueError, match="likelihood 'categorical', not 'poisson': give that one"):
        autosym.load(saved, mlp(5, 4, 3), autosym.Poisson())


def test_a_model_with_other_layers_frozen_is_refused(saved):
    model = mlp(5, 4, 3)
    model[0].requires_grad_(False)
    with pytest.raises(ValueError, match=r"other layers frozen: they differ in 0\.bias, 0\.weight"):
        autosym.load(saved, model)
    with pytest.raises(TypeError):
        autosym.load(saved, "a model")


def test_a_model_that_is_a_path_itself_is_saved_and_loaded(tmp_path):
    torch.manual_seed(0)
    x, y = draw("categorical", 24)
    fitted = autosym.fit(Dense((5,), (3,)).double(), (x, y), epochs=2, burn_in=0)
    fitted.save(tmp_path)
    loaded = autosym.load(tmp_path, Dense((5,), (3,)).double())
    assert torch.equal(loaded.predictive(x).probabilities, fitted.predictive(x).probabilities)


def test_numbers_of_numpy_are_taken_and_saved(tmp_path):
    settings = {"epochs": np.int64(2), "lr": np.float32(0.1), "seed": np.int64(3)}
    fitted = autosym.fit(mlp(5, 3), draw("categorical", 24), **settings)
    fitted.save(tmp_path)
    assert autosym.load(tmp_path, mlp(5, 3)).schedule == fitted.schedule
    assert type(fitted.schedule.epochs) is int


# ---- weights that were changed


USES = {
    "predictive": lambda fit, data: fit.predictive(data[0]),
    "simplify": lambda fit, data: autosym.simplify(fit, data),
    "harden": lambda fit, data: autosym.harden(fit, data),
    "report": lambda fit, data: findings.contents(fit),
    "compare": lambda fit, data: autosym.compare([fit, fit], data),
    "save": lambda fit, data: fit.save("nowhere"),
}


@pytest.fixture(scope="module")
def twice():
    """A fit whose model was fitted again, its data, and what it said before."""
    torch.manual_seed(0)
    data = draw("categorical", 24, IMAGES)
    model = network()
    first = autosym.fit(model, data, epochs=3, burn_in=0)
    before = first.predictive(data[0]).probabilities
    autosym.fit(model, data, epochs=1, seed=1)
    return first, data, before


@pytest.mark.parametrize("use", USES)
def test_a_fit_notices_that_its_model_was_fitted_again(use, twice):
    first, data, _ = twice
    with pytest.raises(ValueError, match=r"was changed after the fit .*put them back by fit\.restore\(\)"):
        USES[use](first, data)


def test_weights_can_be_put_back(twice):
    first, data, before = twice
    later = copy.deepcopy(first.model.state_dict())
    first.restore()
    assert_close(first.predictive(data[0]).probabilities, before, rtol=0, atol=0)
    first.model.load_state_dict(later)


def test_a_model_that_was_frozen_after_the_fit_is_not_changed():
    torch.manual_seed(0)
    data = draw("categorical", 24)
    fitted = autosym.fit(mlp(5, 4, 3), data, epochs=1)
    fitted.model.requires_grad_(False)
    fitted.check_weights()
    with torch.no_grad():
        fitted.model[0].bias[0] += 1e-9
    with pytest.raises(ValueError, match=r"0\.bias was changed"):
        fitted.check_weights()


def test_learned_ranges_and_frozen_layers_belong_to_the_weights():
    """They are no parameters of the evidence, and another fit, or a user, changes them too."""
    torch.manual_seed(0)
    data = draw("categorical", 24, IMAGES)
    model = FITS["symmetrised"][0]()
    first = autosym.fit(model, data, epochs=3, burn_in=0)
    said = str(first.symmetry())
    autosym.fit(model, data, epochs=6, burn_in=0, hyper_lr=0.5)
    with pytest.raises(ValueError, match="was changed after the fit"):
        first.symmetry()
    first.restore()
    assert str(first.symmetry()) == said
    frozen = mlp(5, 4, 3)
    frozen[0].requires_grad_(False)
    fitted = autosym.fit(frozen, draw("categorical", 24), epochs=1)
    with torch.no_grad():
        frozen[0].weight *= 3
    with pytest.raises(ValueError, match=r"0\.weight was changed"):
        fitted.save("nowhere")


def test_the_work_of_a_fit_is_counted_by_the_batches_of_the_loader(monkeypatch):
    seen, data = [], draw("categorical", 24)
    fit = autosym.fit(mlp(5, 4, 3), data, epochs=2)
    monkeypatch.setattr("autosym.evidence.costs.within_a_fit", lambda *given: bool(seen.append(given[3:])))
    fit.affords_whole(data, 3)
    fit.affords_whole(DataLoader(TensorDataset(*data), batch_size=5), 3, memory=0.5)
    assert seen == [(2, 64, 3, None), (2, 5, 3, 0.5)]
