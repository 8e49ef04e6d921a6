import math

import pytest
import torch

from autosym.linear.groups import GROUPS
from autosym.nn import nets

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
    ("s-fc", 3, 10, 831_820),
    ("s-conv", 3, 10, 287_910),
    ("s-fc+s-conv", 3, 10, 1_010_280),
]


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(("name", "channels", "classes", "expected"), COUNTS)
def test_parameter_counts(name, channels, classes, expected):
    with torch.device("meta"):
        assert count(nets.build(name, (channels, 32, 32), classes, width=10)) == expected


def test_parameter_counts_of_sparse_filters_follow_their_anchors():
    with torch.device("meta"):
        assert count(nets.build("s-conv", (3, 32, 32), 10, width=10, filter_anchors=4)) == 211_620


@pytest.mark.parametrize("name", ["s-fc", "s-conv", "s-fc+s-conv"])
def test_sparse_networks_of_the_paper_are_made(name):
    """With their least-squares fits, and finite."""
    net = nets.build(name, (3, 32, 32), 10, width=10)
    assert count(net) == next(c for n, _, _, c in COUNTS if n == name)
    assert all(torch.isfinite(parameter).all() for parameter in net.parameters())


@pytest.mark.parametrize(("name", "omegas"), [("s-fc", 16), ("s-conv", 8), ("s-fc+s-conv", 24)])
def test_a_prior_on_omega_adds_one_parameter_for_each_sparse_path(name, omegas):
    with torch.device("meta"):
        plain, learned = (nets.build(name, (3, 32, 32), 10, width=2, prior=prior) for prior in ("u", "omega"))
    added = dict(learned.named_parameters()).keys() - dict(plain.named_parameters()).keys()
    assert count(learned) - count(plain) == len(added) == omegas
    assert all(parameter.endswith(".basis.omega") for parameter in added)


@pytest.mark.parametrize("name", nets.NAMES)
def test_parameter_counts_per_block(name):
    formulas = {
        "fc": lambda c, hw, d, kl: d * kl * (c * hw + 1),
        "conv": lambda c, hw, d, kl: 9 * c * d + d,
        "f-fc": lambda c, hw, d, kl: c * d * (hw + kl) + d + kl,
        "s-conv": lambda c, hw, d, kl: 7 * c * d + d,
        "s-fc": lambda c, hw, d, kl: c * d * (hw // 2 + max(1, kl // 2)) + d,
        "where": lambda c, hw, d, kl: (9 * c * d + d) * {2: 1, 8: 3}.get(kl, 4),  # 1x2 and 2x4 maps have fewer waves
        "gconv:c4": lambda c, hw, d, kl: 9 * c * d // 4 + d // 4,  # a filter over all lifted channels for each field
        "turn:c4": lambda c, hw, d, kl: 3 * (9 * c * d // 4 + d // 4),  # the other three quarters of a convolution
    }
    order = 4 if "gconv" in name else 1
    width = 32 if "gconv" in name else 64
    with torch.device("meta"):
        net = nets.build(name, (3, 32, width), 10, width=2)
    channels, positions = 3, 32 * width
    for block, multiple, stride in zip(net.blocks, (1, 2, 2, 4, 4, 8, 8, 16), (1, 2, 1, 2, 1, 2, 2, 2), strict=True):
        sizes = (channels, positions, 2 * multiple * order, positions // stride**2)
        assert {path: count(module) for path, module in block.items()} == {p: formulas[p](*sizes) for p in name.split("+")}
        channels, positions = sizes[2:]
    assert count(net.hidden) + count(net.output) == 32 * 128 + 128 + 128 * 10 + 10


@pytest.mark.parametrize("name", nets.NAMES)
@pytest.mark.parametrize("size", [(8, 8), (4, 12)], ids=str)
def test_a_sample_does_not_depend_on_its_batchmates(name, size):
    if "gconv" in name:
        size = (4 * (size[0] // 4),) * 2
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


@pytest.mark.parametrize("name", [name for name in nets.NAMES if any(path in nets.FREE for path in name.split("+"))])
def test_equivariant_negative_control_networks_with_a_free_path(name):
    assert shift_error(name, (8, 8), **SMALL) > 0.01


@pytest.mark.parametrize("name", ["s-conv", "conv+s-conv", "gconv:c2", "conv+gconv:flip-vertical", "s-conv+conv+gconv:c2"])
def test_equivariant_networks_of_symmetric_paths_are_invariant_to_circular_shifts(name):
    assert shift_error(name, (8, 12), **SMALL) < 1e-9


# ---- groups

P4 = [
    pytest.param(8, (1, 2, 2), id="8 to 2"),
    pytest.param(8, (2, 2, 2), id="8 to 1"),
    pytest.param(16, (2, 2, 2), id="16 to 2"),
    pytest.param(6, (1, 2, 1), id="6 to 3"),
    pytest.param(10, (2, 1, 1), id="10 to 5"),
    pytest.param(12, (2, 2, 1), id="12 to 3"),
    pytest.param(8, (1, 1, 1), id="8, no stride"),
]


def invariance_error(name, size, strides, moves, dtype=torch.float64):
    """The largest change of a logit when the input is moved, relative to how logits differ between inputs."""
    net = nets.build(name, (2, size, size), 3, 2, (1, 2, 2), strides, hidden=4).to(dtype)
    for parameter in net.parameters():
        if parameter.abs().max() == 0:  # biases
            torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(8, 2, size, size, dtype=dtype)
    with torch.no_grad():
        y = net(x)
        return max(float((net(move(x)) - y).abs().max() / y.std(0).max()) for move in moves)


TURNS = [lambda x, k=k: x.rot90(k, (-2, -1)) for k in (1, 2, 3)]
FLIPS = [lambda x: x.flip(-1), lambda x: x.flip(-2), lambda x: x.mT]
ROLLS = [lambda x, s=s: x.roll(s, (-2, -1)) for s in [(1, 0), (0, 1), (3, 2), (5, 1)]]
BOTH = [lambda x, t=t, r=r: r(t(x)) for t in TURNS[:1] for r in ROLLS]


@pytest.mark.parametrize(("size", "strides"), P4)
@pytest.mark.parametrize("name", ["gconv:c4", "gconv:d4", "gconv:c4+gconv:d4"])
def test_equivariant_p4_networks_are_invariant_to_turns_and_shifts(name, size, strides):
    """Measured: at most 9e-15. Where D4 is alone, also to reflections; C4 knows none."""
    assert invariance_error(name, size, strides, TURNS + ROLLS + BOTH) < 1e-10
    assert (invariance_error(name, size, strides, FLIPS) < 1e-10) == (name == "gconv:d4")


@pytest.mark.parametrize("name", ["gconv:c4", "gconv:d4"])
def test_equivariant_p4_networks_in_float32(name):
    assert invariance_error(name, 8, (1, 2, 2), TURNS + ROLLS + BOTH, torch.float32) < 1e-4


@pytest.mark.parametrize("name", ["conv", "conv+gconv:c4", "f-fc+conv+gconv:c4", "f-fc+gconv:c4", "gconv:flip-horizontal"])
def test_equivariant_negative_control_networks_with_a_path_that_does_not_turn(name):
    assert invariance_error(name, 8, (1, 2, 2), TURNS) > 0.01


@pytest.mark.parametrize(
    ("name", "move"),
    [("gconv:c2", TURNS[1]), ("gconv:flip-horizontal", FLIPS[0]), ("gconv:flip-vertical", FLIPS[1])],
    ids=["c2", "flip-horizontal", "flip-vertical"],
)
def test_equivariant_networks_of_small_groups_are_invariant_to_them(name, move):
    assert invariance_error(name, 8, (1, 2, 2), [move, *ROLLS]) < 1e-10
    assert invariance_error(name, 8, (1, 2, 2), TURNS[:1]) > 0.01


@pytest.mark.fault(25)
@pytest.mark.parametrize(
    ("size", "strides", "message"),
    [
        ((8, 12), (1, 2, 2), "c4 turns images, so they must be square, but this one is 8x12"),
        ((7, 7), (1, 2, 1), "height 7 is not divisible by the product of strides 2: an odd map has no polyphase grids"),
        ((6, 6), (2, 2, 1), "height 6 is not divisible by the product of strides 4: an odd map .* pad or resize"),
    ],
    ids=["rectangle", "odd", "odd later"],
)
def test_equivariant_sizes_that_are_impossible_are_refused(size, strides, message):
    with pytest.raises(ValueError, match=message):
        nets.build("gconv:c4", (1, *size), 3, 2, (1, 2, 2), strides)


def test_the_network_of_table_3_has_its_size():
    """f-fc+conv+gconv:c4 with a = 2, one channel: every field is four channels, which other paths see as channels."""
    with torch.device("meta"):
        net = nets.build("f-fc+conv+gconv:c4", (1, 32, 32), 10, width=2)
    channels, positions, expected = 1, 1024, 32 * 128 + 128 + 128 * 10 + 10
    for multiple, stride in zip((1, 2, 2, 4, 4, 8, 8, 16), (1, 2, 1, 2, 1, 2, 2, 2), strict=True):
        out, smaller = 8 * multiple, positions // stride**2
        expected += channels * out * (positions + smaller) + out + smaller  # f-fc
        expected += 9 * channels * out + out  # conv
        expected += 9 * channels * 2 * multiple + 2 * multiple  # gconv: a filter for each field
        channels, positions = out, smaller
    assert count(net) == expected


def test_pooling_is_over_positions_and_the_group():
    net = nets.build("gconv:d4", (1, 8, 8), 3, **SMALL).double()
    assert net.order == 8
    assert [block.lifted.name for block in net.blocks] == ["d4"] * 3
    assert [block["gconv:d4"].linear.lift for block in net.blocks] == [True, False, False]
    assert net.hidden.linear.weight.shape[2] == 4, "width 2, times 2 fields of the last block"
    assert math.prod(net.blocks[0]["gconv:d4"].linear.weight.shape) == 2 * 9


@pytest.mark.parametrize("name", ["gconv:c3", "gconv", "c4", "gconv:", "gconv:c4+gconv:c4", "conv+"])
def test_unknown_groups_are_named(name):
    with pytest.raises(ValueError, match=r"unknown network .* gconv:GROUP by '\+', with GROUP one of " + ", ".join(GROUPS)):
        nets.build(name, (1, 8, 8), 3, **SMALL)


@pytest.mark.fault(25)
@pytest.mark.parametrize(
    ("size", "message"),
    [((28, 32), "height 28"), ((32, 48), "width 48"), ((16, 16), "height 16")],
    ids=str,
)
def test_sizes_that_do_not_halve_are_refused(size, message):
    with pytest.raises(ValueError, match=rf"{message}.*product of strides 32"):
        nets.build("conv", (1, *size), 10)


def kept_by(name):
    """By path of a network, the largest group that it keeps."""
    block = nets.build(name, (1, 8, 8), 3, **SMALL).blocks[1]
    return {path: block.keeps(path).group for path in block}


def test_a_turn_keeps_the_next_smaller_group_that_has_one():
    assert kept_by("gconv:c4+turn:c4") == {"gconv:c4": "c4", "turn:c4": ""}
    chain = {"gconv:d4": "d4", "turn:d4": "c4", "turn:c4": ""}
    assert kept_by("gconv:d4+turn:d4+turn:c4") == kept_by("turn:c4+gconv:d4+turn:d4") == chain
    longer = {"gconv:d4": "d4", "turn:d4": "c4", "turn:c4": "c2", "turn:c2": ""}
    assert kept_by("gconv:d4+turn:d4+turn:c4+turn:c2") == longer
    assert kept_by("gconv:d4+turn:d4+turn:flip-vertical") == {
        "gconv:d4": "d4",
        "turn:d4": "flip-vertical",
        "turn:flip-vertical": "",
    }
    assert kept_by("f-fc+conv+gconv:d4+turn:d4") == {"f-fc": "", "conv": "", "gconv:d4": "d4", "turn:d4": ""}
    assert kept_by("gconv:d4+gconv:c4+turn:c4") == {"gconv:d4": "d4", "gconv:c4": "c4", "turn:c4": ""}


@pytest.mark.parametrize(
    ("name", "moves", "broken"),
    [
        ("gconv:d4+turn:d4+turn:c4+turn:c2", TURNS, "turn:d4"),
        ("gconv:d4+turn:d4+turn:c4+turn:c2", TURNS[1:2], "turn:c4"),
        ("gconv:d4+turn:d4+turn:flip-vertical", FLIPS[1:2], "turn:d4"),
    ],
)
def test_equivariant_networks_with_part_of_a_chain_are_invariant_to_what_it_keeps(name, moves, broken):
    """With the steps after ``broken`` at zero."""
    net = nets.build(name, (1, 8, 8), 3, **SMALL).double()
    paths = name.split("+")
    for block in net.blocks:
        for path in paths[paths.index(broken) + 1 :]:
            block[path].linear.weight.data.zero_()
        for path in paths[1 : paths.index(broken) + 1]:
            torch.nn.init.normal_(block[path].bias.weight)
    x = torch.randn(3, 1, 8, 8, dtype=torch.float64)
    y = net(x).detach()
    errors = {move: float((net(move(x)).detach() - y).norm() / y.norm()) for move in (*TURNS, *FLIPS)}
    assert all((error < 1e-10) == (move in moves) for move, error in errors.items())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("turn:c4", "turn:c4 of 'turn:c4' breaks c4, but no path keeps just that: add gconv:c4, or"),
        ("conv+turn:c4", "add gconv:c4"),
        ("gconv:d4+turn:c4", "beside a larger gconv:GROUP, also turn:GROUP"),
        ("gconv:c4+turn:d4", "turn:d4 of .* add gconv:d4"),
        ("gconv:c8+turn:c8", r"turn:c8 of .* use conv\+gconv:c8, or an exact group such as c4 or d4"),
        (
            "gconv:d4+turn:d4+turn:c4+turn:flip-vertical",
            "turn:c4 and turn:flip-vertical of .* do not nest: flip-vertical is not",
        ),
        ("gconv:d4+turn:d4+turn:c2+turn:flip-vertical", "turn:c2 and turn:flip-vertical of .* do not nest"),
        ("gconv:c4+turn:c4+turn:flip-vertical", "flip-vertical is not within c4; use a chain such as gconv:d4"),
        ("gconv:c4+turn:c4+turn:c4", "unknown network"),
        ("gconv:c4+turn:c3", "unknown network .* turn:GROUP and gconv:GROUP"),
    ],
)
def test_steps_that_make_no_chain_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        nets.build(name, (1, 8, 8), 3, **SMALL)


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("conv", ()),
        ("fc+f-fc", ()),
        ("s-conv+conv", ()),
        ("fc+conv", ("fc",)),
        ("f-fc+s-fc+conv", ("f-fc", "s-fc")),
        ("s-fc+s-conv", ("s-fc",)),
        ("conv+gconv:c4", ("conv",)),
        ("f-fc+conv+gconv:c4", ("f-fc", "conv")),
        ("gconv:c4+gconv:d4", ("gconv:c4",)),
        ("gconv:d4+turn:d4+turn:c4", ("turn:d4", "turn:c4")),
        ("f-fc+conv+gconv:c4+gconv:d4", ("f-fc", "conv", "gconv:c4")),
    ],
)
def test_paths_that_break_a_symmetry_start_smaller(name, broken):
    """By ``start``, relative to the others; of outputs of equal variance the mean keeps that of one, as where all start alike."""
    outputs = []
    for start in ({"start": 1.0}, {}):
        torch.manual_seed(0)
        net = nets.build(name, (1, 8, 8), 3, **SMALL, **start).double()
        x = torch.randn(4, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            outputs.append({path: module(x) for path, module in net.blocks[0].items()})
    alike, smaller = outputs
    scales = {path: float(smaller[path].norm() / alike[path].norm()) for path in alike}
    for path in alike:
        assert (smaller[path] - scales[path] * alike[path]).norm() < 1e-6 * alike[path].norm()
    largest = max(scales.values())
    assert {path: scale / largest for path, scale in scales.items()} == pytest.approx(
        {path: 0.3 if path in broken else 1.0 for path in scales}, rel=1e-6
    )
    assert sum(scale**2 for scale in scales.values()) == pytest.approx(len(scales), rel=1e-6)


@pytest.mark.parametrize("start", [1.0, 0.3])
@pytest.mark.parametrize("name", ["conv", "fc+conv", "f-fc+conv+gconv:c4"])
def test_the_mean_of_paths_starts_with_the_variance_of_one(name, start, monkeypatch):
    """1/n^2 sum_i factor_i^2 = 1, by which the weights of each path are multiplied as they are made."""

    def weights():
        torch.manual_seed(0)
        net = nets.build(name, (1, 8, 8), 3, **SMALL, start=start)
        lasts = [path.theta_1 if hasattr(path, "theta_1") else path.linear for path in net.blocks[1].values()]
        return [float(last.weight.detach().norm()) for last in lasts]

    found = weights()
    monkeypatch.setattr(nets, "scaled", lambda layer, factors: layer)
    assert sum((a / b) ** 2 for a, b in zip(found, weights(), strict=True)) == pytest.approx(len(found) ** 2, rel=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"name": "mlp"},
            "unknown network 'mlp': join different paths of fc, f-fc, s-fc, where, conv, s-conv, turn:GROUP and gconv:GROUP",
        ),
        ({"name": "conv+conv"}, "unknown network 'conv[+]conv'"),
        ({"in_shape": (32, 32)}, r"in_shape must be \(channels, height, width\), got \(32, 32\)"),
        ({"channels": (1, 2)}, "2 channels and 8 strides"),
        ({"start": 0.0}, "start must be positive and finite, got 0.0"),
        ({"start": math.inf}, "start must be positive and finite, got inf"),
    ],
    ids=["name", "twice", "in_shape", "channels", "start", "infinite"],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        nets.build(**{"name": "conv", "in_shape": (1, 32, 32), "classes": 10, **arguments})


def test_inputs_of_another_size_are_refused():
    net = nets.build("conv", (1, 8, 8), 3, **SMALL)
    with pytest.raises(ValueError, match=r"built for inputs \('B', 1, 8, 8\), got \(2, 1, 8, 12\)"):
        net(torch.randn(2, 1, 8, 12))
