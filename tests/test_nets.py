import pytest
import torch

from autosym import nets

SMALL = {"channels": (1, 2, 2), "strides": (1, 2, 2), "hidden": 4, "width": 2}
COUNTS = [
    ("fc", 3, 10, 133_635_690),
    ("conv", 3, 10, 338_770),
    ("fc+conv", 3, 10, 133_865_010),
    ("f-fc", 3, 10, 1_542_625),
    ("f-fc+conv", 3, 10, 1_771_945),
    ("fc", 1, 40, 112_683_400),
    ("conv", 1, 40, 357_820),
    ("f-fc+conv", 1, 40, 1_750_035),
]


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(("name", "channels", "classes", "expected"), COUNTS)
def test_parameter_counts(name, channels, classes, expected):
    with torch.device("meta"):
        assert count(nets.build(name, (channels, 32, 32), classes, width=10)) == expected


@pytest.mark.parametrize("name", nets.NAMES)
def test_parameter_counts_per_block(name):
    formulas = {
        "fc": lambda c, hw, d, kl: d * kl * (c * hw + 1),
        "conv": lambda c, hw, d, kl: 9 * c * d + d,
        "f-fc": lambda c, hw, d, kl: c * d * (hw + kl) + d + kl,
    }
    with torch.device("meta"):
        net = nets.build(name, (3, 32, 64), 10, width=2)
    channels, positions = 3, 32 * 64
    for block, multiple, stride in zip(net.blocks, (1, 2, 2, 4, 4, 8, 8, 16), (1, 2, 1, 2, 1, 2, 2, 2), strict=True):
        sizes = (channels, positions, 2 * multiple, positions // stride**2)
        assert {path: count(module) for path, module in block.items()} == {p: formulas[p](*sizes) for p in name.split("+")}
        channels, positions = sizes[2:]
    assert count(net.hidden) + count(net.output) == 32 * 128 + 128 + 128 * 10 + 10


@pytest.mark.parametrize("name", nets.NAMES)
@pytest.mark.parametrize("size", [(8, 8), (4, 12)], ids=str)
def test_a_sample_does_not_depend_on_its_batchmates(name, size):
    net = nets.build(name, (3, *size), 5, **SMALL).double()
    x = torch.randn(7, 3, *size, dtype=torch.float64)
    y = net(x)
    assert y.shape == (7, 5)
    for i in range(7):
        torch.testing.assert_close(y[i : i + 1], net(x[i : i + 1]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", nets.NAMES)
def test_outputs_depend_on_the_input_and_reach_every_parameter(name):
    net = nets.build(name, (1, 8, 8), 3, **SMALL).double()
    y = net(torch.randn(20, 1, 8, 8, dtype=torch.float64))
    y.square().sum().backward()
    assert y.detach().std(0).min() > 0
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in net.parameters())


def shift_error(name, size, **shape):
    net = nets.build(name, (2, *size), 4, **shape).double()
    x = torch.randn(4, 2, *size, dtype=torch.float64)
    y = net(x).detach()
    errors = [(net(x.roll(shift, (-2, -1))).detach() - y).abs().max() for shift in [(1, 0), (0, 1), (3, 2), (7, 5)]]
    return float(max(errors) / y.std(0).max())


@pytest.mark.parametrize(
    ("size", "shape"),
    [((32, 32), {"width": 2}), ((32, 64), {"width": 2}), ((64, 32), {"width": 2}), ((8, 12), SMALL), ((8, 8), SMALL)],
    ids=["32x32", "32x64", "64x32", "8x12 small", "8x8 small"],
)
def test_equivariant_conv_network_is_invariant_to_circular_shifts(size, shape):
    assert shift_error("conv", size, **shape) < 1e-9


@pytest.mark.parametrize("name", [name for name in nets.NAMES if name != "conv"])
def test_equivariant_negative_control_networks_with_a_free_path(name):
    assert shift_error(name, (8, 12), **SMALL) > 0.01


@pytest.mark.fault(25)
@pytest.mark.parametrize(
    ("size", "message"),
    [((28, 32), "height 28"), ((32, 48), "width 48"), ((16, 16), "height 16")],
    ids=str,
)
def test_sizes_that_do_not_halve_are_refused(size, message):
    with pytest.raises(ValueError, match=rf"{message}.*product of strides 32"):
        nets.build("conv", (1, *size), 10)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "mlp"}, "unknown network 'mlp': join different paths of conv, fc, f-fc"),
        ({"name": "conv+conv"}, "unknown network 'conv[+]conv'"),
        ({"in_shape": (32, 32)}, r"in_shape must be \(channels, height, width\), got \(32, 32\)"),
        ({"channels": (1, 2)}, "2 channels and 8 strides"),
    ],
    ids=["name", "twice", "in_shape", "channels"],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        nets.build(**{"name": "conv", "in_shape": (1, 32, 32), "classes": 10, **arguments})


def test_inputs_of_another_size_are_refused():
    net = nets.build("conv", (1, 8, 8), 3, **SMALL)
    with pytest.raises(ValueError, match=r"built for inputs \('B', 1, 8, 8\), got \(2, 1, 8, 12\)"):
        net(torch.randn(2, 1, 8, 12))
