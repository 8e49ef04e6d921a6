import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autosym.linear import groups
from autosym.linear.groups import FLIP_HORIZONTAL, FLIP_VERTICAL, GROUPS, Group, generated, grid_action, rotation
from autosym.nn import nets
from factories import smooth_images

EXACT = {name: group for name, group in GROUPS.items() if group.exact}
ALL = {
    **GROUPS,
    "translations": groups.translations(3, 4),
    "p4": groups.with_translations(GROUPS["c4"], 4, 4),
    "p2mm": groups.with_translations(generated("d2", rotation(180), FLIP_VERTICAL), 2, 3),
}
ORDERS = {"c2": 2, "c4": 4, "d4": 8, "flip-horizontal": 2, "flip-vertical": 2, "c8": 8}
ORDERS |= {"translations": 12, "p4": 64, "p2mm": 24}


# ---- axioms


@pytest.mark.parametrize("name", ALL)
def test_group_axioms_by_the_table(name):
    group = ALL[name]
    table, everything = group.table, torch.arange(len(group))
    assert len(group) == ORDERS[name]
    assert table.shape == (len(group), len(group))
    for line in (*table, *table.T):  # closed, and every element once: products can be undone
        assert torch.equal(line.sort().values, everything)
    assert torch.equal(table[0], everything), "the identity comes first"
    assert torch.equal(table[:, 0], everything)
    assert torch.equal(table[everything, group.inverse], torch.zeros_like(everything))
    assert torch.equal(table[group.inverse, everything], torch.zeros_like(everything))
    assert torch.equal(table[table], table[everything[:, None, None], table])  # (g h) k = g (h k)


@pytest.mark.parametrize("name", GROUPS)
def test_group_table_is_that_of_the_matrices(name):
    group = GROUPS[name]
    for g in range(len(group)):
        for h in range(len(group)):
            torch.testing.assert_close(group.matrices[group.table[g, h]], group.matrices[g] @ group.matrices[h])


def test_groups_that_commute_and_that_do_not():
    commute = {name for name, group in ALL.items() if torch.equal(group.table, group.table.T)}
    assert commute == set(ALL) - {"d4", "p4", "p2mm"}


def test_exact_is_said_of_groups_that_map_the_grid_onto_itself():
    assert {name for name, group in ALL.items() if not group.exact} == {"c8"}


def test_elements_that_are_no_group_are_refused():
    halves = torch.stack([torch.eye(2, dtype=torch.float64), rotation(90)])
    with pytest.raises(ValueError, match="quarter is not a group: a product of two elements is not among its 2 elements"):
        _ = Group("quarter", halves, torch.zeros(2, 2, dtype=torch.float64)).table


@pytest.mark.parametrize(
    "generator",
    [
        rotation(1.0),
        rotation(math.degrees(1)),
        2 * torch.eye(2, dtype=torch.float64),
        torch.tensor([[1.0, 1], [0, 1]]).double(),
    ],
    ids=["one degree", "an irrational turn", "scaling", "shear"],
)
def test_generators_of_no_finite_group_are_refused(generator):
    with pytest.raises(ValueError, match="the generators of endless give more than 64 elements: not a group for a grid"):
        generated("endless", generator)


# ---- action


def images(height, width, dtype=torch.float64):
    return torch.randn(2, 3, height, width, dtype=dtype)


def size_for(group, even=True):
    if group.size is not None:
        return group.size
    side = 6 if even else 5
    turns = bool((group.matrices[:, 0, 1].abs() > 1e-9).any())
    return (side, side) if turns else (side, side + 3)


@pytest.mark.parametrize("even", [True, False], ids=["even", "odd"])
@pytest.mark.parametrize("name", [name for name in ALL if ALL[name].exact])
def test_action_is_a_homomorphism_exactly(name, even):
    group = ALL[name]
    x = images(*size_for(group, even))
    moved = torch.stack([group.act(h, x) for h in range(len(group))])
    assert torch.equal(moved[0], x)
    for g in range(len(group)):
        assert torch.equal(group.act(g, moved), moved[group.table[g]])


def test_action_negative_control_the_other_order():
    """h (g x) is (h g) x, not (g h) x: the table of a group that does not commute tells them apart."""
    for group in (GROUPS["d4"], ALL["p4"], ALL["p2mm"]):
        x = images(*size_for(group))
        g, h = next((g, h) for g in range(len(group)) for h in range(len(group)) if group.table[g, h] != group.table[h, g])
        assert not torch.allclose(group.act(g, group.act(h, x)), group.act(int(group.table[h, g]), x), atol=0.1)


def homomorphism_error(group, x):
    pairs = [(g, h) for g in range(len(group)) for h in range(len(group))]
    gaps = [group.act(g, group.act(h, x)) - group.act(int(group.table[g, h]), x) for g, h in pairs]
    return max(float(gap.norm() / x.norm()) for gap in gaps)


def test_action_of_c8_is_a_homomorphism_on_smooth_images_approximately():
    """Relative error at most 0.044 on bumps 3 pixels wide on 32x32 (measured); on white noise it is 0.70."""
    assert homomorphism_error(GROUPS["c8"], smooth_images(4, 1, 32)) < 0.08
    assert homomorphism_error(GROUPS["c8"], torch.randn(4, 1, 32, 32, dtype=torch.float64)) > 0.3
    x = smooth_images(4, 1, 32)
    wrong = GROUPS["c8"].act(1, GROUPS["c8"].act(1, x)) - GROUPS["c8"].act(3, x)
    assert wrong.norm() / x.norm() > 0.3, "a wrong table would not be noticed"


def test_quarter_turns_among_c8_are_exact():
    x = images(6, 6)
    for k in range(4):
        assert torch.equal(GROUPS["c8"].act(2 * k, x), x.rot90(k, (-2, -1)))


@pytest.mark.parametrize("size", [4, 5])
@pytest.mark.parametrize("name", ["c4", "d4"])
def test_c4_acts_as_rot90(name, size):
    """Counter-clockwise, and in this order."""
    x = images(size, size)
    for k in range(4):
        assert torch.equal(GROUPS[name].act(k, x), x.rot90(k, (-2, -1)))


def test_flips_and_the_half_turn_act_as_torchs_also_on_rectangles():
    x = images(4, 7)
    assert torch.equal(GROUPS["flip-horizontal"].act(1, x), x.flip(-1))
    assert torch.equal(GROUPS["flip-vertical"].act(1, x), x.flip(-2))
    assert torch.equal(GROUPS["c2"].act(1, x), x.flip(-2, -1))
    assert torch.equal(FLIP_HORIZONTAL @ FLIP_VERTICAL, rotation(180))


def test_d4_has_its_reflections_last_and_c4_acts_on_each_half_as_on_itself():
    d4, c4 = GROUPS["d4"], GROUPS["c4"]
    assert torch.linalg.det(d4.matrices).round().tolist() == [1] * 4 + [-1] * 4
    torch.testing.assert_close(d4.matrices[:4], c4.matrices)
    for half in (0, 4):
        assert torch.equal(d4.table[:4, half : half + 4] - half, c4.table)


def test_shifts_of_translations_go_right_and_up():
    group, x = groups.translations(3, 4), images(3, 4)
    seen = set()
    for g in range(12):
        right, up = (int(s) for s in group.shifts[g])
        assert torch.equal(group.act(g, x), x.roll((-up, right), (-2, -1)))
        seen.add((right, up))
    assert seen == {(right, up) for right in range(4) for up in range(3)}


def test_p4_is_a_turn_and_then_a_shift():
    p4, x = ALL["p4"], images(4, 4)
    assert p4.name == "c4 with translations"
    copies = set()
    for g in range(64):
        right, up = (int(s) for s in p4.shifts[g])
        moved = p4.act(g, x)
        assert torch.equal(moved, x.rot90(g // 16, (-2, -1)).roll((-up, right), (-2, -1)))
        copies.add(tuple(moved.flatten().tolist()))
    assert len(copies) == 64


@pytest.mark.parametrize("name", EXACT)
def test_action_on_features_is_a_homomorphism(name):
    group = GROUPS[name]
    x = torch.randn(2, 3 * len(group), 4, 4, dtype=torch.float64)
    assert torch.equal(group.act_on_features(0, x), x)
    for g in range(len(group)):
        for h in range(len(group)):
            two = group.act_on_features(g, group.act_on_features(h, x))
            assert torch.equal(two, group.act_on_features(int(group.table[g, h]), x))
    if len(group) > 2:
        assert not torch.equal(group.act_on_features(1, x), group.act(1, x)), "fields are permuted too"


@pytest.mark.parametrize("name", GROUPS)
def test_action_on_features_is_by_its_formula(name):
    """(g f)(h, p) = f(g^-1 h, g^-1 p), one channel at a time."""
    group = GROUPS[name]
    order = len(group)
    x = torch.randn(2, 3 * order, 4, 4, dtype=torch.float64)
    for g in range(order):
        moved = group.act_on_features(g, x)
        for channel in range(3):
            for h in range(order):
                source = x[:, channel * order + int(group.table[group.inverse[g], h])]
                assert torch.equal(moved[:, channel * order + h], group.act(g, source))


@pytest.mark.parametrize("name", GROUPS)
def test_action_on_a_grid_is_a_matrix(name):
    group, x = GROUPS[name], images(5, 5)
    for g in range(len(group)):
        by_matrix = (x.flatten(-2) @ grid_action(group.matrices[g], 5, 5).T).reshape(x.shape)
        torch.testing.assert_close(group.act(g, x), by_matrix, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", GROUPS)
def test_action_keeps_dtype_and_shape(name, dtype):
    moved = GROUPS[name].act(1, images(4, 4, dtype))
    assert moved.dtype == dtype
    assert moved.shape == (2, 3, 4, 4)


@pytest.mark.fault(25)
@pytest.mark.parametrize("name", ["c4", "d4", "c8"])
def test_images_that_are_not_square_are_refused_by_groups_that_turn(name):
    with pytest.raises(ValueError, match=f"{name} turns images, so they must be square, but this one is 4x6"):
        GROUPS[name].act(1, images(4, 6))
    with pytest.raises(ValueError, match="must be square"):
        groups.with_translations(GROUPS[name], 4, 6)


@pytest.mark.fault(25)
def test_images_of_another_torus_are_refused():
    with pytest.raises(ValueError, match=r"translations shifts on a torus of \(4, 4\), but this image is 4x6"):
        groups.translations(4, 4).act(1, images(4, 6))


SIZES = st.integers(1, 9)


@settings(max_examples=40, deadline=None)
@given(name=st.sampled_from(list(EXACT)), height=SIZES, width=SIZES, data=st.data())
def test_property_an_exact_action_permutes_pixels(name, height, width, data):
    """Of any size: nothing is lost, products follow the table, and the inverse undoes."""
    group = GROUPS[name]
    if (group.matrices[:, 0, 1] != 0).any():
        width = height
    x = torch.arange(height * width, dtype=torch.float64).reshape(1, height, width)
    g, h = (data.draw(st.integers(0, len(group) - 1)) for _ in range(2))
    moved = group.act(g, x)
    assert torch.equal(moved.flatten().sort().values, x.flatten())
    assert torch.equal(group.act(int(group.inverse[g]), moved), x)
    assert torch.equal(group.act(h, moved), group.act(int(group.table[h, g]), x))


@settings(max_examples=15, deadline=None)
@given(name=st.sampled_from(["c2", "c4", "d4"]), size=st.integers(1, 3), data=st.data())
def test_property_products_with_translations_act_on_any_torus(name, size, data):
    group = groups.with_translations(GROUPS[name], size, size)
    x = torch.arange(size**2, dtype=torch.float64).reshape(1, size, size)
    g, h = (data.draw(st.integers(0, len(group) - 1)) for _ in range(2))
    assert torch.equal(group.act(g, group.act(h, x)), group.act(int(group.table[g, h]), x))


def test_only_groups_that_nest_share_lifted_maps():
    nested = {(a, b) for a in GROUPS for b in GROUPS if GROUPS[a].nests(GROUPS[b])}
    assert ("d4", "c4") in nested
    assert all((name, name) in nested for name in GROUPS)
    assert not nested & {("c4", "c2"), ("d4", "c2"), ("d4", "flip-vertical"), ("c4", "d4")}
    for name in ("gconv:c2+gconv:c4", "gconv:c2+gconv:d4", "gconv:flip-vertical+gconv:d4"):
        with pytest.raises(ValueError, match="does not act on the lifted maps"):
            nets.build(name, (1, 8, 8), 3, 1, (1, 1), (2, 2))


def test_a_group_is_named_before_those_within_it():
    assert groups.nested(GROUPS["d4"]) == ("d4", "c4", "c2", "flip-horizontal", "flip-vertical")
    assert groups.nested(GROUPS["c4"]) == ("c4", "c2")
    assert groups.nested(GROUPS["c8"]) == ("c8", "c4", "c2")
    assert groups.nested(generated("own", rotation(90))) == ("own", "c4", "c2")
    assert groups.nested(generated("own", rotation(120))) == ("own",)


@pytest.mark.parametrize("name", GROUPS)
def test_elements_of_a_group_within_another(name):
    """They are the same matrices, and multiply alike."""
    group = GROUPS[name]
    for other in GROUPS.values():
        found = group.elements(other)
        assert (found is not None) == (other.name in groups.nested(group))
        if found is not None:
            torch.testing.assert_close(group.matrices[found], other.matrices, rtol=0, atol=1e-12)
            assert torch.equal(group.table[found][:, found], found[other.table])
