"""Small print: what once went wrong unseen."""

import copy
import math

import pytest
import torch
from torch import nn

import autosym
from autosym import layers
from autosym.convolutions import circular_conv
from autosym.curvature import kfac
from autosym.likelihoods import Categorical
from autosym.sites import verify
from models import curvature, draw, mlp, randomised


def test_omega_changed_without_a_version_is_seen():
    """As by a graph's replay, or .data: the basis kept while weights are aside is stale."""
    model = randomised(
        nn.Sequential(layers.s_conv((2, 4, 6), (3, 4, 6), 4, learn_omega=True), nn.Tanh(), layers.fc((3, 4, 6), (3,)))
    )
    data = draw("categorical", 6, (2, 4, 6))
    curvature(model, data)
    model[0].linear.basis.omega.data.fill_(3.0)
    fresh = copy.deepcopy(model)
    fresh[0].linear.basis._kept = None
    torch.testing.assert_close(curvature(model, data).factors["0.linear"].A, curvature(fresh, data).factors["0.linear"].A)


@pytest.mark.parametrize("change", [lambda y: y[:10], lambda y: torch.cat([y, y])], ids=["fewer", "more"])
def test_targets_of_another_number(change):
    x, y = draw("categorical", 20)
    with pytest.raises(ValueError, match="20 inputs but"):
        autosym.fit(mlp(5, 4, 3), (x, change(y)), evidence_data=(x, y), epochs=1, batch_size=8)


def test_no_limit():
    kfac(mlp(5, 4, 3), draw("categorical", 6), Categorical(), memory=math.inf)


def test_bytes_do_not_depend_on_the_batch_the_samples_are_of():
    model, (x, _) = mlp(5, 4, 3), draw("categorical", 4096)
    assert verify(model, x[:2]) == pytest.approx(verify(model, x[:2].clone()), rel=0.01)


def test_frozen_weights_are_no_activations():
    model, (x, _) = mlp(5, 500, 500, 3), draw("categorical", 2)
    whole = verify(model, x)
    model[2].requires_grad_(False)
    assert verify(model, x) < 2 * whole


@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_layer_that_finds_no_memory_is_named(n):
    model, calls = mlp(5, 4, 4, 4, 3), []

    def short(*_):
        calls.append(1)
        if len(calls) == n:
            raise torch.OutOfMemoryError("CUDA out of memory")

    model[4].register_forward_pre_hook(short)
    with pytest.raises(MemoryError, match=r"pass at 4\."):
        curvature(model, draw("categorical", 20), batch_size=5)


def test_autocast_leaves_float64_as_torch_does():
    x, w = torch.randn(2, 3, 5, 5).double(), torch.randn(4, 3, 3, 3).double()
    with torch.autocast("cpu", torch.bfloat16):
        assert circular_conv(x, w).dtype == nn.functional.conv2d(x, w).dtype


def test_a_checkpoint_of_version_1(tmp_path):
    from safetensors.torch import save_file

    from autosym import checkpoint

    data = draw("categorical", 12)
    autosym.fit(mlp(5, 4, 3), data, epochs=2, checkpoint=tmp_path / "c")
    tensors, state = checkpoint.read(tmp_path / "c")
    old = {k: v for k, v in tensors.items() if k not in ("weights/steps", "weights/rates", "generator/noise")}
    import json

    save_file(old, tmp_path / "c", {"format": checkpoint.FORMAT, "version": "1", "state": json.dumps(state | {"steps": 2})})
    with pytest.raises(ValueError, match="version 1|older"):
        autosym.fit(mlp(5, 4, 3), data, epochs=2, checkpoint=tmp_path / "c", resume=True)


def test_warn_only_is_kept():
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        autosym.fit(mlp(5, 4, 3), draw("categorical", 12), epochs=1, step="none", deterministic=True)
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_augmentation_in_place_of_listed_batches():
    x, y = draw("categorical", 20)
    data, before = [(x[:10], y[:10]), (x[10:], y[10:])], x.clone()
    autosym.fit(mlp(5, 4, 3), data, epochs=1, step="none", augment=lambda x, _: x.zero_())
    assert torch.equal(x, before)


def test_polyphase_of_maps_without_channels():
    from autosym.layers import polyphase

    assert polyphase(torch.randn(2, 4, 4), 2).shape == (2, 2, 2)


def test_shuffling_and_noise_are_independent():
    from autosym.batching import Stream

    s = Stream(draw("categorical", 20), 8, mlp(5, 4, 3), lambda y: None, 0)
    assert not torch.equal(torch.randperm(20, generator=s.shuffle), torch.randperm(20, generator=s.noise))
