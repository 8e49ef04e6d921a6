import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autosym
from architectures import LeNet
from autosym.curvature.owners import sites
from autosym.curvature.verification import verify
from autosym.linear.group_conv import GroupConv
from autosym.linear.groups import GROUPS, generated, rotation
from autosym.nn.layers import Relaxed
from autosym.nn.sampling import Downsample
from liftable import LIFTABLE, built, noisy

EXACT = [name for name, group in GROUPS.items() if group.exact]
FREE = {"gconv:c4": ("f-fc",), "pool": ("rest",)}  # beside the path over the group
NETWORKS = pytest.mark.parametrize("name", LIFTABLE)


@pytest.mark.parametrize("match", ["channels", "parameters"])
@pytest.mark.parametrize("group", EXACT)
@NETWORKS
def test_lifted_networks_are_exactly_invariant(name, group, match):
    model, x = built(name)
    lifted = noisy(autosym.lift(model, x, group, match))
    assert lifted(x).shape == model(x).shape
    autosym.assert_equivariant(lifted, group, x, 1e-11)
    spread = lifted(x).std(0)
    assert (spread > 1e-6).all(), "outputs that do not depend on the image are invariant to anything"


@NETWORKS
def test_plain_networks_are_not(name):
    """The negative control: what the lifted networks gain is not theirs by chance."""
    model, x = built(name)
    assert autosym.equivariance_error(model, "c4", x).output()["c4"] > 1e-3


@NETWORKS
def test_every_layer_of_a_lifted_network_follows(name):
    model, x = built(name)
    lifted = noisy(autosym.lift(model, x, "c4"))
    rows = list(autosym.equivariance_error(lifted, "c4", x))
    flat = [row for row in rows if row.kind == "Flatten" and name in ("grouped", "odd")]  # of maps, whose positions move
    assert max(row.error for row in rows if row not in flat) < 1e-11
    assert len([row for row in rows if row.compared == "lifted map"]) >= 2


@NETWORKS
def test_networks_lifted_to_translations_follow_every_shift(name):
    model, x = built(name)
    if name == "odd":
        with pytest.raises(
            ValueError, match=r"0 \(Conv2d\) cannot be lifted: its map of 15x15 has no polyphase grids of stride 2"
        ):
            autosym.lift(model, x, "translations")
        return
    x = x[..., :8, :8] if name == "subclasses" else x  # where its own padding differs by side
    lifted = noisy(autosym.lift(model, x, "translations"))
    autosym.assert_equivariant(lifted, "translations", x, 1e-12)
    assert autosym.equivariance_error(model, "translations", x).output()["translations"] > 1e-3


def moved(lifted, x, shift):
    """|f(shift x) - f(x)| / |f(x)|."""
    with torch.no_grad():
        f, g = lifted(x), lifted(x.roll(shift, (-2, -1)))
    return float((f - g).norm() / f.norm())


@pytest.mark.parametrize(
    ("name", "total", "one"),
    [("resnet", 2, True), ("bottlenecks", 8, True), ("separable", 8, True), ("excited", 2, True), ("dense", 2, False)],
)
def test_shifts_of_networks_lifted_to_a_group(name, total, one):
    """With circular padding: exact by the total stride; by one pixel too, unless a pool of even windows stays."""
    model, x = built(name)
    lifted = noisy(autosym.lift(model, x, "d4", padding="circular"))
    assert moved(lifted, x, (total, -total)) < 1e-11
    assert (moved(lifted, x, (1, 0)) < 1e-11) == one
    zeros = noisy(autosym.lift(model, x, "d4"))
    assert moved(zeros, x, (total, -total)) > 1e-3


def test_layers_that_pad_become_circular():
    """With circular padding only: zeros turn with the map, but do not follow shifts."""
    torch.manual_seed(0)
    parts = [nn.ZeroPad2d(1), nn.Conv2d(3, 8, 3), nn.ReLU(), nn.ConstantPad2d(1, 0.5), nn.MaxPool2d(3, 2)]
    model = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)).double().eval()
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    for group, padding, follows in (("c4", None, False), ("c4", "circular", True), ("translations", None, True)):
        lifted = noisy(autosym.lift(model, x, group, padding=padding))
        autosym.assert_equivariant(lifted, group, x, 1e-11)
        assert (moved(lifted, x, (1, 0)) < 1e-11) == follows


def test_branches_share_the_choice_of_a_grid():
    """With choices of their own, turns are still followed exactly, but shifts by one pixel are not."""
    model, x = built("resnet")
    lifted = noisy(autosym.lift(model, x, "c4", padding="circular"))
    layers = [module for module in lifted.modules() if isinstance(module, Downsample)]
    assert [sorted(layer.leads) for layer in layers] == [[], [(8, 8, 2)]]  # the shortcut is met first
    assert moved(lifted, x, (1, 0)) < 1e-11
    for layer in layers:
        layer.leads, layer.follows = {(8, 8, 2)}, set()
    autosym.assert_equivariant(lifted, "c4", x, 1e-11)
    assert moved(lifted, x, (1, 0)) > 1e-3


def test_a_part_of_a_network_does_not_reuse_an_old_choice():
    model, x = built("resnet")
    lifted = autosym.lift(model, x, "c4")
    lifted(x)
    inner = lifted.stem(x)
    with pytest.raises(RuntimeError, match="ran without the one whose grid it shares: run the whole network"):
        lifted.layer2.conv1(inner)
    copied = copy.deepcopy(lifted)
    assert copied.layer2.conv1[1].grids is copied.layer2.downsample[0][1].grids is not lifted.layer2.conv1[1].grids
    torch.testing.assert_close(copied(x), lifted(x), rtol=0, atol=0)
    with pytest.raises(ValueError, match="lifted for inputs of 8x8, got 12x12"):
        lifted(torch.randn(1, 1, 12, 12, dtype=torch.float64))


@pytest.mark.parametrize("group", ["c4", "d4"])
def test_channels_are_matched(group):
    """As many channels in all; a quarter or an eighth of the parameters of inner convolutions."""
    order = len(GROUPS[group])
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3, bias=False), nn.Flatten(), nn.Linear(32 * 16, 3))
    lifted = autosym.lift(model, torch.randn(2, 3, 8, 8), group)
    first, second = (path.weight for path in lifted.modules() if isinstance(path, GroupConv))
    assert first.numel() == 16 // order * 3 * 9
    assert second.numel() == 32 * 16 * 9 // order
    assert lifted[:3](torch.randn(1, 3, 8, 8)).shape == (1, 32, 4, 4)
    before, after = lifted.lifting.parameters
    assert (before, after) == tuple(sum(p.numel() for p in m.parameters()) for m in (model, lifted))


def test_parameters_are_matched():
    """A wide network: inner convolutions hold most parameters, and have as many as before, but for rounding."""
    model = nn.Sequential(
        nn.Conv2d(3, 64, 3),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3),
        nn.ReLU(),
        nn.Conv2d(64, 96, 3),
        nn.Flatten(),
        nn.Linear(96 * 4, 3),
    )
    for group, tolerance in (("c2", 0.04), ("c4", 0.04), ("d4", 0.05)):
        before, after = autosym.lift(model, torch.randn(2, 3, 8, 8), group, "parameters").lifting.parameters
        assert abs(after / before - 1) < tolerance, (group, before, after)


def test_widths_that_the_group_does_not_divide_are_rounded_up():
    """Also where a residual and a concatenation need them to agree: 6 and 10 channels are 2 and 3 fields, their concatenation 5."""

    class Uneven(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
            self.three, self.norm, self.head = nn.Conv2d(6, 10, 1), nn.BatchNorm2d(16), nn.Linear(16, 2)

        def forward(self, x):
            x = F.relu(self.one(x))
            x = x + self.two(x)
            return self.head(F.relu(self.norm(torch.cat([x, self.three(x)], 1))).amax((2, 3)))

    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    lifted = autosym.lift(Uneven().double().eval(), x, "c4")
    assert lifted.norm[1].num_features == 5
    autosym.assert_equivariant(noisy(lifted), "c4", x, 1e-11)
    assert "2 to 3 fields" in str(lifted.lifting)


def test_joined_vectors_are_fields_side_by_side():
    """The mean and the largest value of every channel: eight fields, of which none is averaged with another."""

    class Joined(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(32, 2)

        def forward(self, x):
            x = F.relu(self.conv(x))
            return self.head(torch.cat([x.mean((2, 3)), x.amax((2, 3))], 1))

    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    lifted = autosym.lift(Joined().double(), x, "c4")
    assert lifted.head["pool"].linear.weight.shape == (1, 2, 8)
    autosym.assert_equivariant(noisy(lifted), "c4", x, 1e-11)


def test_pools_on_odd_maps_that_are_called_as_functions():
    """13 and 4: what is left of windows of 2 is a row at one side, so a polyphase grid is chosen in its place."""
    model, x = LeNet().double(), torch.randn(2, 1, 17, 17, dtype=torch.float64)
    lifted = autosym.lift(model, x, "d4")
    assert {note.became for note in lifted.lifting.layers} >= {"MaxPool2d of stride 1", "kept"}
    autosym.assert_equivariant(noisy(lifted), "d4", x, 1e-11)


@pytest.mark.parametrize(
    "middle",
    [
        nn.InstanceNorm2d(8),
        nn.PReLU(),
        nn.Dropout2d(),
        nn.Upsample(scale_factor=2),
        nn.AvgPool2d(3, 1, 1),
        nn.AdaptiveMaxPool2d(3),
    ],
)
def test_layers_that_turn_by_themselves(middle):
    parts = (
        nn.Conv2d(3, 8, 3, padding=1),
        middle,
        nn.ReLU(),
        nn.Conv2d(8, 8, 3),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 2),
    )
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    lifted = autosym.lift(nn.Sequential(*parts).double().eval(), x, "d4", "parameters")
    autosym.assert_equivariant(noisy(lifted), "d4", x, 1e-11)


def test_pools_that_are_called_as_functions_become_modules_where_they_must():
    class Functions(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 2)

        def forward(self, x):
            x = F.max_pool2d(F.relu(self.conv(x)), 2)
            return self.head(F.adaptive_avg_pool2d(x.tanh(), 1).flatten(1))

    model, x = Functions().double(), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    lifted = autosym.lift(model, x, "translations")
    autosym.assert_equivariant(lifted, "translations", x, 1e-12)
    assert "max_pool2d_0" in [note.layer for note in lifted.lifting.layers]
    kept = autosym.lift(model, x, "c4")
    assert type(kept) is Functions, "windows of 2 on an even map turn with it, so forward() is left as it is"


@pytest.mark.parametrize("name", ["tutorial", "resnet", "excited", "separable", "grouped", "all convolutional"])
def test_the_evidence_covers_lifted_networks_and_harden_gives_plain_ones(name):
    model, x = built(name)
    for group in ("c4", "translations"):
        lifted = noisy(autosym.lift(model, x, group))
        assert sum(site.parameter.numel() for site in sites(lifted)) == sum(p.numel() for p in lifted.parameters())
        verify(lifted, x)
        if group == "c4":
            plain = autosym.harden(lifted, (x, torch.arange(4) % 3))
            assert not hasattr(plain, "lifting")
            assert not any(isinstance(module, (Relaxed, GroupConv)) for module in plain.modules())
            torch.testing.assert_close(plain(x), lifted(x), rtol=0, atol=1e-11)
            autosym.assert_equivariant(plain, "c4", x, 1e-11)
            lifted = plain
        exported = torch.export.export(lifted, (x,)).module()
        torch.testing.assert_close(exported(x), lifted(x), rtol=0, atol=1e-11)


@NETWORKS
def test_relaxed_lifted_networks_compute_the_same_and_may_break_the_group(name):
    model, x = built(name)
    lifted = noisy(autosym.lift(model, x, "c4", padding="circular"))
    relaxed = autosym.relax(lifted, x)
    torch.testing.assert_close(relaxed(x), lifted(x), rtol=0, atol=1e-11)
    layers = [module for module in relaxed.modules() if isinstance(module, Relaxed)]
    steps = ("turn:c4", "turn:c2")
    own = [next(iter(layer)) for layer in layers]
    free = [layer.free for layer in layers]
    assert [tuple(layer)[1:] for layer in layers] == [(*steps, *each) for each in free]
    assert set(zip(own, free, strict=True)) <= {(path, each) for path in ("gconv:c4", "pool") for each in ((), FREE[path])}
    assert [layer.keeps(path).group for path, layer in zip(own, layers, strict=True)] == ["c4"] * len(layers)
    assert ("pool" in own) == (name != "all convolutional"), "the head has its chain too"
    assert (("pool", ("rest",)) in zip(own, free, strict=True)) == (name in ("tutorial", "grouped", "odd")), "if it saw maps"
    for broken, kept in (("turn:c4", "c2"), ("turn:c2", "")):
        for layer in layers:
            assert layer.keeps(broken).group == kept
            assert broken in layer.silent()
            for parameter in layer[broken].parameters():
                nn.init.normal_(parameter, std=0.3)
        errors = autosym.equivariance_error(relaxed, ["c4", "c2"], x).output()
        assert errors["c4"] > 1e-3
        assert errors["c2"] < 1e-9 if kept else errors["c2"] > 1e-3
    if name in ("resnet", "bottlenecks", "separable", "excited"):
        assert moved(relaxed, x, (1, 0)) < 1e-11, "all of them keep shifts"


def test_relax_of_a_lifted_network_names_layers():
    model, x = built("resnet")
    lifted = autosym.lift(model, x, "c4")
    relaxed = autosym.relax(lifted, x, {"layer1.conv1": "s-fc"}, learn_normalisation=True)
    assert relaxed.relaxation.names("relaxed") == ("layer1.conv1",)
    assert tuple(relaxed.layer1.conv1) == ("gconv:c4", "turn:c4", "turn:c2", "s-fc")
    assert "layer2.conv2" in relaxed.relaxation.names("kept")
    assert sum(site.parameter.numel() for site in sites(relaxed)) == sum(p.numel() for p in relaxed.parameters())
    with pytest.raises(ValueError, match="the model already has an attribute relaxation"):
        autosym.relax(relaxed, x)


@pytest.mark.filterwarnings("ignore:.*evidence.*")
def test_fit_of_a_lifted_network():
    model, x = built("resnet", torch.float32)
    lifted = autosym.lift(model, x, "c4", "parameters")
    data = torch.randn(24, *x.shape[1:]), torch.arange(24) % 3
    fit = autosym.fit(lifted, data, epochs=3)
    assert fit.symmetry().broken_share("c4") == {path.layer: 0.0 for path in fit.symmetry()}
    autosym.assert_equivariant(fit.model, "c4", x, 1e-4)
    plain = autosym.harden(fit)
    torch.testing.assert_close(plain(x), fit.model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("group", ["c4", "translations"])
def test_wide_layers_are_trained(group):
    """A dense layer of many weights is covered by the evidence: only scales and shifts may be too wide for it."""
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 16, 100), nn.ReLU(), nn.Linear(100, 50))
    lifted = autosym.lift(model, torch.randn(2, 3, 6, 6), group)
    assert all(parameter.requires_grad for parameter in lifted.parameters())
    assert max(parameter.numel() for parameter in lifted.parameters()) > 4096


def test_the_mode_of_the_given_model_is_kept():
    model, x = built("resnet")
    assert not any(module.training for module in autosym.lift(model, x, "c4").modules())
    assert all(module.training for module in autosym.lift(model.train(), x, "c4").modules())
    assert all(module.training for module in model.modules())


def test_a_group_of_ones_own():
    half = generated("half", rotation(180))
    model, x = built("resnet")
    autosym.assert_equivariant(noisy(autosym.lift(model, x, half)), "c2", x, 1e-11)


def test_flips_take_rectangles():
    model = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 4 * 6, 2)).double()
    x = torch.randn(2, 3, 8, 12, dtype=torch.float64)
    autosym.assert_equivariant(noisy(autosym.lift(model, x, "flip-horizontal")), "flip-horizontal", x, 1e-11)
    autosym.assert_equivariant(noisy(autosym.lift(model, x, "translations")), "translations", x, 1e-12)


@pytest.mark.parametrize("group", ["c4", "translations"])
def test_a_lifted_network_refuses_images_of_another_size(group):
    model, x = built("resnet")
    lifted = autosym.lift(model, x, group)
    hard = [autosym.harden(lifted, (x, torch.arange(len(x)) % 3))] if group == "c4" else []
    for one in (lifted, copy.deepcopy(lifted), *hard):
        with pytest.raises(ValueError, match=r"this model was lifted for inputs of 8x8, got 4x4: resize them"):
            one(x[..., :4, :4])


@pytest.mark.parametrize("group", ["c4", "translations"])
def test_lifted_networks_run_in_several_threads_at_once(group):
    """Branches share the choice of a grid: each thread must have its own."""
    model, x = built("resnet")
    lifted = noisy(autosym.lift(model, x, group))
    inputs = [torch.randn_like(x) for _ in range(8)]
    with torch.no_grad():
        expected = [lifted(each) for each in inputs]
    for _ in range(3):
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda each: lifted(each).detach(), inputs))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_hardened_lifted_networks_export_with_any_batch():
    model, x = built("resnet")
    plain = autosym.harden(autosym.lift(model, x, "c4"), (x, torch.arange(len(x)) % 3))
    exported = torch.export.export(plain, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},)).module()
    torch.testing.assert_close(exported(x[:3]), plain(x[:3]), rtol=0, atol=1e-11)


@pytest.mark.parametrize("group", ["translations", "c4"])
def test_a_head_has_the_weights_and_the_bias_that_were_given(group):
    """On constant images, whose maps do not change along the orbit, a projected network computes what the given one does."""
    torch.manual_seed(0)
    conv, dense = nn.Conv2d(1, 4, 3, padding=1, padding_mode="circular"), nn.Linear(4 * 36, 3)
    if group == "c4":  # all channels of the one field are the same
        with torch.no_grad():
            conv.weight.copy_(torch.stack([conv.weight[0].rot90(turns, (1, 2)) for turns in range(4)]))
            conv.bias.fill_(0.3)
    model = nn.Sequential(conv, nn.ReLU(), nn.Flatten(), dense).double().eval()
    x = torch.randn(5, 1, 1, 1, dtype=torch.float64).expand(5, 1, 6, 6).contiguous()
    found = autosym.lift(model, x, group, **({} if group == "translations" else {"weights": "projected"}))
    torch.testing.assert_close(found(x), model(x), rtol=0, atol=1e-12)


def test_a_frozen_head_stays_frozen_when_it_is_lifted_to_translations():
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3)).eval()
    model[3].weight.requires_grad_(False)
    found = autosym.lift(model, torch.randn(2, 1, 6, 6), "translations")
    assert [p.requires_grad for p in found[3].parameters()] == [False, True]
