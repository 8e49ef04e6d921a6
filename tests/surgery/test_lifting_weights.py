"""Weights of lifted networks: new ones, projected ones, and those that translations keep."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autosym
from autosym.linear.group_conv import GroupConv
from autosym.linear.groups import GROUPS
from liftable import built, noisy, shaken

EXACT = [name for name, group in GROUPS.items() if group.exact]


def orbit_mean(filters, group, lift):
    """The projection by its definition: the mean over h of K[h g', h g, h s], for filters (C' |G|, C |G|, k, k)."""
    order = len(group)
    total = torch.zeros_like(filters)
    fields = filters.unflatten(0, (-1, order))
    for h in range(order):
        moved = group.act(h, fields)  # K[., ., h^-1 s]
        back = group.table[group.inverse[h]]
        moved = moved[:, back]
        if not lift:
            moved = moved.unflatten(2, (-1, order))[:, :, :, back].flatten(2, 3)
        total += moved.flatten(0, 1)
    return total / order


@pytest.mark.parametrize("group", EXACT)
def test_projected_weights_are_the_orthogonal_projection(group):
    group = GROUPS[group]
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 16, 3), nn.Flatten(), nn.Linear(16 * 4, 3)
    ).double()
    model = shaken(model).eval()
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    lifted = autosym.lift(model, x, group, weights="projected")
    for index, lift in ((0, True), (2, False)):
        (path,) = (part for part in lifted[index].modules() if isinstance(part, GroupConv))
        expected = orbit_mean(model[index].weight.detach(), group, lift)
        torch.testing.assert_close(path.filters().detach(), expected, rtol=0, atol=1e-12)
        bias = model[index].bias.detach().unflatten(0, (-1, len(group))).mean(1)
        torch.testing.assert_close(lifted[index][f"gconv:{group.name}"].bias.values().flatten().detach(), bias)
    projected = nn.Linear(64, 3).double()  # the mean of f over the group, whose action also moves positions
    by_field = model[4].weight.detach().view(3, 16 // len(group), -1)
    projected.weight.data = by_field.mean(2, keepdim=True).expand(by_field.shape).reshape(3, -1)
    features = torch.randn(2, 64, dtype=torch.float64)
    torch.testing.assert_close(lifted[4](features), F.linear(features, projected.weight, model[4].bias))
    norm, fields = lifted[1][1], torch.randn(2, 8, 4, 4, dtype=torch.float64)
    statistics = model[1].running_mean.unflatten(0, (-1, len(group)))
    torch.testing.assert_close(norm.running_mean, statistics.mean(1))
    second = (model[1].running_var + model[1].running_mean ** 2).unflatten(0, (-1, len(group))).mean(1)
    torch.testing.assert_close(norm.running_var, second - statistics.mean(1) ** 2)
    assert lifted[1](fields).shape == fields.shape
    autosym.assert_equivariant(lifted, group, x, 1e-11)


def test_projected_weights_of_depthwise_convolutions():
    """A depthwise convolution is one over fields whose filters are zero between channels of a field."""
    group, x = GROUPS["c4"], torch.randn(2, 3, 6, 6, dtype=torch.float64)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, groups=8), nn.Flatten(), nn.Linear(8 * 16, 2)).double()
    lifted = autosym.lift(model, x, "c4", weights="projected")
    (path,) = (part for part in lifted[1].modules() if isinstance(part, GroupConv))
    weight, expected = model[1].weight.detach(), torch.zeros(8, 4, 3, 3, dtype=torch.float64)
    for channel in range(8):
        expected[channel, channel % 4] = weight[channel, 0]
    torch.testing.assert_close(path.filters().detach(), orbit_mean(expected, group, False), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["excited", "all convolutional", "grouped"])
def test_projected_weights_of_an_equivariant_network_are_its_own(name):
    """A lifted network in plain convolutions, lifted again with its weights, computes the same function."""
    model, x = built(name)
    lifted = noisy(autosym.lift(model, x, "c2"))
    plain = autosym.harden(lifted, (x, torch.arange(4) % 3), tolerance=0)
    trained = copy.deepcopy(model)
    rows = {note.layer: note for note in lifted.lifting.layers}
    for layer, module in trained.named_modules():
        if isinstance(module, (nn.Conv2d, nn.Linear, nn.BatchNorm2d, nn.BatchNorm1d, nn.GroupNorm)) and layer in rows:
            _copy_back(module, plain.get_submodule(layer), rows[layer].became)
    again = autosym.lift(trained, x, "c2", weights="projected")
    torch.testing.assert_close(again(x), lifted(x), rtol=0, atol=1e-11)


def _copy_back(module, lifted, became):
    """The weights of a lifted layer, in the given layer of as many channels."""
    own = [part for part in lifted.modules() if list(part.parameters(recurse=False))]
    (source,) = own
    for key, tensor in module.state_dict().items():
        value = source.state_dict()[key]
        if became == "invariant dense" and key == "weight":
            repeats = tensor.shape[1] // value.shape[1]
            value = (value / repeats).repeat_interleave(repeats, 1)
        elif value.dim() == 1 and len(value) < len(tensor):
            value = value.repeat_interleave(len(tensor) // len(value))
        elif value.dim() and len(value) != len(tensor):  # the last convolution: the mean over its fields
            value = value.unflatten(0, (len(tensor), -1)).mean(1)
        tensor.copy_(value.reshape(tensor.shape))


def test_new_weights_have_the_variance_of_group_convolutions():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 64, 3), nn.Conv2d(64, 64, 3), nn.Flatten(), nn.Linear(64 * 16, 3), nn.ReLU(), nn.Linear(3, 2)
    )
    nn.init.constant_(model[5].weight, 7.0)
    lifted = autosym.lift(model, torch.randn(2, 3, 8, 8), "c4")
    paths = [part for part in lifted.modules() if isinstance(part, GroupConv)]
    for path in paths:
        assert abs(float(path.weight.detach().square().mean()) * path.weight.shape[2] / 2 - 1) < 0.2
    assert float(lifted[5].weight.detach().abs().max()) < 1, "a dense layer of the head starts anew too"
    assert float(model[5].weight.detach().min()) == 7, "the given model is left as it was"


def test_translations_keep_trained_weights():
    """Where nothing had to change, the function is the same; a flattened head is the sum over positions, of the mean."""
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular")
    strict = nn.Sequential(conv, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)).double()
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    lifted = autosym.lift(strict, x, "translations")
    torch.testing.assert_close(lifted(x), strict(x), rtol=0, atol=0)
    assert {note.became for note in lifted.lifting.layers} == {"kept"}
    flat = nn.Sequential(conv, nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3)).double()
    mean = torch.stack([flat(x.roll((i, j), (-2, -1))) for i in range(6) for j in range(6)]).mean(0)
    torch.testing.assert_close(autosym.lift(flat, x, "translations")(x), mean)  # linear in the maps: the mean over the orbit
