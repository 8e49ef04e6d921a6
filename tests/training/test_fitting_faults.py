"""Faults of a fit: each is named before it costs work, and the weights are kept."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autosym
from autosym import Schedule
from models import OPTIMISERS, draw, mlp


def refused(message, model, data, likelihood="categorical", error=ValueError, **options):
    with pytest.raises(error, match=message):
        autosym.fit(model, data, likelihood, **{"epochs": 2, **options})


@pytest.mark.fault(1)
@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("step", ["mackay", "none"])
def test_a_bad_input_is_named_and_the_weights_are_kept(step, value):
    model, (x, y) = mlp(5, 4, 3), draw("categorical", 12)
    x[7, 2] = value
    refused("inputs .*not finite", model, (x, y), step=step, batch_size=4)
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.fault(1)
def test_a_bad_target_is_named():
    x, y = draw("gaussian", 12)
    y[3, 1] = math.nan
    refused("targets .*not finite", mlp(5, 4, 3), (x, y), "gaussian")


@pytest.mark.fault(4)
def test_a_bad_weight_is_named():
    model = mlp(5, 4, 3)
    model[0].weight.data[1, 1] = math.nan
    refused("0.weight holds values that are not finite", model, draw("categorical", 12))


@pytest.mark.fault(5)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_model_in_half_precision(dtype):
    model, (x, y) = mlp(5, 4, 3).to(dtype), draw("categorical", 12)
    refused(rf"0.weight is {dtype}.*use model.float\(\)", model, (x.to(dtype), y))


@pytest.mark.fault(6)
def test_a_loader_that_drops_samples_is_refused_before_the_training():
    lines, loader = [], DataLoader(TensorDataset(*draw("categorical", 20)), 8, drop_last=True)
    refused("drop_last=True", mlp(5, 4, 3), loader, log=lines.append)
    assert not lines, "no work is lost"


@pytest.mark.fault(7)
@pytest.mark.parametrize("data", [[], (torch.zeros(0, 5), torch.zeros(0, dtype=torch.long))], ids=["list", "tensors"])
def test_empty_data(data):
    refused("the data are empty", mlp(5, 4, 3), data)


def test_a_generator_is_refused_as_it_can_be_read_once_only():
    x, y = draw("categorical", 12)
    refused("read only once", mlp(5, 4, 3), ((x[i : i + 4], y[i : i + 4]) for i in (0, 4, 8)))


@pytest.mark.fault(13)
@pytest.mark.parametrize("layer", [nn.BatchNorm1d(4, affine=False), nn.Dropout(0.5)], ids=lambda layer: type(layer).__name__)
def test_what_the_evidence_cannot_take_is_refused_before_the_training(layer):
    lines, model = [], nn.Sequential(nn.Linear(5, 4), layer, nn.Linear(4, 3)).double()
    refused(rf"1 \({type(layer).__name__}\).*model.eval\(\)", model, draw("categorical", 12), log=lines.append)
    assert not lines, "no work is lost"
    autosym.fit(model.eval(), draw("categorical", 12), epochs=1, step="none")


def test_targets_in_place_of_the_likelihood_say_how_to_call():
    x, y = draw("categorical", 6)
    for call in (autosym.fit, autosym.log_evidence):
        with pytest.raises(
            TypeError, match=r"^the likelihood is a Tensor: inputs and targets are one pair, as in \(model, \(x, y\)\)$"
        ):
            call(mlp(5, 4, 3), x, y)


def test_an_unknown_likelihood():
    refused("unknown likelihood 'cauchy': use 'categorical' or 'gaussian' or", mlp(5, 4, 3), draw("categorical", 6), "cauchy")


@pytest.mark.parametrize(
    ("drawn", "likelihood", "message"),
    [
        ("categorical", "gaussian", r"targets \(\d+,\) of type torch.int64 .*likelihood='categorical'"),
        ("gaussian", "categorical", "the categorical likelihood takes integer class indices"),
    ],
    ids=["labels for a gaussian", "numbers for a categorical"],
)
def test_a_likelihood_that_does_not_fit_the_targets(drawn, likelihood, message):
    refused(message, mlp(5, 4, 3), draw(drawn, 12), likelihood)


@pytest.mark.fault(11)
def test_labels_out_of_range():
    x, _ = draw("categorical", 12)
    refused("labels run from 3 to 3, but the model has 3 outputs", mlp(5, 4, 3), (x, torch.full((12,), 3)))


def test_labels_out_of_range_are_named_from_all_that_are_at_hand():
    """Of two samples, which the model is checked by, a message on labels 1 to 3 would say 2 to 3, or 3 to 3."""
    x, y = torch.randn(12, 5), torch.arange(12) % 3 + 1
    for data in ((x, y), TensorDataset(x, y)):
        refused(r"labels run from 1 to 3,.* 4 outputs, one for each class$", mlp(5, 4, 3), data)
    message = r"labels run from 1 to 3,.* .in the first batch: no other was read.$"
    refused(message, mlp(5, 4, 3), DataLoader(TensorDataset(x, y), 6))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("step", "laplace"),
        ("epochs", 0),
        ("batch_size", 0),
        ("every", 0),
        ("burn_in", -1),
        ("lr", 0.0),
        ("lr", -1.0),
        ("lr", math.nan),
        ("momentum", 1.0),
        ("momentum", -0.1),
        ("damping", 0.0),
        ("damping", 1.1),
        ("optimiser", "lbfgs"),
        ("trust", -1.0),
        ("clip", 0.0),
        ("warmup", -0.5),
        ("start_cap", 0.0),
        ("hyper_lr", 0.0),
        ("hyper_steps", 0),
        ("epochs", "10"),
        ("epochs", 2.5),
        ("batch_size", None),
        ("subset", "all"),
        ("lr", "0.1"),
    ],
)
def test_a_bad_field_of_the_schedule_is_named(field, value):
    with pytest.raises(ValueError, match=field):
        Schedule(**{field: value})
    refused(field, mlp(5, 4, 3), draw("categorical", 12), **{field: value})


def test_a_field_that_is_no_number_is_told_to_be_one():
    with pytest.raises(ValueError, match=r"cannot have epochs = '10' \(a whole number\), lr = 'x' \(a number\)$"):
        Schedule(epochs="10", lr="x")
    Schedule(epochs=np.int64(3), lr=np.float32(0.1), momentum=0, every=None)


def test_an_unknown_keyword_is_named():
    refused("epoch", mlp(5, 4, 3), draw("categorical", 12), error=TypeError, epoch=3)
    refused("evidense_data", mlp(5, 4, 3), draw("categorical", 12), error=TypeError, evidense_data=None)


@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_an_exploding_rate_is_named(optimiser):
    """The proximal step alone holds any rate back; a prior that hardly holds does not."""
    options = {"lr": 1e200, "optimiser": optimiser, "prior_precision": 1e-300, "batch_size": 4, "epochs": 9}
    refused("lower lr", mlp(5, 4, 3), draw("gaussian", 12), "gaussian", **options)


def test_evidence_of_another_number_of_samples_is_refused():
    refused(
        "evidence_data holds 13 samples, data 20", mlp(5, 4, 3), draw("categorical", 20), evidence_data=draw("categorical", 13)
    )


def test_a_burn_in_as_long_as_the_run_is_refused():
    refused("burn_in", mlp(5, 4, 3), draw("categorical", 12), epochs=3, burn_in=3)
