"""Every entry point refuses the faults that ``fit`` refuses, with the same words, or has the stated behaviour."""

import copy
import math
import re

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import autosym
from autosym.evidence import gradient, kernel, laplace
from autosym.nn.symmetrised import symmetrise
from models import convnet, draw, mlp

fault = pytest.mark.fault
SHAPE = (2, 6, 5)  # of convnet


def images(samples=12):
    """The same whenever it is called."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return draw("categorical", samples, SHAPE)


def spoiled(value):
    x, y = images()
    x[7, 0, 1, 1] = value
    return x, y


def first_inputs(data):
    return data[0] if isinstance(data, tuple) else next(iter(data))[0]


def unfitted(model):
    """A relaxed model, or one that is averaged: what ``harden`` and a fit of ranges take."""
    return autosym.relax(model, images(4)[0])


ENTRY_POINTS = {
    "log_evidence": lambda model, data: autosym.log_evidence(model, data),
    "whole": lambda model, data: autosym.log_evidence(model, data, curvature="whole"),
    "fit": lambda model, data: autosym.fit(model, data, epochs=1, batch_size=4),
    "map": lambda model, data: autosym.fit(model, data, epochs=1, batch_size=4, step="none"),
    "kernel": lambda model, data: kernel.at(model, data),
    "compare": lambda model, data: autosym.compare({"one": model, "two": copy.deepcopy(model)}, data, epochs=1),
    "symmetrise": lambda model, data: autosym.fit(symmetrise(model, "rotation", 2), data, epochs=1),
    "relax": lambda model, data: autosym.relax(model, first_inputs(data)),
    "harden": lambda model, data: autosym.harden(unfitted(model), data),
    "equivariance": lambda model, data: autosym.equivariance_error(model, "translations", data),
}
OF_EVIDENCE = ("log_evidence", "whole", "fit", "map", "kernel", "compare", "symmetrise")
OF_DATA = (*OF_EVIDENCE, "harden", "equivariance")
OF_MODELS = (*OF_EVIDENCE, "relax")


def refused(entry, message, model, data):
    with pytest.raises(ValueError, match=message) as raised:
        ENTRY_POINTS[entry](model, data)
    text = str(raised.value)
    assert re.search(r"[:;] \S", text), f"it says what is wrong and what to do: {text}"


@pytest.mark.parametrize("entry", [*OF_DATA, "relax"])
@pytest.mark.parametrize(
    "value", [pytest.param(math.nan, marks=fault(1), id="nan"), pytest.param(-math.inf, marks=fault(2), id="inf")]
)
def test_an_input_that_is_not_finite(entry, value):
    message = "example is empty, or not finite" if entry == "relax" else r"inputs .*not finite \(NaN or Inf\) in rows \[\d\]"
    refused(entry, message, convnet(), spoiled(value))


@fault(3)
@pytest.mark.parametrize("entry", [*OF_EVIDENCE, "relax", "harden"])
def test_inputs_that_are_huge(entry):
    """They are refused where they overflow, by name; where nothing does they are no fault."""
    model, (x, y) = convnet().float(), images()
    data = (x * 1e20).float(), y
    if entry in OF_EVIDENCE:
        refused(entry, r"(factor \w|kernel|output) of .*weight.*overflow.* torch.float32.*rescale", model, data)
    data = (x * 3e38).float().clamp(-3e38, 3e38), y
    refused(entry, "overflow.*rescale", model, data)


@fault(4)
@pytest.mark.parametrize("entry", [*OF_MODELS, "harden"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_weight_that_is_not_finite(entry, value):
    model = convnet()
    model[2].weight.data[0, 0, 0, 0] = value
    refused(entry, r"2.weight holds values that are not finite \(NaN or Inf\): load or initialise it anew", model, images())


@fault(4)
def test_a_weight_that_was_spoiled_after_relaxing():
    model = unfitted(convnet())
    next(model.parameters()).data.fill_(math.nan)
    with pytest.raises(ValueError, match=r"outputs of the model on the data are not finite.*check the weights"):
        autosym.harden(model, images())


@fault(5)
@pytest.mark.parametrize("entry", OF_MODELS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_model_in_half_precision(entry, dtype):
    refused(entry, rf"0.weight is {dtype}: .*use model.float\(\)", convnet().to(dtype), images())


@fault(6)
@pytest.mark.parametrize("entry", OF_EVIDENCE)
def test_a_loader_that_drops_samples(entry):
    refused(entry, "drop_last=True.*set drop_last=False", convnet(), DataLoader(TensorDataset(*images()), 5, drop_last=True))


@fault(6)
def test_a_loader_that_drops_samples_trains_beside_evidence_of_all():
    loader = DataLoader(TensorDataset(*images()), 5, drop_last=True)
    fit = autosym.fit(convnet(), loader, epochs=2, evidence_data=images())
    assert fit.evidence.samples == 12


@fault(7)
@pytest.mark.parametrize("entry", [*OF_DATA, "relax"])
def test_no_samples(entry):
    x, y = images()
    message = "example is empty" if entry == "relax" else "data are empty[:,] no batch (held|has) a sample"
    with pytest.raises(ValueError, match=message):
        ENTRY_POINTS[entry](convnet(), (x[:0], y[:0]))


@fault(8)
@pytest.mark.parametrize("entry", ENTRY_POINTS)
def test_one_sample_is_no_fault(entry):
    ENTRY_POINTS[entry](convnet(), images(1))


class Flow(IterableDataset):
    def __iter__(self):
        return iter(zip(*images(), strict=True))


@fault(9)
@pytest.mark.parametrize("entry", [entry for entry in OF_DATA if entry != "kernel"])
def test_data_without_a_length_are_counted(entry):
    ENTRY_POINTS[entry](convnet(), Flow())


@fault(9)
def test_kernel_evidence_chooses_samples_so_it_needs_their_number():
    refused("kernel", "needs data whose length is known: pass tensors", convnet(), Flow())


@fault(10)
@pytest.mark.parametrize(
    "entry", [lambda *a: autosym.log_evidence(*a), lambda *a: autosym.fit(*a, epochs=1), lambda *a: kernel.at(*a)]
)
def test_flat_targets_against_one_output(entry):
    x, y = draw("gaussian", 6, outputs=1)
    with pytest.raises(ValueError, match=r"targets \(\d,\).*do not match outputs \(\d, 1\): use targets\[:, None\]"):
        entry(mlp(5, 4, 1), (x, y[:, 0]), "gaussian")


@fault(11)
@pytest.mark.parametrize("entry", [*OF_EVIDENCE, "harden"])
def test_labels_that_are_none(entry):
    x, y = images()
    refused(entry, "labels run from . to ., but the model has 3 outputs, so they must lie in 0..2", convnet(), (x, y + 3))
    one_hot = nn.functional.one_hot(y, 3)
    refused(entry, r"targets of shape \(N, 3\) .* one-hot.*use targets.argmax\(1\)", convnet(), (x, one_hot))


@pytest.mark.parametrize("entry", OF_EVIDENCE)
def test_models_that_end_in_a_softmax(entry):
    model = nn.Sequential(convnet(), nn.Softmax(1))
    refused(
        entry, r"outputs of the model are probabilities, by .*1 \(Softmax\): .*; leave it out of the model", model, images()
    )


@fault(12)
@pytest.mark.parametrize("entry", OF_DATA)
def test_a_single_class_is_no_fault(entry):
    x, y = images()
    ENTRY_POINTS[entry](convnet(), (x, 0 * y))


def normalised(layer, train=True):
    first, *rest = convnet()
    return nn.Sequential(first, layer.double(), *rest).train(train)


@fault(13)
@pytest.mark.parametrize("entry", OF_MODELS)
def test_batch_normalisation_in_train_mode(entry):
    model = normalised(nn.BatchNorm2d(4).requires_grad_(False))
    refused(entry, r"1 \(BatchNorm2d\) uses the statistics of the batch.*call model.eval\(\)", model, images())


@fault(13)
@pytest.mark.parametrize("entry", ENTRY_POINTS)
@pytest.mark.parametrize("trainable", [True, False], ids=["trainable", "frozen"])
def test_batch_normalisation_in_eval_mode_is_no_fault(entry, trainable):
    ENTRY_POINTS[entry](normalised(nn.BatchNorm2d(4).requires_grad_(trainable), train=False), images())


@fault(14)
@pytest.mark.parametrize("entry", ENTRY_POINTS)
@pytest.mark.parametrize("layer", [nn.GroupNorm(2, 4), nn.LayerNorm((4, 6, 5))], ids=lambda layer: type(layer).__name__)
def test_normalisation_of_each_sample_is_no_fault(entry, layer):
    ENTRY_POINTS[entry](normalised(copy.deepcopy(layer)), images())


@fault(14)
@pytest.mark.parametrize("entry", OF_EVIDENCE)
@pytest.mark.parametrize("layer", [nn.InstanceNorm2d(4, affine=True), nn.PReLU()], ids=lambda layer: type(layer).__name__)
def test_other_layers_with_parameters(entry, layer):
    kind = type(layer).__name__
    refused(
        entry,
        rf"no path owns the parameter .*1.weight of {kind}: .*requires_grad_\(False\)",
        normalised(copy.deepcopy(layer)),
        images(),
    )


@fault(14)
def test_relax_freezes_them_and_says_so():
    relaxed = autosym.relax(normalised(nn.PReLU()), images()[0])
    notes = {note.layer: note for note in relaxed.relaxation.layers}
    assert (notes["1"].outcome, notes["1"].kind) == ("frozen", "PReLU")
    assert "evidence does not cover" in notes["1"].note


@fault(15)
@pytest.mark.parametrize("entry", OF_EVIDENCE)
def test_layers_that_are_no_path(entry):
    first, activation, _, *rest = convnet()
    model = nn.Sequential(first, activation, nn.ConvTranspose2d(4, 2, (1, 1)).double(), *rest[:-1], nn.Linear(60, 3).double())
    refused(entry, "no path owns the parameter .*2.weight of ConvTranspose2d: .*freeze it", model, images())


@fault(16)
@pytest.mark.parametrize("entry", ENTRY_POINTS)
def test_a_grouped_convolution_is_no_fault(entry):
    ENTRY_POINTS[entry](convnet(groups=2), images())


@fault(17)
@pytest.mark.parametrize("entry", OF_MODELS)
def test_the_same_layer_twice(entry):
    shared = nn.Conv2d(2, 2, 3, padding=1)
    model = nn.Sequential(shared, nn.Tanh(), shared, nn.Flatten(), nn.Linear(60, 3)).double()
    refused(entry, r"0(.weight, .*0.bias)? .*is used (more than once|2 times) .*make one layer for each use", model, images())


@fault(17)
@pytest.mark.parametrize("entry", OF_MODELS)
def test_tied_weights(entry):
    model = nn.Sequential(
        nn.Conv2d(2, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, 2, 3, padding=1), nn.Flatten(), nn.Linear(60, 3)
    ).double()
    model[2].weight = model[0].weight
    refused(entry, "2.weight and .*0.weight are the same parameter: .*untie", model, images())


@fault(18)
@pytest.mark.parametrize("entry", ENTRY_POINTS)
def test_in_place_activations_are_no_fault(entry):
    plain, in_place = convnet(), None
    in_place = copy.deepcopy(plain)
    in_place[1] = in_place[3] = nn.ReLU(inplace=True)
    data = images()
    if entry == "log_evidence":
        assert autosym.log_evidence(in_place, data) == pytest.approx(autosym.log_evidence(plain, data), abs=1e-9)
    ENTRY_POINTS[entry](in_place, data)


@fault(19)
@pytest.mark.parametrize("entry", OF_MODELS)
def test_dropout_in_train_mode(entry):
    refused(entry, r"1 \(Dropout\) is in train mode, .*call model.eval\(\)", normalised(nn.Dropout(0.5)), images())


@fault(20)
@pytest.mark.parametrize("entry", OF_EVIDENCE)
def test_nothing_to_train(entry):
    refused(
        entry, r"no trainable parameter.*unfreeze some by requires_grad_\(True\)", convnet().requires_grad_(False), images()
    )


class Spare(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.spare = convnet(), nn.Linear(5, 3).double()

    def forward(self, x):
        return self.used(x)


@fault(20)
@pytest.mark.parametrize("entry", OF_EVIDENCE)
def test_a_layer_that_is_not_used(entry):
    refused(entry, "spare.weight, .*spare.bias took no part in the forward pass.*freeze", Spare(), images())


@fault(21)
@pytest.mark.parametrize("entry", [entry for entry in OF_DATA if entry != "equivariance"])
@pytest.mark.parametrize("change", [lambda x: 0 * x, lambda x: 0 * x + 1], ids=["zero", "constant"])
def test_inputs_without_variance_are_no_fault(entry, change):
    x, y = images()
    ENTRY_POINTS[entry](convnet(), (change(x), y))


# ---- a fit's own methods


@pytest.fixture(scope="module")
def fitted():
    torch.manual_seed(0)
    return autosym.fit(unfitted(convnet()), images(), epochs=1)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(lambda: spoiled(math.nan), r"not finite \(NaN or Inf\) in rows \[7\]", marks=fault(1), id="nan"),
        pytest.param(lambda: tuple(t[:0] for t in images()), "data hold no samples", marks=fault(7), id="empty"),
        pytest.param(lambda: (images()[0], images()[1] + 3), "labels run from", marks=fault(11), id="labels"),
        pytest.param(
            lambda: (images()[0][:, :, :3], images()[1]), r"maps \('B', 2, 6, 5\), got .*resize", marks=fault(25), id="size"
        ),
    ],
)
def test_a_report_on_bad_data_is_refused_and_not_written(fitted, data, message, tmp_path):
    pytest.importorskip("jinja2")
    with pytest.raises(ValueError, match=message):
        fitted.report(tmp_path / "report.html", data())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("x", "message"),
    [
        pytest.param(lambda: spoiled(math.nan)[0], r"not finite .*in rows \[7\]: drop or mend them", marks=fault(1), id="nan"),
        pytest.param(lambda: images()[0][:0], "are empty: give at least one sample", marks=fault(7), id="empty"),
        pytest.param(lambda: images()[0][:, :, :3], r"maps \('B', 2, 6, 5\), got .*resize", marks=fault(25), id="size"),
    ],
)
def test_a_predictive_at_bad_inputs_is_refused(fitted, x, message):
    with pytest.raises(ValueError, match=message):
        fitted.predictive(x())


# ---- augmentation that changes between passes


class Augmented(Dataset):
    """The images, each flipped at random whenever it is asked for."""

    def __init__(self):
        self.x, self.y = images()

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        return (self.x[index].flip(-1) if torch.rand(()) < 0.5 else self.x[index]), self.y[index]


@fault(25)
def test_the_evidence_of_randomly_augmented_data_is_of_what_that_pass_was_shown():
    """And two fits of it are not of the same inputs, which a comparison says."""
    model, data = convnet(), Augmented()
    one, two = (laplace.at(model, data).curvature.fingerprint for _ in range(2))
    assert not torch.allclose(one, two, rtol=1e-6), "a flip is seen"
    torch.testing.assert_close(
        *(laplace.at(model, images()).curvature.fingerprint for _ in (torch.manual_seed(0), torch.manual_seed(0)))
    )
    fits = {name: autosym.fit(convnet(), data, epochs=1) for name in ("one", "two")}
    assert any("its inputs differ from the inputs of other models" in warning for warning in autosym.compare(fits).warnings)


@fault(25)
def test_a_gradient_of_the_evidence_refuses_data_that_changed_between_its_passes():
    model, data = symmetrise(convnet(), "rotation", 2), Augmented()
    with pytest.raises(ValueError, match=r"random augmentation that changes between passes.*evidence_data"):
        autosym.fit(model, data, epochs=1)
    fit = autosym.fit(model, data, epochs=1, evidence_data=images())
    assert fit.evidence.samples == 12
    assert gradient.gradient(model, images(), fit.prior, fit.laplace, {"raw": model.transformations.raw})
