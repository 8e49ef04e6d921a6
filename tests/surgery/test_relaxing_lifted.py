"""relax of a lifted network: heads have a chain of paths too, and normalisation by field is folded."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autosym
from autosym.linear.group_conv import GroupConv
from autosym.linear.groups import GROUPS
from autosym.nn.layers import Relaxed
from autosym.surgery import chains
from liftable import built, noisy


def network(width=8, bias=True):
    """Circular, with a stride, normalisation, and a dense layer on flattened maps of 4x4."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1, padding_mode="circular", bias=bias),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, 2, 1, padding_mode="circular", bias=bias),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(width * 16, 6),
        nn.ReLU(),
        nn.Linear(6, 3),
    )


def lifted(group, bias=True):
    torch.manual_seed(0)
    x = torch.randn(4, 1, 8, 8, dtype=torch.float64)
    return noisy(autosym.lift(network(bias=bias).double().eval(), x, group)), x


def steps(group):
    return [f"turn:{breaks.name}" for breaks, _ in chains.chain(GROUPS[group])]


@pytest.mark.parametrize("group", [name for name, group in GROUPS.items() if group.exact])
def test_a_head_has_a_path_for_each_step_and_one_for_positions(group):
    given, x = lifted(group)
    relaxed = autosym.relax(given, x)
    torch.testing.assert_close(relaxed(x), given(x), rtol=0, atol=1e-12)
    head = relaxed[6]
    assert (head.symmetric, head.free) == (("pool", *steps(group)), ("rest",))
    assert head.silent() == (*steps(group), "rest")
    note = next(note for note in relaxed.relaxation.layers if note.layer == "6")
    assert (note.outcome, note.note) == ("relaxed", "invariant part, what breaks the group and the rest")
    assert all(head[path].start_size > 0 for path in head.silent())


def orbit(group, x):
    """All turns, and all shifts by the total stride, which is 2."""
    turned = [group.act(g, x) for g in range(len(group))]
    return [each.roll((2 * i, 2 * j), (-2, -1)) for each in turned for i in range(4) for j in range(4)]


@pytest.mark.parametrize("group", ["c4", "d4", "flip-vertical"])
def test_on_data_with_the_symmetry_nothing_drives_what_breaks_it_in_a_head(group):
    """The gradient of every path but the invariant one, averaged over the orbit of the images, is zero; for one image it is not."""
    given, x = lifted(group)
    relaxed, y = autosym.relax(given, x), torch.arange(4) % 3
    quiet = {name: p for name, p in relaxed[6].named_parameters() if not name.startswith("pool")}
    assert {name.partition(".")[0] for name in quiet} == {*steps(group), "rest"}
    each = [torch.autograd.grad(F.cross_entropy(relaxed(z), y), list(quiet.values())) for z in orbit(GROUPS[group], x)]
    for name, *gradients in zip(quiet, *each, strict=True):
        assert gradients[0].norm() > 1e-6
        assert torch.stack(gradients).mean(0).norm() < 1e-13 * len(gradients), name
    own = relaxed[6]["pool"].linear.weight
    (some,) = torch.autograd.grad(F.cross_entropy(relaxed(x), y), own)
    assert some.norm() > 1e-6


@pytest.mark.parametrize("broken", ["turn:c4", "turn:c2", "rest"])
def test_a_head_breaks_what_its_path_says(broken):
    given, x = lifted("c4")
    relaxed = autosym.relax(given, x)
    nn.init.normal_(relaxed[6][broken].weight)
    errors = autosym.equivariance_error(relaxed, ["c4", "c2"], x).output()
    assert errors["c4"] > 1e-3
    assert (errors["c2"] < 1e-11) == (broken == "turn:c4")
    with torch.no_grad():
        moved = float((relaxed(x.roll((2, -4), (-2, -1))) - relaxed(x)).norm() / relaxed(x).norm())
    assert (moved < 1e-11) == (broken != "rest")


@pytest.mark.parametrize("broken", [(), ("turn:c4",), ("turn:c2", "rest")], ids=str)
@pytest.mark.parametrize("pooled", [False, True])
def test_a_head_hardens_to_a_dense_layer(broken, pooled):
    given, x = lifted("c4")
    if pooled:
        torch.manual_seed(0)
        parts = nn.Conv2d(1, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)
        given = noisy(autosym.lift(nn.Sequential(*parts).double(), x, "c4"))
    relaxed = autosym.relax(given, x)
    head = relaxed[4 if pooled else 6]
    assert head.free == (() if pooled else ("rest",)), "one position has no others to differ from"
    for path in (path for path in broken if path in head):
        nn.init.normal_(head[path].weight)
    plain = autosym.harden(relaxed, (x, torch.arange(4) % 3), tolerance=0)
    torch.testing.assert_close(plain(x), relaxed(x), rtol=0, atol=1e-11)
    assert not any(isinstance(module, (Relaxed, autosym.linear.Path)) for module in plain.modules())
    made = plain[4 if pooled else 6]
    if broken and (pooled or "rest" in broken):
        assert type(made) is nn.Linear, "all of it is one matrix of the features"
    else:
        assert [type(part) for part in made] == [nn.Unflatten, nn.AdaptiveAvgPool1d, nn.Flatten, nn.Linear]


def test_a_network_lifted_to_translations_has_a_head_that_may_break_them():
    given, x = lifted("translations")
    relaxed = autosym.relax(given, x)
    assert (relaxed[6].symmetric, relaxed[6].free) == (("pool",), ("rest",))
    torch.testing.assert_close(relaxed(x), given(x), rtol=0, atol=1e-12)
    autosym.assert_equivariant(relaxed, "translations", x, 1e-11)
    nn.init.normal_(relaxed[6]["rest"].weight)
    assert autosym.equivariance_error(relaxed, "translations", x).output()["translations"] > 1e-3


def test_a_head_takes_no_other_path_and_may_be_kept():
    given, x = lifted("c4")
    with pytest.raises(ValueError, match=r"6 \(the head\) cannot have the paths 'f-fc': .* takes 'pool'"):
        autosym.relax(given, x, {"6": "f-fc"})
    relaxed = autosym.relax(given, x, {"6": "pool"})
    assert relaxed.relaxation.names("relaxed") == ("6",)
    assert tuple(autosym.relax(given, x, keep=["6"])[6]) == ("pool",)


def test_a_head_whose_positions_are_too_many_says_so(monkeypatch):
    given, x = lifted("c4")
    monkeypatch.setattr(chains, "LARGEST_FACTORS", 10_000)
    relaxed = autosym.relax(given, x, {"6": "pool"})
    assert tuple(relaxed[6]) == ("pool", *steps("c4"))
    assert "no path breaks shifts: the curvature of rest" in str(relaxed.relaxation)


# ---- normalisation by field


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("group", ["c4", "d4", "translations"])
def test_normalisation_by_field_is_folded(group, bias):
    given, x = lifted(group, bias)
    relaxed = autosym.relax(given, x, fold=True)
    name = "1" if group == "translations" else "1.1"
    assert relaxed.relaxation.names("folded") == (name,)
    assert not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in relaxed.modules())
    torch.testing.assert_close(relaxed(x), given(x), rtol=0, atol=1e-12)
    assert relaxed[0].silent() == tuple(path for path in relaxed[0] if path not in (f"gconv:{group}", "conv"))
    autosym.assert_equivariant(relaxed, group, x, 1e-11)
    plain = autosym.harden(relaxed, (x, torch.arange(4) % 3))
    torch.testing.assert_close(plain(x), given(x), rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    ("name", "folded"),
    [("resnet", 4), ("bottlenecks", 6), ("separable", 3), ("excited", 1), ("grouped", 1)],
)
def test_every_normalisation_is_folded_or_the_reason_is_given(name, folded):
    model, x = built(name)
    given = noisy(autosym.lift(model, x, "c4"))
    relaxed = autosym.relax(given, x, fold=True)
    torch.testing.assert_close(relaxed(x), given(x), rtol=0, atol=1e-11)
    norms = [note for note in relaxed.relaxation.layers if note.kind.startswith("BatchNorm")]
    assert len([note for note in norms if note.outcome == "folded"]) == folded
    for note in norms:
        assert note.outcome == "folded" or "not folded: " in note.note
    strided = "not folded: which grid was kept before it depends on the scale of each channel"
    assert (strided in str(relaxed.relaxation)) == (name in ("resnet", "bottlenecks", "separable"))


def test_normalisation_by_channel_is_not_folded_into_fields():
    """As of a lifted model that was changed by hand: each channel of a field has its own scale."""
    given, x = lifted("c4")
    given[1] = nn.BatchNorm2d(8, dtype=torch.float64).eval()
    nn.init.uniform_(given[1].weight, 0.5, 2)
    relaxed = autosym.relax(given, x, fold=True)
    assert "not folded: it does not normalise by field" in str(relaxed.relaxation)
    torch.testing.assert_close(relaxed(x), given(x), rtol=0, atol=1e-12)


def test_a_kept_layer_is_not_folded():
    given, x = lifted("c4")
    told = str(autosym.relax(given, x, keep=["0"], fold=True).relaxation)
    assert "not folded: the layer before it is named in keep" in told
    assert "not folded: it is named in keep" in str(autosym.relax(given, x, keep=["1"], fold=True).relaxation)


def test_a_frozen_group_convolution_stays_frozen_when_normalisation_is_folded_into_it():
    given, x = lifted("c4", bias=False)
    (path,) = (part for part in given[0].modules() if isinstance(part, GroupConv))
    path.weight.requires_grad_(False)
    relaxed = autosym.relax(given, x, fold=True)
    assert "0" in relaxed.relaxation.names("frozen")
    assert not any(parameter.requires_grad for parameter in relaxed[0].parameters())
    torch.testing.assert_close(relaxed(x), given(x), rtol=0, atol=1e-12)


def test_the_lifted_model_is_left_as_it_was():
    given, x = lifted("c4", bias=False)
    before = copy.deepcopy(given)
    autosym.relax(given, x, fold=True)
    for (name, one), (_, two) in zip(given.named_parameters(), before.named_parameters(), strict=True):
        assert torch.equal(one, two), name
