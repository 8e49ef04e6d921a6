import json
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import autosym
import learned
from autosym import Prior
from autosym.evidence import laplace
from autosym.evidence.shares import WHOLE, Symmetry, from_dicts, symmetry
from autosym.linear.conv import Conv
from autosym.linear.dense import Dense
from autosym.linear.groups import GROUPS
from autosym.linear.path import NOTHING, Kept
from autosym.linear.sparse import Sparse
from autosym.nn import layers, nets
from autosym.nn.layers import Relaxed
from models import draw, mlp, randomised, relaxed


def taken(model, shape=(2, 4, 4), samples=6):
    """The evidence of a model on random data, with another precision for every path."""
    found = laplace.at(model, draw("categorical", samples, shape))
    return found, Prior(found.names, {name: 0.1 * (i + 1) for i, name in enumerate(found.names)})


def without(found, *gone):
    """The same evidence, had the data said nothing of the named paths."""
    kept = torch.tensor([name not in gone for name in found.names])
    return SimpleNamespace(
        names=found.names, sizes=found.sizes, effective_parameters=lambda prior: found.effective_parameters(prior) * kept
    )


@pytest.mark.parametrize("name", nets.NAMES)
def test_shares_of_a_layer_sum_to_one(name):
    model = relaxed(name)
    table = symmetry(model, *reversed(taken(model)))
    assert [(p.layer, p.path) for p in table] == [(f"blocks.{i}", path) for i in range(2) for path in model.blocks[i]]
    for layer in ("blocks.0", "blocks.1"):
        shares = [p.share for p in table if p.layer == layer]
        assert sum(shares) == pytest.approx(1, abs=1e-12)
        assert len(shares) == len(name.split("+"))
        assert all(0 < share <= 1 for share in shares)


def test_shares_are_effective_parameters_with_biases_over_those_of_the_layer():
    model = relaxed()
    found, prior = taken(model)
    gamma = dict(zip(found.names, found.effective_parameters(prior).tolist(), strict=True))
    size = {name: model.get_submodule(name).weight.numel() for name in found.names}
    parts = {"conv": ("linear", "bias"), "f-fc": ("theta_2", "b_2", "theta_1", "b_1")}
    for row in symmetry(model, prior, found):
        names = {path: [f"{row.layer}.{path}.{part}" for part in parts[path]] for path in parts}
        own, all_of_them = (sum(gamma[n] for n in part) for part in (names[row.path], names["conv"] + names["f-fc"]))
        assert row.effective_parameters == pytest.approx(own, rel=1e-12)
        assert row.share == pytest.approx(own / all_of_them, rel=1e-12)
        assert row.parameters == sum(size[n] for n in names[row.path])
        assert row.symmetric == (row.path == "conv")
        assert row.precision == pytest.approx({n.rsplit(".", 1)[-1]: prior.precision()[n] for n in names[row.path]})


def test_a_path_that_the_data_do_not_use_has_no_share():
    model = relaxed()
    found, prior = taken(model)
    free = [name for name in found.names if name.startswith("blocks.0.f-fc.")]
    assert len(free) == 4
    rows = {(p.layer, p.path): p for p in symmetry(model, prior, without(found, *free))}
    assert rows["blocks.0", "f-fc"].share == rows["blocks.0", "f-fc"].effective_parameters == 0
    assert rows["blocks.0", "conv"].share == 1
    assert rows["blocks.1", "f-fc"].share > 0


@pytest.mark.parametrize("kept", ["b_1", "b_2"])
def test_a_bias_of_a_free_path_still_breaks_the_symmetry(kept):
    model = relaxed()
    found, prior = taken(model)
    free = [n for n in found.names if n.startswith("blocks.0.f-fc.") and not n.endswith(kept)]
    assert len(free) == 3
    assert symmetry(model, prior, without(found, *free)).free_share()["blocks.0"] > 0


def test_a_layer_that_the_data_do_not_use_at_all_has_no_shares():
    """They are not a number, and None in what is written as JSON."""
    model = relaxed()
    found, prior = taken(model)
    table = symmetry(model, prior, without(found, *(n for n in found.names if n.startswith("blocks.1."))))
    assert all(math.isnan(p.share) for p in table if p.layer == "blocks.1")
    assert [row["share"] for row in table.as_dicts() if row["layer"] == "blocks.1"] == [None, None]
    assert math.isnan(table.free_share()["blocks.1"])
    assert table.free_share()["blocks.0"] > 0


def test_a_frozen_path_has_no_share():
    """The evidence says nothing of it; the share of its layer's free paths is not known either."""
    model = relaxed()
    model.blocks[0]["f-fc"].requires_grad_(False)
    rows = {(p.layer, p.path): p for p in symmetry(model, *reversed(taken(model)))}
    assert math.isnan(rows["blocks.0", "f-fc"].share)
    assert rows["blocks.0", "f-fc"].parameters == 0
    assert rows["blocks.0", "conv"].share == pytest.approx(1)
    assert 0 < rows["blocks.1", "f-fc"].share < 1


@pytest.mark.parametrize("part", ["theta_1", "b_1"])
def test_a_path_that_is_frozen_in_part_has_no_share(part):
    """What it would hold is not known, however little its other parts do."""
    model = relaxed()
    model.blocks[0]["f-fc"].get_submodule(part).requires_grad_(False)
    table = symmetry(model, *reversed(taken(model)))
    rows = {(p.layer, p.path): p for p in table}
    assert math.isnan(rows["blocks.0", "f-fc"].share)
    assert rows["blocks.0", "f-fc"].effective_parameters > 0
    assert math.isnan(table.free_share()["blocks.0"])
    assert math.isnan(table.network_share())
    assert table.broken() == {}
    assert "of all effective" not in str(table)
    assert 0 < table.free_share()["blocks.1"] < 1


def test_free_share_adds_the_free_paths_of_each_layer():
    model = relaxed("conv+fc+f-fc")
    table = symmetry(model, *reversed(taken(model)))
    shares = {(p.layer, p.path): p.share for p in table}
    for layer in ("blocks.0", "blocks.1"):
        assert table.free_share()[layer] == pytest.approx(shares[layer, "fc"] + shares[layer, "f-fc"], abs=1e-15)
        assert 0 < table.free_share()[layer] < 1


def test_broken_share_counts_convolutions_where_a_group_is_asked_for():
    model = relaxed("f-fc+conv+gconv:c4")
    table = symmetry(model, *reversed(taken(model)))
    shares = {(p.layer, p.path): p.share for p in table}
    for layer in ("blocks.0", "blocks.1"):
        free, plain = shares[layer, "f-fc"], shares[layer, "conv"]
        assert table.broken_share("c4")[layer] == pytest.approx(free + plain, abs=1e-15)
        assert free > 0.01
        assert plain > 0.01
    with pytest.raises(ValueError, match="no layer has a path for 'c8'; groups with a path: c4"):
        table.broken_share("c8")


def test_a_larger_group_keeps_a_smaller_one():
    model = relaxed("conv+gconv:c4+gconv:d4")
    table = symmetry(model, *reversed(taken(model)))
    shares = {(p.layer, p.path): p.share for p in table}
    assert table.broken_share("c4")["blocks.1"] == pytest.approx(shares["blocks.1", "conv"], abs=1e-15)
    rows = {group: sum(p.effective_parameters for p in table if p.path not in keeps) for group, keeps in (
        ("c4", ("gconv:c4", "gconv:d4")), ("d4", ("gconv:d4",)), (None, ("conv", "gconv:c4", "gconv:d4")))}  # fmt: skip
    whole = sum(p.effective_parameters for p in table)
    for group, broken in rows.items():
        assert table.network_share(group) == pytest.approx(broken / whole, abs=1e-12)
    assert 0 == rows[None] < rows["c4"] < rows["d4"] < whole
    assert table.broken() == {"free": 0.0, **{group: rows[group] / whole for group in ("c4", "d4")}}
    assert f"of all effective parameters: 0.0% free, {rows['c4'] / whole:.1%} break c4" in str(table)
    assert table.broken_share("d4")["blocks.1"] == pytest.approx(1 - shares["blocks.1", "gconv:d4"], abs=1e-12)


def test_every_step_of_a_chain_is_read_off_by_itself():
    model = relaxed("f-fc+gconv:d4+turn:d4+turn:c4+turn:c2")
    table = symmetry(model, *reversed(taken(model)))
    whole = sum(p.effective_parameters for p in table)
    breaking = {
        "d4": ("turn:d4", "turn:c4", "turn:c2", "f-fc"),
        "c4": ("turn:c4", "turn:c2", "f-fc"),
        "c2": ("turn:c2", "f-fc"),
    }
    sums = {group: sum(p.effective_parameters for p in table if p.path in paths) for group, paths in breaking.items()}
    free = sum(p.effective_parameters for p in table if p.path == "f-fc")
    assert table.broken() == pytest.approx({"free": free / whole, **{group: gamma / whole for group, gamma in sums.items()}})
    shares = {(p.layer, p.path): p.share for p in table}
    for group, paths in breaking.items():
        assert table.broken_share(group)["blocks.1"] == pytest.approx(sum(shares["blocks.1", path] for path in paths))


def test_a_group_that_moves_the_channels_of_a_layer_in_another_way_is_not_kept():
    """c2 is within c4, but pairs of channels are not fields of c4."""
    c2, c4 = ({"b": layers.gconv((4, 4, 4), (4, 4, 4), GROUPS[name], lift=False)} for name in ("c2", "c4"))
    assert Relaxed(c4, {}, lifted=GROUPS["c4"]).keeps("b").groups == ("c4", "c2")
    assert Relaxed(c2, {}, lifted=GROUPS["c4"]).keeps("b") == Kept(equivariant=True)
    assert Relaxed(c2, {}, lifted=GROUPS["c2"]).keeps("b").groups == ("c2",)


def test_a_group_is_judged_only_where_every_layer_has_a_path_for_it():
    stem, body, head = (
        learned.path(name, str(i), effective=gamma)
        for i, (name, gamma) in enumerate({"conv": 1.0, "gconv:c4": 2.0, "pool": 1.0}.items())
    )
    assert Symmetry((stem, body)).broken() == {"free": 0.0}
    assert Symmetry((stem, body)).network_share("c4") == pytest.approx(1 / 3)
    assert Symmetry((body, head)).broken() == {"free": 0.0, "c4": 0.0}
    assert Symmetry((body, learned.path("s-fc", "2", symmetric=False, learned_omega=True))).broken() == {}


@pytest.mark.parametrize(("name", "share"), [("conv", 0.0), ("fc", 1.0), ("f-fc", 1.0)])
def test_free_share_of_one_path_is_all_or_nothing(name, share):
    model = relaxed(name)
    found = symmetry(model, *reversed(taken(model))).free_share()
    assert found == pytest.approx({"blocks.0": share, "blocks.1": share}, abs=1e-12)


def test_a_huge_precision_takes_the_share():
    model = relaxed()
    found, prior = taken(model)
    gone = Prior(found.names, {n: 1e12 if ".f-fc." in n else p for n, p in prior.precision().items()})
    assert max(symmetry(model, gone, found).free_share().values()) < 1e-6
    assert min(symmetry(model, prior, found).free_share().values()) > 0.05


def test_the_table_prints_a_row_per_path():
    model = relaxed()
    table = symmetry(model, *reversed(taken(model)))
    head, rule, *rows, whole, hint = str(table).splitlines()
    assert head.split()[:2] == ["layer", "path"]
    assert set(rule) == {"-"}
    assert whole == f"of all effective parameters: {table.network_share():.1%} free"
    assert hint == "to see what they are worth: autosym.simplify(fit, data)"
    assert len(rows) == 4
    for row, path in zip(rows, table, strict=True):
        words = row.split()
        assert words[:3] == [path.layer, path.path, "symmetric" if path.symmetric else "free"]
        assert words[-1] == f"{path.share:.1%}"
        assert f"{path.effective_parameters:.1f} / {path.parameters}" in row
        assert all(f"{name} {value:.3g}" in row for name, value in path.precision.items())


def test_the_table_as_dicts_holds_plain_numbers():
    model = relaxed()
    table = symmetry(model, *reversed(taken(model)))
    for row, path in zip(table.as_dicts(), table, strict=True):
        fields = {"layer", "path", "symmetric", "precision", "parameters", "effective_parameters", "share"}
        assert set(row) >= fields
        assert (row["layer"], row["share"], row["parameters"]) == (path.layer, path.share, path.parameters)
        assert (type(row["share"]), type(row["parameters"])) == (float, int)


@pytest.mark.parametrize("name", ["f-fc+conv", "f-fc+conv+gconv:c4", "s-fc+s-conv"])
def test_the_table_is_read_from_its_json(name):
    model = relaxed(name)
    model.blocks[0].requires_grad_(False)  # shares that are not numbers
    table = symmetry(model, *reversed(taken(model)))
    again = from_dicts(json.loads(json.dumps(table.as_dicts())))
    assert str(again) == str(table.paths), "as text, where what is not a number is the same"


def test_paths_carry_what_they_keep():
    model = relaxed("f-fc+conv+gconv:c4")
    kept = {p.path: p.keeps for p in symmetry(model, *reversed(taken(model)))}
    assert kept == {"f-fc": NOTHING, "conv": Kept(equivariant=True), "gconv:c4": Kept(equivariant=True, groups=("c4", "c2"))}


def test_names_of_paths_decide_nothing():
    shape, lifted = (1, 4, 4), (4, 4, 4)
    symmetric = {"a": layers.conv(shape, lifted), "b": layers.gconv(shape, lifted, GROUPS["c4"], lift=True)}
    layer = Relaxed(symmetric, {"conv": layers.fc(shape, lifted)})
    model = randomised(nn.Sequential(layer, nn.Flatten(), nn.Linear(64, 3)))
    table = symmetry(model, *reversed(taken(model, shape)))
    shares = {p.path: p.share for p in table}
    assert table.broken_share("c4")["0"] == pytest.approx(shares["a"] + shares["conv"])
    assert table.broken().keys() == {"free", "c4"}
    assert {p.path for p in table.optional()} == {"a", "conv"}


@pytest.mark.parametrize("learn", [True, False])
def test_whether_lengthscales_are_learned_is_known(learn):
    prior = "omega" if learn else "u"
    model = nets.build("s-fc+s-conv", (2, 4, 4), 3, 2, channels=(1, 2), strides=(1, 2), hidden=2, prior=prior).double()
    table = symmetry(model, *reversed(taken(model)))
    assert {p.learned_omega for p in table} == {learn}
    assert all(any(part.endswith("omega") for part in p.precision) is learn for p in table)
    assert [set(p.omega) for p in table] == [{"linear"} if p.symmetric else {"u_1", "u_2"} for p in table]
    assert bool(table.broken()) is not learn
    frozen = [m.basis.omega.requires_grad_(False) for m in model.modules() if isinstance(m, Sparse)]
    assert frozen
    assert not any(p.learned_omega for p in symmetry(model, *reversed(taken(model))))


@pytest.mark.parametrize(("share", "worth"), [(WHOLE, True), (math.nextafter(WHOLE, 0), False)])
def test_the_table_names_simplify_from_a_twentieth_of_the_network_on(share, worth):
    conv = learned.path("conv", share=1 - share, effective=1 - share)
    paths = conv, learned.path("f-fc", share=share, effective=share, symmetric=False)
    table = Symmetry(paths)
    assert table.network_share() == share
    assert ("autosym.simplify" in str(table)) == worth
    assert "autosym.simplify" not in str(Symmetry(paths, simplified=True))


def test_a_model_without_relaxed_layers_has_an_empty_table():
    model = mlp(5, 4, 3)
    table = symmetry(model, *reversed(taken(model, (5,))))
    assert list(table) == []
    assert table.free_share() == {}
    assert table == Symmetry(())
    assert str(table).startswith("no relaxed layer")


def test_a_model_that_is_one_relaxed_layer():
    paths = {name: layers.fc((5,), (3,)) for name in ("a", "ab")}
    model = randomised(Relaxed({}, paths))
    table = symmetry(model, *reversed(taken(model, (5,))))
    assert [(p.layer, p.path, p.parameters) for p in table] == [("", "a", 18), ("", "ab", 18)]
    assert sum(p.share for p in table) == pytest.approx(1, abs=1e-12)


def test_paths_without_a_bias_are_counted():
    """A path may be a bare linear map: its site is the path itself, not a part of it."""
    layer = Relaxed({"conv": Conv(2, 3)}, {"fc": Dense((2, 4, 4), (3, 4, 4))})
    model = randomised(nn.Sequential(layer, nn.Flatten(), nn.Linear(48, 3)))
    table = symmetry(model, *reversed(taken(model)))
    assert [(p.path, p.parameters) for p in table] == [("conv", 54), ("fc", 32 * 48)]
    assert sum(p.share for p in table) == pytest.approx(1, abs=1e-12)
    assert 0 < table.free_share()["0"] < 1


def test_layers_whose_names_begin_alike_are_kept_apart():
    """Layer 1 is not layer 10, nor is path conv path conv-5."""
    shape = (2, 4, 4)
    parts = [Relaxed({"conv": layers.conv(shape, shape)}, {"f-fc": layers.Factored(shape, shape)}) for _ in range(11)]
    both = {"conv": layers.conv(shape, shape), "conv-5": layers.conv(shape, shape, 5)}
    parts[1] = Relaxed(both, {"f-fc": layers.Factored(shape, shape)})
    model = randomised(nn.Sequential(*parts, nn.Flatten(), nn.Linear(32, 3)))
    table = symmetry(model, *reversed(taken(model)))
    assert len({p.layer for p in table}) == 11
    assert {p.parameters for p in table if p.path == "conv"} == {2 * 2 * 9 + 2}
    for layer in range(11):
        assert sum(p.share for p in table if p.layer == str(layer)) == pytest.approx(1)


def test_a_fit_shows_its_symmetry():
    x, y = draw("categorical", 20, (2, 4, 4))
    model = nets.build("f-fc+conv", (2, 4, 4), 3, 2, channels=(1, 2), strides=(1, 2), hidden=2)
    fit = autosym.fit(model, (x, y), epochs=2, burn_in=0, every=1)
    assert isinstance(fit.symmetry(), Symmetry)
    assert fit.symmetry().paths == symmetry(model, fit.prior, fit.laplace).paths
    assert "Caution: Nothing is established yet" in str(fit.symmetry())
    assert fit.history[-1]["free_share"].keys() == fit.symmetry().free_share().keys()
    assert torch.tensor([p.share for p in fit.symmetry()]).sum() == pytest.approx(2, abs=1e-6)
