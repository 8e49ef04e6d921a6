"""Paths that hold only what breaks a group: the steps of chains of groups, against projections computed one element at a time."""

from itertools import combinations

import pytest
import torch
from torch.testing import assert_close

import oracles
from autosym.linear.contrasts import BiasContrast, GroupContrast, PoolContrast, contrasts
from autosym.linear.conv import Conv
from autosym.linear.dense import Centred, Pool
from autosym.linear.group_conv import GroupConv
from autosym.linear.groups import GROUPS, generated, rotation
from autosym.nn import nets
from factories import PATHS, STEPS
from models import randomised

EXACT = [name for name, group in GROUPS.items() if group.exact]
CHAINS = {name: [step[1:] for step in STEPS if step[0] == name] for name in dict.fromkeys(step[0] for step in STEPS)}
LIFT = pytest.mark.parametrize("lift", [True, False], ids=["lifting", "mixing"])
EACH_CHAIN = pytest.mark.parametrize("chain", CHAINS)
EACH_STEP = pytest.mark.parametrize(("chain", "breaks", "keeps"), STEPS)


def group_of(chain):
    return GROUPS[chain.split()[0]]


def step_path(chain, breaks, keeps, lift, fields=2, kernel=3):
    """A path of a chain with random weights."""
    path = GroupContrast(group_of(chain), fields, fields, kernel, lift, GROUPS[breaks], keeps and GROUPS[keeps]).double()
    torch.nn.init.normal_(path.weight)
    return path


def chain_paths(chain, lift, fields=2, kernel=3):
    """The group convolution and all steps of a chain, largest group first."""
    first = GroupConv(group_of(chain), fields, fields, kernel, lift).double()
    return [first, *(step_path(chain, *step, lift, fields, kernel) for step in CHAINS[chain])]


def keeps_only(filters, chain, step, lift):
    """The projection on one path of a chain: on what keeps its group, less what keeps the group that it breaks."""
    group = group_of(chain)
    order = 1 if lift else len(group)
    kept, broken = (oracles.projected(filters, group, name and GROUPS[name], order) for name in (step[1], step[0]))
    return kept - broken


@LIFT
@EACH_CHAIN
def test_the_projection_on_one_path_of_a_chain_is_zero_on_every_other(chain, lift):
    group, (first, *others) = group_of(chain), chain_paths(chain, lift)
    symmetric = first.filters().detach()
    order = 1 if lift else len(group)
    assert_close(oracles.projected(symmetric, group, group, order), symmetric, rtol=0, atol=1e-12)
    for step, path in zip(CHAINS[chain], others, strict=True):
        filters = path.filters().detach()
        assert filters.norm() > 1
        assert oracles.projected(filters, group, group, order).abs().max() < 1e-12, "it holds part of the group convolution"
        for other in CHAINS[chain]:
            expected = filters if other == step else torch.zeros_like(filters)
            assert_close(keeps_only(filters, chain, other, lift), expected, rtol=0, atol=1e-12)
        assert keeps_only(symmetric, chain, step, lift).abs().max() < 1e-12


@LIFT
def test_negative_control_a_convolution_holds_part_of_every_path_of_a_chain(lift):
    group = GROUPS["d4"]
    order = 1 if lift else len(group)
    filters = Conv(2 * order, 2 * len(group)).double().filters().detach()
    parts = [oracles.projected(filters, group, group, order)]
    parts += [keeps_only(filters, "d4", step, lift) for step in CHAINS["d4"]]
    assert min(part.norm() for part in parts) > 0.1 * filters.norm()
    assert_close(torch.stack(parts).sum(0), filters, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kernel", [1, 3])
@LIFT
@EACH_CHAIN
def test_a_chain_is_all_convolutions_each_once(chain, lift, kernel):
    """As many weights as a convolution, and an orthogonal matrix from one to the other: at equal precisions the same prior."""
    group, fields = group_of(chain), 1
    order = 1 if lift else len(group)
    columns = []
    for path in chain_paths(chain, lift, fields, kernel):
        for unit in torch.eye(path.weight.numel(), dtype=torch.float64):
            path.weight.data.copy_(unit.view_as(path.weight))
            columns.append(path.filters().detach().flatten())
    matrix = torch.stack(columns, 1)
    assert matrix.shape == (len(group) * order * kernel**2,) * 2
    assert_close(matrix.mT @ matrix, len(group) * torch.eye(len(matrix), dtype=torch.float64), rtol=0, atol=1e-10)


@EACH_CHAIN
def test_a_chain_with_its_field_bias_is_every_bias_of_channels(chain):
    group = group_of(chain)
    columns = [torch.ones(len(group), dtype=torch.float64)]
    for breaks, keeps in CHAINS[chain]:
        path = BiasContrast(group, 1, GROUPS[breaks], keeps and GROUPS[keeps]).double()
        for unit in torch.eye(path.weight.numel(), dtype=torch.float64):
            path.weight.data.copy_(unit.view_as(path.weight))
            columns.append(path.values().detach().flatten())
    matrix = torch.stack(columns)
    assert_close(matrix @ matrix.mT, len(group) * torch.eye(len(group), dtype=torch.float64), rtol=0, atol=1e-12)


@LIFT
@EACH_STEP
def test_a_step_is_equivariant_to_the_groups_that_it_says_and_to_no_other(chain, breaks, keeps, lift):
    group, path = group_of(chain), step_path(chain, breaks, keeps, lift)
    x = torch.randn(2, 2 if lift else 2 * len(group), 6, 6, dtype=torch.float64)
    kept = path.keeps
    assert (kept.equivariant, kept.invariant, kept.every, kept.group) == (True, False, False, keeps or "")
    assert breaks not in kept
    for other in EXACT:
        error = oracles.group_error(path, group, GROUPS[other], x, lift)
        assert error < 1e-10 if other in kept else error > 0.1
    for shift in ((1, 0), (2, 3)):
        assert_close(path(x.roll(shift, (-2, -1))), path(x).roll(shift, (-2, -1)), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("name", "constructor", "shape"), [path for path in PATHS if "contrast" in path.id])
def test_the_fast_gram_matrix_is_that_of_columns(name, constructor, shape):
    path, x = constructor().double(), torch.randn(3, *shape, dtype=torch.float64)
    columns = path.columns(x)
    assert_close(path.gram(x), torch.einsum("bski,bskj->kij", columns, columns), rtol=1e-10, atol=1e-10)


def test_contrasts_of_quarter_turns():
    """Half turns first against each other in pairs, then the pairs: by hand."""
    c4, c2 = GROUPS["c4"], GROUPS["c2"]
    assert_close(contrasts(c4, c4, c2), torch.tensor([[1.0, -1, 1, -1]]).double())
    assert_close(contrasts(c4, c2), 2**0.5 * torch.tensor([[1.0, 0, -1, 0], [0, 1, 0, -1]]).double())


# ---- heads


def head_paths(chain, fields=2, positions=3, outputs=2):
    """The invariant path, all steps of a chain, and the rest, for flattened lifted maps."""
    group = group_of(chain)
    steps = [
        PoolContrast(group, fields, positions, outputs, GROUPS[breaks], keeps and GROUPS[keeps])
        for breaks, keeps in CHAINS[chain]
    ]
    pool, rest = Pool(fields, len(group) * positions, outputs, group), Centred(fields * len(group), positions, outputs)
    return [path.double() for path in (pool, *steps, rest)]


def matrix_of_head(path, fields, order, positions):
    """(outputs, C, g, p)."""
    units = torch.eye(fields * order * positions, dtype=torch.float64)
    return path(units).detach().mT.unflatten(1, (fields, order, positions))


@EACH_CHAIN
def test_heads_of_a_chain_are_all_dense_maps_and_share_nothing(chain):
    """Maps of different paths are orthogonal; together they have the rank of all dense maps."""
    group, order = group_of(chain), len(group_of(chain))
    spans = []
    for path in head_paths(chain, 1, 3, 1):
        columns = []
        for unit in torch.eye(path.weight.numel(), dtype=torch.float64):
            path.weight.data.copy_(unit.view_as(path.weight))
            columns.append(matrix_of_head(path, 1, order, 3).flatten())
        spans.append(torch.stack(columns))
        if not isinstance(path, Centred):  # at equal precisions, each has the same prior
            expected = torch.eye(len(columns), dtype=torch.float64) / (3 * order)
            assert_close(spans[-1] @ spans[-1].mT, expected, rtol=0, atol=1e-12)
    for one, two in combinations(spans, 2):
        assert (one @ two.mT).abs().max() < 1e-12
    assert torch.linalg.matrix_rank(torch.cat(spans)) == 3 * len(group)


@EACH_CHAIN
def test_the_projection_of_a_head_that_breaks_is_zero_on_what_keeps(chain):
    """P V = mean over h of V[h g], and over positions: the invariant maps. A step's is its own, and zero for what it breaks."""
    group, (pool, *steps, rest) = group_of(chain), head_paths(chain)

    def projected(path, subgroup):
        each = matrix_of_head(path, 2, len(group), 3)
        elements = [0] if subgroup is None else oracles.subgroup_elements(group, subgroup)
        moved = [each[:, :, group.table[h]] for h in elements]
        return torch.stack(moved).mean(0).mean(-1, keepdim=True).expand_as(each)

    whole = matrix_of_head(pool, 2, len(group), 3)
    assert_close(projected(pool, group), whole, rtol=0, atol=1e-12)
    for (breaks, keeps), path in zip(CHAINS[chain], steps, strict=True):
        own = matrix_of_head(path, 2, len(group), 3)
        assert own.norm() > 0.1
        assert_close(projected(path, keeps and GROUPS[keeps]), own, rtol=0, atol=1e-12)
        assert projected(path, GROUPS[breaks]).abs().max() < 1e-12
        assert (path.keeps.invariant, path.keeps.group) == (True, keeps or "")
        assert breaks not in path.keeps
    assert matrix_of_head(rest, 2, len(group), 3).norm() > 0.1
    assert projected(rest, None).abs().max() < 1e-12
    assert pool.keeps.group == group.name


def test_a_pool_over_a_group_needs_whole_fields():
    with pytest.raises(ValueError, match="6 positions are not those of maps over c4: take a multiple of 4"):
        Pool(2, 6, 3, GROUPS["c4"])


# ---- gradients at an equivariant network


def mean_gradients(name, group, quiet, x):
    """The gradients of a network whose paths ``quiet`` are zero: at x, and their mean over the group's copies of x."""
    net = randomised(nets.build(name, (1, 8, 8), 3, 2, (1, 2), (2, 2), hidden=4))
    for block in net.blocks:
        for path in quiet:
            for parameter in block[path].parameters():
                parameter.data.zero_()
    y = torch.randint(3, (len(x),))
    copies = torch.stack([group.act(g, x) for g in range(len(group))])
    losses = [torch.nn.functional.cross_entropy(net(copy), y) for copy in copies]
    each = [torch.autograd.grad(loss, list(net.parameters()), allow_unused=True) for loss in losses]
    names = [name for name, _ in net.named_parameters()]
    return {
        name: (g[0].norm(), torch.stack(g).mean(0).norm()) for name, *g in zip(names, *each, strict=True) if g[0] is not None
    }


CASES = [  # the network, the group of the data, the paths that are zero
    ("gconv:c2+turn:c2", "c2", ("turn:c2",)),
    ("gconv:c4+turn:c4", "c4", ("turn:c4",)),
    ("gconv:d4+turn:d4", "d4", ("turn:d4",)),
    ("gconv:flip-vertical+turn:flip-vertical", "flip-vertical", ("turn:flip-vertical",)),
    ("gconv:d4+turn:d4+turn:c4+turn:c2", "d4", ("turn:d4", "turn:c4", "turn:c2")),
    ("gconv:d4+turn:d4+turn:c4+turn:c2", "c4", ("turn:c4", "turn:c2")),
    ("gconv:d4+turn:d4+turn:c4+turn:c2", "c2", ("turn:c2",)),
    ("gconv:d4+turn:d4+turn:flip-vertical", "flip-vertical", ("turn:flip-vertical",)),
]


@pytest.mark.parametrize(("name", "group", "quiet"), CASES, ids=str)
def test_on_data_with_the_symmetry_nothing_drives_what_breaks_it(name, group, quiet):
    """With ReLU, polyphase grids and an invariant head: the mean gradient over an input's orbit is zero, and only there."""
    found = mean_gradients(name, GROUPS[group], quiet, torch.randn(4, 1, 8, 8, dtype=torch.float64))
    for parameter, (one, mean) in found.items():
        breaking = any(f".{path}." in parameter for path in quiet)
        assert one > 1e-6
        assert mean < 1e-12 * max(1, one) if breaking else mean > 1e-6, parameter


@pytest.mark.parametrize("group", ["c4", "d4"])
def test_negative_control_data_with_the_symmetry_drive_a_plain_convolution(group):
    x = torch.randn(4, 1, 8, 8, dtype=torch.float64)
    found = mean_gradients(f"gconv:{group}+conv", GROUPS[group], ("conv",), x)
    assert min(mean / one for name, (one, mean) in found.items() if ".conv.linear" in name) > 0.05


def test_negative_control_data_without_the_symmetry_drive_what_breaks_it():
    x = torch.randn(4, 1, 8, 8, dtype=torch.float64)
    found = mean_gradients("gconv:d4+turn:d4+turn:c4", GROUPS["c4"], ("turn:d4", "turn:c4"), x)
    assert min(mean / one for name, (one, mean) in found.items() if "turn:d4" in name) > 0.01
    assert max(mean / one for name, (one, mean) in found.items() if "turn:c4" in name) < 1e-10


# ---- refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("c8",), "c8 does not map the grid onto itself: .*; use a group that is exact, e.g. c4 or d4"),
        (("c4", "d4"), "d4 is not within c4, whose fields the channels are"),
        (("c4", "c4", "c4"), "c4 is not a smaller group within c4: what breaks c4 cannot keep it"),
        (("d4", "c4", "flip-vertical"), "flip-vertical is not a smaller group within c4"),
        (("c4", "c4", "flip-vertical"), "flip-vertical is not within c4"),
    ],
    ids=str,
)
def test_steps_that_are_none_are_refused(arguments, message):
    group, *step = (GROUPS[name] for name in arguments)
    for make in (lambda: GroupContrast(group, 1, 1, 3, False, *step), lambda: BiasContrast(group, 1, *step)):
        with pytest.raises(ValueError, match=message):
            make()


def test_a_group_of_ones_own_has_steps_too():
    own = generated("own", rotation(90))
    path = GroupContrast(own, 1, 1, keeps=generated("half", rotation(180))).double()
    assert path.keeps.groups == ("half", "c2")
    with pytest.raises(ValueError, match="own turns images, so they must be square"):
        path(torch.randn(1, 4, 4, 6, dtype=torch.float64))
    with pytest.raises(ValueError, match="kernel_size 2 is even"):
        GroupContrast(own, 1, 1, 2)
