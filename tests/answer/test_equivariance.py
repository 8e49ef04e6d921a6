import pytest
import torch
from torch import nn

import autosym
from autosym import assert_equivariant, equivariance_error
from autosym.linear import groups
from autosym.linear.conv import Conv
from autosym.linear.dense import Dense
from autosym.linear.group_conv import GroupConv
from autosym.linear.groups import GROUPS
from autosym.nn import layers, nets
from autosym.nn.layers import Relaxed

C4, D4 = GROUPS["c4"], GROUPS["d4"]


def images(channels=1, size=8, samples=6, dtype=torch.float64):
    return torch.randn(samples, channels, size, size, dtype=dtype)


def labelled(x):
    return x, torch.zeros(len(x), dtype=torch.long)


def cnn(padding_mode="circular"):
    """A plain torch network: a convolution, one with a stride, the mean over positions, a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, padding_mode=padding_mode),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, stride=2, padding=1, padding_mode=padding_mode),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    ).double()


def p4_net(name="gconv:c4", strides=(1, 2, 2)):
    net = nets.build(name, (1, 8, 8), 3, 2, (1, 2, 2), strides, hidden=4).double()
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.5)
    return net


def by_layer(found, group):
    return {row.layer: row.error for row in found if row.group == group}


# ---- assert_equivariant


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=str)
@pytest.mark.parametrize("group", [name for name in GROUPS if GROUPS[name].exact])
def test_assert_equivariant_passes_for_group_convolutions(group, dtype, tolerance):
    order = len(GROUPS[group])
    for path, channels in ((GroupConv(GROUPS[group], 2, 3, lift=True), 2), (GroupConv(GROUPS[group], 2, 3), 2 * order)):
        assert_equivariant(path.to(dtype), group, images(channels, dtype=dtype))
        assert_equivariant(path.to(dtype), GROUPS[group], images(channels, dtype=dtype), tolerance)


EVEN = {"conv": Conv(2, 3).double(), "relu": nn.ReLU(), "pool": nn.AvgPool2d(2), "square": torch.square}


@pytest.mark.parametrize("layer", EVEN.values(), ids=EVEN)
def test_assert_equivariant_passes_for_shifts_of_two_pixels_or_any(layer):
    if isinstance(layer, nn.AvgPool2d):  # every second shift only
        with pytest.raises(AssertionError, match="AvgPool2d is not equivariant to element 1 of translations"):
            assert_equivariant(layer, "translations", images(2))
    else:
        assert_equivariant(layer, "translations", images(2))


@pytest.mark.parametrize(
    ("layer", "group", "name"),
    [
        (Conv(2, 3).double(), "c4", "Conv is not equivariant to element 1 of c4"),
        (Conv(2, 3).double(), "flip-vertical", "Conv is not equivariant to element 1 of flip-vertical"),
        (Conv(2, 3, padding_mode="zeros").double(), "translations", "Conv is not equivariant to element 1 of translations"),
        (Dense((2, 8, 8), (3, 8, 8)).double(), "translations", "Dense is not equivariant to element 1 of translations"),
        (Dense((2, 8, 8), (3,)).double(), "c2", "Dense is not equivariant to element 1 of c2"),
        (GroupConv(C4, 2, 3, lift=True).double(), "d4", "GroupConv is not equivariant to element 4 of d4"),
        (nn.Conv2d(2, 3, 3).double(), "c4", "Conv2d is not equivariant to element 1 of c4"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_assert_equivariant_fails_and_names_layer_element_and_group(layer, group, name):
    with pytest.raises(AssertionError, match=rf"{name}: relative error \d"):
        assert_equivariant(layer, group, images(2))


def test_assert_equivariant_keeps_to_the_tolerance_and_sees_nan():
    off = nn.Parameter(torch.zeros(8, 8, dtype=torch.float64))
    off.data[0, 0] = 1e-6

    def nearly(x):
        return x + off

    assert_equivariant(nearly, "c4", images(2), tolerance=1e-3)
    with pytest.raises(AssertionError, match="function is not equivariant to element 1 of c4"):
        assert_equivariant(nearly, "c4", images(2))
    with pytest.raises(AssertionError, match="relative error nan"):
        assert_equivariant(lambda x: x * torch.nan, "c4", images(2))


def test_assert_equivariant_of_layers_that_downsample():
    paths = {f"gconv {k}": layers.gconv((2, 8, 8), (8, 8, 8), C4, True, k).double() for k in (1, 3)}
    for stride in (1, 2, 4):
        assert_equivariant(Relaxed(paths, {}, stride, C4), "c4", images(2, samples=20))
        assert_equivariant(Relaxed(paths, {}, stride, C4), "translations", images(2, samples=20))
    with pytest.raises(AssertionError, match="Conv is not equivariant"):
        assert_equivariant(Conv(2, 3, stride=2).double(), "translations", images(2))
    with pytest.raises(AssertionError, match="Relaxed is not equivariant"):
        assert_equivariant(Relaxed(paths, {"fc": layers.fc((2, 8, 8), (8, 4, 4)).double()}, 2, C4), "c4", images(2))


def test_assert_equivariant_of_a_group_convolution_to_translations():
    """The fields of lifted features move, and are not permuted by shifts."""
    for path, channels in ((GroupConv(C4, 2, 3, lift=True), 2), (GroupConv(C4, 2, 3), 8)):
        assert_equivariant(path.double(), "translations", images(channels, 4))


@pytest.mark.parametrize("lift", [True, False], ids=["lifting", "mixing"])
def test_assert_equivariant_of_a_group_convolution_to_its_product_with_translations(lift):
    path = GroupConv(C4, 2, 3, lift=lift).double()
    assert_equivariant(path, groups.with_translations(C4, 4, 4), images(2 if lift else 8, 4))
    with pytest.raises(AssertionError, match="is not equivariant to element"):
        assert_equivariant(path, groups.with_translations(D4, 4, 4), images(2 if lift else 8, 4))


@pytest.mark.parametrize("lift", [True, False], ids=["lifting", "mixing"])
def test_assert_equivariant_of_a_group_convolution_to_a_subgroup(lift):
    path = GroupConv(D4, 2, 3, lift=lift).double()
    for subgroup in ("c2", "c4", "flip-horizontal", "flip-vertical"):
        assert_equivariant(path, subgroup, images(2 if lift else 16))


def test_assert_equivariant_of_an_affine_layer_of_lifted_features():
    affine = layers.gconv((8, 8, 8), (12, 8, 8), C4, lift=False).double()
    nn.init.normal_(affine.bias.weight)
    assert_equivariant(affine, "c4", images(8))
    assert_equivariant(Relaxed({"gconv": affine}, {}, 2, C4), "c4", images(8))
    with pytest.raises(AssertionError, match="Affine is not equivariant to element 1 of c4"):
        assert_equivariant(layers.conv((8, 8, 8), (12, 8, 8)).double(), "c4", images(8))


# ---- equivariance_error


def test_equivariant_torch_network_is_measured_layer_by_layer():
    """Circular padding: shifts are exact up to the layer with the stride, which keeps every second pixel."""
    model = cnn()
    errors = by_layer(equivariance_error(model, "translations", labelled(images())), "translations")
    assert list(errors) == ["0", "1", "2", "3", "4", "5", "6", ""]
    assert errors["0"] < 1e-12
    assert errors["1"] < 1e-12
    assert errors["2"] > 0.01
    assert errors[""] == errors["6"] > 1e-3


def test_equivariant_torch_network_without_a_stride_is_invariant():
    model = nn.Sequential(*(part for i, part in enumerate(cnn()) if i not in (2, 3))).double()
    found = equivariance_error(model, ["translations", "c4"], labelled(images()))
    assert found.output()["translations"] < 1e-12
    assert found.output()["c4"] > 1e-3


def test_equivariant_negative_control_zero_padding():
    errors = by_layer(equivariance_error(cnn("zeros"), "translations", labelled(images())), "translations")
    assert errors["0"] > 0.1


class Somewhere(nn.Module):
    """Weights each position by itself: as far from a convolution as a layer can be."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, size))

    def forward(self, x):
        return x * self.weight


def padded_with_zeros(*first):
    """Two convolutions and the mean over positions: equivariant but for its border."""
    parts = [nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*first, *parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3, bias=False)).double()


@pytest.mark.parametrize(("size", "exact"), [(32, True), (16, False)])
def test_shifts_leave_the_border_of_zero_padding_alone(size, exact):
    """Circular shifts find the border alone; shifts find a layer that depends on the position.

    A frame of 4 pixels is wider than what two convolutions see, so that the mean over all positions is exact too; one of 2 is not.
    """
    torch.manual_seed(0)
    x, groups = images(size=size, samples=20), ["shifts", "translations"]
    found = equivariance_error(padded_with_zeros(), groups, x)
    shifts, circular = (by_layer(found, group) for group in groups)
    for layer in ("0", "1", "2", "3"):
        assert shifts[layer] < 1e-12 < 0.05 < circular[layer]
    assert shifts[""] < (1e-12 if exact else circular[""] / 2)
    broken = by_layer(equivariance_error(padded_with_zeros(Somewhere(size)), "shifts", x), "shifts")
    assert min(broken[layer] for layer in ("1", "2", "3", "4")) > 0.3
    assert broken[""] > max(0.02, 3 * shifts[""])


def test_shifts_are_exact_for_what_is_equivariant_on_the_torus():
    model = nn.Sequential(*(part for i, part in enumerate(cnn()) if i not in (2, 3))).double()
    found = equivariance_error(model, "shifts", images())
    assert max(row.error for row in found) < 1e-12
    assert {row.compared for row in found} == {"map", "invariant"}
    net = p4_net(strides=(1, 1, 1))
    assert max(by_layer(equivariance_error(net, "shifts", images()), "shifts").values()) < 1e-10


def test_shifts_are_windows_on_zeros_at_two_places_inside():
    """Of half a side, an eighth of a side away from the border, and moved by what the error moves them back by."""
    seen = []

    class Watching(nn.Module):
        def forward(self, x):
            seen.append(x.clone())
            return x

    x = 1 + images(size=16).abs()
    assert equivariance_error(Watching(), "shifts", x, elements=50).output()["shifts"] == 0
    corners = set()
    for before, after in zip(seen[::2], seen[1::2], strict=True):
        assert not torch.equal(before, after)
        for canvas in (before, after):
            _, _, rows, columns = canvas.nonzero(as_tuple=True)
            corners.add((int(rows.min()), int(columns.min())))
            assert (int(rows.max() - rows.min()), int(columns.max() - columns.min())) == (7, 7)
    assert {place for corner in corners for place in corner} == {2, 3, 4, 5, 6}
    with pytest.raises(ValueError, match="1 x 1 pixels cannot be shifted"):
        equivariance_error(nn.ReLU(), "shifts", images(size=1))
    for height, width in ((2, 1), (3, 3), (1, 5), (9, 4)):
        assert equivariance_error(nn.ReLU(), "shifts", torch.randn(2, 1, height, width)).output()["shifts"] == 0
    with pytest.raises(ValueError, match="equivariance_error also takes 'shifts'"):
        assert_equivariant(nn.ReLU(), "shifts", images())


def test_equivariant_our_network_knows_c4_and_not_d4():
    found = equivariance_error(p4_net(), ["c4", "d4", "translations"], labelled(images()))
    for layer in ("blocks.0", "blocks.1", "blocks.2", ""):
        assert by_layer(found, "c4")[layer] < 1e-10
        assert by_layer(found, "translations")[layer] < 1e-10
        assert by_layer(found, "d4")[layer] > 1e-3
    assert found.output() == {group: by_layer(found, group)[""] for group in ("c4", "d4", "translations")}
    assert {row.compared for row in found if row.layer == "blocks.1" and row.group == "c4"} == {"lifted map"}
    assert {row.compared for row in found if row.layer == ""} == {"invariant"}


def test_equivariant_lifted_maps_of_one_pixel_are_permuted():
    """Where the last map is 1x1 its fields still turn: it is equivariant, and not invariant."""
    found = equivariance_error(p4_net(strides=(2, 2, 2)), "c4", labelled(images()))
    assert max(by_layer(found, "c4").values()) < 1e-10


def test_equivariant_relaxed_network_with_a_free_path_is_not():
    errors = by_layer(equivariance_error(p4_net("f-fc+gconv:c4"), "c4", labelled(images())), "c4")
    assert min(errors.values()) > 1e-3


def test_the_error_is_its_formula():
    """The mean over elements (all three, here) and samples of |f(g x) - g f(x)| / |f(x)|."""
    model, x = cnn(), images()
    y = model[0](x).detach()
    gaps = [(model[0](C4.act(g, x)) - C4.act(g, y)).detach().flatten(1).norm(dim=1) for g in (1, 2, 3)]
    expected = float((torch.stack(gaps) / y.flatten(1).norm(dim=1)).mean())
    found = equivariance_error(model, "c4", labelled(x))
    assert by_layer(found, "c4")["0"] == pytest.approx(expected, rel=1e-9)
    logits = model(x).detach()
    gaps = [(model(C4.act(g, x)).detach() - logits).norm(dim=1) / logits.norm(dim=1) for g in (1, 2, 3)]
    assert found.output()["c4"] == pytest.approx(float(torch.stack(gaps).mean()), rel=1e-9)


def test_samples_elements_and_seed_are_used():
    model, x = cnn(), images(samples=20)
    one = equivariance_error(model, "translations", labelled(x), samples=3, elements=2, seed=1)
    assert one == equivariance_error(model, "translations", labelled(x[:3]), elements=2, seed=1)
    assert one != equivariance_error(model, "translations", labelled(x[:3]), elements=2, seed=2)
    assert one != equivariance_error(model, "translations", labelled(x), elements=2, seed=1)


def test_the_model_is_left_as_it_was():
    model = nn.Sequential(cnn(), nn.Dropout(0.5)).train()
    model[0][2].eval()
    modes = {name: module.training for name, module in model.named_modules()}
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    found = equivariance_error(model, "c4", labelled(images()))
    assert by_layer(found, "c4")["0.6"] == found.output()["c4"], "dropout was not in eval mode"

    class Failing(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.calls = model, 0

        def forward(self, x):
            self.calls += 1
            if self.calls > 1:
                raise RuntimeError("on the second call")
            return self.inner(x)

    with pytest.raises(RuntimeError, match="on the second call"):
        equivariance_error(Failing(), "c4", labelled(images()))
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name])


def test_the_table_shows_every_layer_and_group():
    d2 = groups.generated("d2", groups.rotation(180), groups.FLIP_VERTICAL)
    found = equivariance_error(cnn(), ["translations", "c4", "flip-horizontal", d2], labelled(images()))
    lines = str(found).splitlines()
    assert lines[0].split() == ["layer", "translations", "c4", "flip-horizontal", "d2"]
    assert [line.split()[0] for line in lines[2:]] == ["0", "1", "2", "3", "4", "5", "6", "(output)"]
    assert [line.split()[1] for line in lines[2:4]] == ["Conv2d", "ReLU"]
    for line in lines[2:]:
        assert len(line.split()) == 6
    assert f"{found.output()['c4']:.2g}" in lines[-1]
    net = str(equivariance_error(p4_net(), "c4", labelled(images())))
    assert [line.split()[0] for line in net.splitlines()[2:]] == ["blocks.0", "blocks.1", "blocks.2", "(output)"]


def test_a_loader_and_float64_images_of_a_float32_model_are_taken():
    x, y = labelled(images())
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 4)
    assert equivariance_error(cnn().float(), "c2", loader).output()["c2"] > 0


def test_inputs_without_labels_will_do():
    model, x = nn.Conv2d(1, 2, 3, padding=1), torch.randn(6, 1, 4, 4)
    assert equivariance_error(model, "c4", x, samples=5) == equivariance_error(model, "c4", (x[:5], torch.zeros(5)))


def test_a_model_without_parameters_is_measured():
    found = equivariance_error(nn.Sequential(nn.AvgPool2d(2), nn.ReLU()), ["c4", "translations"], labelled(images()))
    assert found.output()["c4"] < 1e-12 < found.output()["translations"]


@pytest.mark.fault(25)
@pytest.mark.parametrize("call", ["assert", "error"])
def test_what_cannot_be_measured_is_refused(call):
    def measure(model, group, x):
        if call == "assert":
            return assert_equivariant(model, group, x)
        return equivariance_error(model, group, labelled(x))

    with pytest.raises(ValueError, match=r"unknown group 'c5': use translations, c2, c4, d4, .* or a Group"):
        measure(cnn(), "c5", images())
    with pytest.raises(ValueError, match="c4 turns images, so they must be square, but this one is 8x6"):
        measure(cnn(), "c4", images()[..., :6])
    with pytest.raises(ValueError, match=r"shifts on a torus of \(4, 4\), but this image is 8x8"):
        measure(cnn(), groups.translations(4, 4), images())
    with pytest.raises(ValueError, match=r"groups act on images \(B, C, H, W\), but the inputs have shape \(6, 5\)"):
        measure(nn.Linear(5, 3).double(), "c4", torch.randn(6, 5, dtype=torch.float64))


def test_rectangles_are_measured_by_groups_that_do_not_turn():
    x = images()[..., :6]
    found = equivariance_error(cnn(), ["flip-horizontal", "c2", "translations"], labelled(x))
    assert set(found.output()) == {"flip-horizontal", "c2", "translations"}
    assert all(error > 1e-4 for error in found.output().values())
    assert by_layer(found, "translations")["0"] < 1e-12


def test_they_are_offered_by_the_package():
    assert autosym.assert_equivariant is assert_equivariant
    assert {"assert_equivariant", "equivariance_error"} <= set(autosym.__all__)
