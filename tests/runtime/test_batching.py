"""Batches of training: the order, what is checked and when, and augmentation by a generator of its own."""

import math
import zlib
from functools import partial

import numpy as np
import pytest
import torch
from torch.testing import assert_close
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

import autosym
from autosym.bayes.likelihoods import Categorical
from autosym.runtime import batching
from autosym.runtime.batching import Stream, all_finite, batches, check_loader, to_model
from models import Samples, draw, mlp


def loader(x, y):
    return DataLoader(TensorDataset(x, y), 7, shuffle=True, generator=torch.Generator().manual_seed(5))


KINDS = {
    "tensors": lambda x, y: (x, y),
    "list of tensors": lambda x, y: [x, y],
    "tensor dataset": TensorDataset,
    "dataset": Samples,
    "loader": loader,
    "list of batches": lambda x, y: [(x[:3], y[:3]), (x[3:], y[3:])],
}
RESIDENT = ("tensors", "list of tensors", "tensor dataset")


def numbered(samples=20):
    """Data whose rows are known by their first feature."""
    x, y = draw("categorical", samples)
    x[:, 0] = torch.arange(samples)
    return x, y


def stream(data, batch_size=8, seed=0, check=None, augment=None, model=None):
    check = check or partial(Categorical().check, 3)
    return Stream(data, batch_size, model or mlp(5, 4, 3), check, seed, augment)


def equal(one, two):
    one, two = list(one), list(two)
    return len(one) == len(two) and all(
        torch.equal(a, b) for pair in zip(one, two, strict=True) for a, b in zip(*pair, strict=True)
    )


class Endless(IterableDataset):
    """Samples whose number nobody knows."""

    def __iter__(self):
        return iter(zip(*numbered(), strict=True))


def test_a_loader_that_may_drop_samples_is_refused():
    """Where their number is not known, or is not a multiple of the batch."""
    for data in (Endless(), TensorDataset(*numbered(20))):
        with pytest.raises(ValueError, match="drop_last=True"):
            check_loader(DataLoader(data, 8, drop_last=True))
        check_loader(DataLoader(data, 8, drop_last=True), allow_partial=True)
        check_loader(DataLoader(data, 8))
    check_loader(DataLoader(TensorDataset(*numbered(16)), 8, drop_last=True))


# ---- the order


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("samples", "batch_size"), [(20, 8), (20, 20), (20, 100), (21, 1), (100, 3)])
def test_a_stream_has_the_batches_of_its_generator(samples, batch_size, kind):
    """Also where there are more than are gathered at a time."""
    data = numbered(samples)
    generator, plain, found = torch.Generator().manual_seed(4), KINDS[kind](*data), stream(KINDS[kind](*data), batch_size, 4)
    epochs = [list(found.epoch(number)) for number in (1, 2, 3)]
    assert all(equal(epoch, batches(plain, batch_size, generator)) for epoch in epochs)
    if "batches" not in kind:
        assert not equal(epochs[0], epochs[1]) or samples == 1, "each epoch has an order of its own"
    for epoch in epochs:
        seen = torch.cat([x[:, 0] for x, _ in epoch]).int()
        assert sorted(seen.tolist()) == list(range(samples))
        assert torch.equal(torch.cat([y for _, y in epoch]), data[1][seen.long()]), "targets go with their inputs"


def test_which_data_are_kept_where_the_model_is():
    x, y = numbered()
    for kind, make in KINDS.items():
        found = stream(make(x, y))
        assert (found.resident is not None) is (kind in RESIDENT), kind


def test_batches_are_in_the_precision_of_the_model_and_the_data_stay_as_they_were():
    x, y = draw("gaussian", 10)
    before = x.clone(), y.clone()
    for kind in KINDS:
        data = KINDS[kind](x, y)
        for inputs, targets in stream(data, 4, check=lambda y: None, model=mlp(5, 4, 3).float()).epoch(1):
            assert inputs.dtype == targets.dtype == torch.float32
    assert torch.equal(x, before[0])
    assert torch.equal(y, before[1])
    assert x.dtype == torch.float64


@pytest.mark.parametrize(
    ("free", "here", "fits"), [(1e9, False, True), (4 * 320 + 1, False, True), (4 * 320, False, False), (0, True, True)]
)
def test_data_stay_on_a_gpu_if_they_take_less_than_a_quarter_of_what_is_free(free, here, fits, monkeypatch):
    """Small integers count as the floating-point numbers they may become."""
    tensors = torch.zeros(16, 4), torch.zeros(16, dtype=torch.uint8)  # 256 and 64 bytes
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 10**10))
    device = tensors[0].device if here else torch.device("cuda")
    assert batching._fits(tensors, device) is fits


# ---- what is checked


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_are_checked_once_and_other_data_batch_by_batch(kind):
    checked = []
    found = stream(KINDS[kind](*numbered()), check=lambda y: checked.append(len(y)))
    assert checked == ([20] if kind in RESIDENT else [])
    for number in (1, 2):
        list(found.epoch(number))
    assert sum(checked) == (20 if kind in RESIDENT else 40)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_inputs_that_are_not_finite_are_named(kind, value):
    x, y = numbered()
    x[7, 2] = value
    if kind in RESIDENT:
        with pytest.raises(ValueError, match=r"the inputs of the data are not finite \(NaN or Inf\) in rows \[7\]"):
            stream(KINDS[kind](x, y))
        return
    found = stream(KINDS[kind](x, y))
    with pytest.raises(ValueError, match=r"the inputs of a batch of epoch 3 are not finite .*rows \[\d+\] of that batch"):
        list(found.epoch(3))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda x, y: (x, y.where(torch.arange(20) != 11, 3)), "labels run from .* to 3, but the model has 3 outputs"),
        (lambda x, y: (x, y.where(torch.arange(20) != 11, -1)), "labels run from -1 to"),
        (lambda x, y: (x, y.double()), "not class indices"),
        (lambda x, y: (x, torch.nn.functional.one_hot(y, 3)), "one-hot"),
        (lambda x, y: (x.long(), y), "inputs are torch.int64: convert them to floating point"),
    ],
    ids=["too large", "negative", "float", "one-hot", "integers"],
)
def test_data_that_do_not_suit_are_named(spoil, message, kind):
    with pytest.raises(ValueError, match=message):
        list(stream(KINDS[kind](*spoil(*numbered()))).epoch(1))


@pytest.mark.parametrize("kind", KINDS)
def test_targets_that_are_not_finite_are_named(kind):
    x, y = draw("gaussian", 20)
    y[3, 1] = math.nan
    with pytest.raises(ValueError, match=r"the targets of .* are not finite"):
        list(stream(KINDS[kind](x, y), check=lambda y: None).epoch(1))


@pytest.mark.parametrize(("change", "count"), [(lambda y: y[:10], 10), (lambda y: y.repeat(2), 40)], ids=["fewer", "more"])
@pytest.mark.parametrize("kind", ["tensors", "list of tensors"])
def test_targets_of_another_number_are_named(kind, change, count):
    """Also where the evidence has data of its own, which are whole."""
    x, y = numbered()
    data = KINDS[kind](x, change(y))
    with pytest.raises(ValueError, match=f"20 inputs but {count} targets"):
        stream(data)
    with pytest.raises(ValueError, match=f"20 inputs but {count} targets"):
        autosym.fit(mlp(5, 4, 3), data, evidence_data=(x, y), epochs=1, batch_size=8)


@pytest.mark.parametrize("kind", RESIDENT)
def test_a_bad_sample_of_tensors_is_found_before_the_first_step(kind):
    """Wherever it is: none is taken from a part of the data."""
    model, (x, y) = mlp(5, 4, 3), numbered()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for spoiled in ((x, y.where(torch.arange(20) != 11, 3)), (x.where(torch.arange(20)[:, None] != 11, math.nan), y)):
        lines = []
        with pytest.raises(ValueError, match=r"labels run from|inputs of the data are not finite"):
            autosym.fit(model, KINDS[kind](*spoiled), epochs=2, batch_size=1, log=lines.append)
        assert not lines
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


# ---- whether all is finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_values_are_finite_though_their_sum_is_not(dtype):
    largest = torch.finfo(dtype).max
    large = torch.full((5,), largest, dtype=dtype)
    assert torch.isinf(large.sum()), "the test would be empty"
    assert all_finite(large)
    assert all_finite(-large)
    assert all_finite(torch.cat([large, -large]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "values", [[math.inf, -math.inf], [math.nan], [0, math.inf], [-math.inf, 1], [math.inf, math.nan, -math.inf]], ids=str
)
def test_one_value_that_is_not_finite_is_seen_anywhere(values, dtype):
    for length in (len(values), 1000):
        t = torch.zeros(length, dtype=dtype)
        t[-len(values) :] = torch.tensor(values, dtype=dtype)
        assert not all_finite(t)
        assert not all_finite(t.reshape(-1, 1).expand(-1, 3))


def test_ordinary_and_empty_tensors_are_finite():
    assert all_finite(torch.randn(3, 4))
    assert all_finite(torch.zeros(0, 4))


def test_inputs_whose_sum_overflows_are_taken():
    x, y = torch.full((4, 5), 3e38), torch.zeros(4, dtype=torch.long)
    assert torch.equal(to_model(x, y, mlp(5, 4, 3).float(), "the data")[0], x)


# ---- augmentation


def jitter(x, noise):
    return x + 0.1 * torch.randn(x.shape, generator=noise, dtype=x.dtype, device=x.device)


@pytest.mark.parametrize("kind", KINDS)
def test_augmentation_gets_every_sample_once_an_epoch_with_a_generator_on_the_device(kind):
    calls = []

    def augment(x, noise):
        calls.append((x[:, 0].int().tolist(), x.dtype, noise))
        return -x

    model, data = mlp(5, 4, 3).float(), numbered(100)
    found, plain = (stream(KINDS[kind](*data), 2, 1, augment=a, model=model) for a in (augment, None))
    for number in (1, 2):
        calls.clear()
        augmented, other = list(found.epoch(number)), list(plain.epoch(number))
        assert equal([(-x, y) for x, y in augmented], other), "the same batches, augmented, with their own targets"
        assert sorted(row for rows, _, _ in calls for row in rows) == list(range(100))
        assert all(dtype == torch.float32 for _, dtype, _ in calls)
        assert all(noise is found.noise and noise.device == model[0].weight.device for _, _, noise in calls)


@pytest.mark.parametrize("kind", ["tensors", "dataset", "loader"])
def test_augmentation_depends_on_the_seed_alone(kind):
    data, model = numbered(), mlp(5, 4, 3)

    def drawn(seed, other):
        torch.manual_seed(other)
        found = stream(KINDS[kind](*data), seed=seed, augment=jitter, model=model)
        return [batch for number in (1, 2) for batch in found.epoch(number)]

    assert equal(drawn(3, 0), drawn(3, 1))
    assert not equal(drawn(3, 0), drawn(4, 0))


def test_the_global_generator_is_not_used():
    data, model, state = numbered(), mlp(5, 4, 3), torch.get_rng_state()
    list(stream(data, augment=jitter, model=model).epoch(1))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("seed", [0, 7])
def test_the_noise_of_augmentation_is_not_that_of_the_shuffle(seed):
    found = stream(numbered(), seed=seed)
    assert not torch.equal(torch.randperm(20, generator=found.shuffle), torch.randperm(20, generator=found.noise))


def test_epochs_are_augmented_anew():
    """Sample by sample: the same noise in each epoch would be no augmentation."""
    (x, y), noises = numbered(), []
    found = stream((x, y), augment=jitter)
    for number in (1, 2):
        for inputs, _ in found.epoch(number):
            rows = inputs[:, 0].round().long()
            noises.append(dict(zip(rows.tolist(), inputs - x[rows], strict=True)))
    first, second = ({k: v for part in noises[i : i + 3] for k, v in part.items()} for i in (0, 3))
    assert set(first) == set(second) == set(range(20))
    assert all((first[row] - second[row]).abs().max() > 1e-3 for row in first)


@pytest.mark.parametrize("kind", KINDS)
def test_augmentation_in_place_leaves_the_data_as_they_were(kind):
    x, y = numbered()
    for _ in range(2):
        list(stream(KINDS[kind](x, y), augment=lambda x, _: x.zero_()).epoch(1))
    assert x[:, 0].tolist() == list(range(20))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", ["mackay", "none"])
def test_the_evidence_is_never_augmented(kind, step):
    x, y = numbered()
    x, seen, model = x / 20, [], mlp(5, 4, 3)

    def augment(inputs, noise):
        seen.append(len(inputs))
        return inputs + 5 + torch.randn(inputs.shape, generator=noise, dtype=inputs.dtype)

    options = {"epochs": 3, "batch_size": 8, "burn_in": 0, "every": 1, "step": step}
    fit = autosym.fit(model, KINDS[kind](x, y), augment=augment, **options)
    assert sum(seen) == 4 * 20, "training alone, and the loss of the given model"
    exact = autosym.log_evidence(model, (x, y), prior_precision=fit.prior.precision())
    assert float(fit.evidence.log_evidence) == pytest.approx(exact, abs=1e-9)


def test_training_is_on_what_augmentation_returns():
    (x, y), start = numbered(), mlp(5, 4, 3).state_dict()
    fits = []
    for data, augment in (((2 * x, y), None), ((x, y), lambda x, _: 2 * x)):
        model = mlp(5, 4, 3)
        model.load_state_dict(start)
        fits.append(autosym.fit(model, data, augment=augment, epochs=3, batch_size=8, step="none"))
    assert [line["loss"] for line in fits[0].history] == pytest.approx([line["loss"] for line in fits[1].history], rel=1e-12)
    for ours, theirs in zip(*(fit.model.parameters() for fit in fits), strict=True):
        assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("shuffle", [None, 0])
def test_batches_of_tensors_are_copies(shuffle):
    """A model may change its input in place; the data stay as they are."""
    x, y = torch.arange(6.0)[:, None], torch.arange(6)
    for inputs, targets in batches((x, y), 4, None if shuffle is None else torch.Generator().manual_seed(shuffle)):
        inputs.zero_()
        targets.zero_()
    assert torch.equal(x[:, 0], torch.arange(6.0))
    assert torch.equal(y, torch.arange(6))


def test_a_loader_that_shows_every_process_its_part_takes_the_batches_of_all_together():
    dataset = TensorDataset(torch.zeros(24, 5), torch.zeros(24))
    sharded = DataLoader(dataset, 3, sampler=DistributedSampler(dataset, 2, 0))
    for data, parts, together in ((sharded, 1, 3), (sharded, 2, 6), (dataset, 2, 8)):
        assert Stream(data, 8, mlp(5, 4, 3), lambda y: None, seed=0, parts=parts).together == together


def test_bytes_are_those_of_the_numbers_whatever_the_strides():
    """``y[:, None]`` of numpy has a stride of 0, which torch calls contiguous and cannot view as bytes."""
    y = np.arange(6, dtype=np.float32)
    for tensor in (torch.as_tensor(y[:, None]), torch.as_tensor(y)[:, None], torch.arange(6.0).reshape(2, 3).mT.reshape(6, 1)):
        assert bytes(batching.raw(tensor)) == np.ascontiguousarray(tensor.numpy()).tobytes()
    assert batching.checksum((torch.as_tensor(y[:, None]), torch.as_tensor(y[:, None]))) == zlib.crc32(y.tobytes() * 2)
    assert bytes(batching.raw(torch.tensor(2.5))) == np.float32(2.5).tobytes()


def test_what_is_no_tensor_in_a_pair_is_named():
    with pytest.raises(TypeError, match=r"a pair of tensors, inputs and targets, got \(Tensor, list\): use torch.as_tensor"):
        next(batches((torch.zeros(3, 2), [0, 1, 1]), 2))
