import pytest
import torch
from torch import nn

from autosym.paths import Bias, Conv, Dense, FactoredIn, FactoredOut, Path
from factories import PATHS


def make(constructor, shape, dtype=torch.float64, samples=3):
    """A path with random weights (a new bias is zero) and a batch for it."""
    path = constructor().to(dtype)
    nn.init.normal_(path.weight)
    return path, torch.randn(samples, *shape, dtype=dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-4)], ids=["float64", "float32"])
@pytest.mark.parametrize(("name", "constructor", "shape"), PATHS)
def test_path_law(name, constructor, shape, dtype, tolerance):
    path, x = make(constructor, shape, dtype)
    columns = path.columns(x)
    blocks, _, size = path.weight.shape
    assert columns.shape == (3, columns.shape[1], blocks, size)
    law = path.place(torch.einsum("bski,koi->bsko", columns, path.weight), x)
    torch.testing.assert_close(path(x), law, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("name", "constructor", "shape"), PATHS)
def test_path_law_adjoint(name, constructor, shape):
    path, x = make(constructor, shape)
    y = path(x)
    positions = path.columns(x).shape[1]
    h = torch.randn(3, positions, *path.weight.shape[:2], dtype=torch.float64)
    g = torch.randn_like(y)
    placed, rows = path.place(h, x), path.rows(g)
    assert placed.shape == y.shape
    assert rows.shape == h.shape
    torch.testing.assert_close((placed * g).sum((*range(1, g.dim()),)), (h * rows).sum((1, 2, 3)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("name", "constructor", "shape"), PATHS)
def test_path_law_gradcheck(name, constructor, shape):
    path, x = make(constructor, shape, samples=2)

    def call(x, weight):
        return torch.func.functional_call(path, {"weight": weight}, (x,))

    assert torch.autograd.gradcheck(call, (x.requires_grad_(), path.weight.detach().requires_grad_()))


@pytest.mark.parametrize(("name", "constructor", "shape"), PATHS)
def test_path_law_per_sample(name, constructor, shape):
    path, x = make(constructor, shape)
    for i in range(len(x)):
        torch.testing.assert_close(path(x)[i : i + 1], path(x[i : i + 1]), rtol=0, atol=1e-12)


def test_path_law_negative_control():
    """A place that is not the forward's is noticed by the law, and a wrong adjoint by the inner products."""

    class Wrong(Conv):
        def place(self, h, x):
            return super().place(h, x).flip(-1)

    path, x = make(lambda: Wrong(2, 3), (2, 5, 4))
    assert (path(x) - Path.forward(path, x)).abs().max() > 0.1
    h, g = torch.randn(3, 20, 1, 3, dtype=torch.float64), torch.randn(3, 3, 5, 4, dtype=torch.float64)
    assert ((path.place(h, x) * g).sum() - (h * path.rows(g)).sum()).abs() > 0.1


def test_path_law_conv_is_torchs():
    conv = nn.Conv2d(4, 6, (3, 5), (2, 1), (1, 2), (1, 1), 2, bias=False, padding_mode="circular").double()
    path = Conv(4, 6, (3, 5), (2, 1), groups=2).double()
    path.weight.data = conv.weight.detach().reshape(path.weight.shape)
    x = torch.randn(2, 4, 6, 7, dtype=torch.float64)
    torch.testing.assert_close(path(x), conv(x), rtol=1e-12, atol=1e-12)


def test_path_law_factored_is_the_papers():
    """h[b,d,c] = sum_s x[b,c,s] theta_2[d,c,s] and y[b,d,t] = sum_c h[b,d,c] theta_1[d,c,t]."""
    first, x = make(lambda: FactoredIn((2, 4, 3), 5), (2, 4, 3))
    second = FactoredOut(2, (5, 2, 3)).double()
    theta_2, theta_1 = first.weight.transpose(0, 1), second.weight.mT
    h = torch.einsum("bcs,dcs->bdc", x.flatten(2), theta_2)
    y = torch.einsum("bdc,dct->bdt", h, theta_1).reshape(3, 5, 2, 3)
    torch.testing.assert_close(second(first(x)), y, rtol=1e-12, atol=1e-12)


SHIFTS = [(1, 0), (0, 1), (2, 3), (-1, 5)]
EQUIVARIANT = [
    pytest.param(lambda kernel=kernel, **keys: Conv(2, 3, kernel, **keys), id=f"conv {kernel}") for kernel in (1, 3, 5, (3, 5))
] + [
    pytest.param(lambda: Conv(2, 4, 3, groups=2), id="groups"),
    pytest.param(lambda: Conv(2, 4, 3, dilation=2), id="dilation"),
]


def shift_error(path, shift):
    """The largest difference between shifting the input and shifting the output, both circularly."""
    x = torch.randn(3, 2, 6, 7, dtype=torch.float64)
    return float((path(x.roll(shift, (-2, -1))) - path(x).roll(shift, (-2, -1))).detach().abs().max())


@pytest.mark.parametrize("shift", SHIFTS, ids=str)
@pytest.mark.parametrize("constructor", EQUIVARIANT)
def test_equivariant_to_circular_shifts(constructor, shift):
    assert shift_error(constructor().double(), shift) < 1e-12


@pytest.mark.parametrize("shift", SHIFTS, ids=str)
@pytest.mark.parametrize(
    "constructor",
    [
        pytest.param(lambda: Conv(2, 3, 3, padding_mode="zeros"), id="zeros"),
        pytest.param(lambda: Dense((2, 6, 7), (3, 6, 7)), id="dense"),
        pytest.param(lambda: nn.Sequential(FactoredIn((2, 6, 7), 3), FactoredOut(2, (3, 6, 7))), id="factored"),
    ],
)
def test_equivariant_negative_control(constructor, shift):
    assert shift_error(constructor().double(), shift) > 0.01


@pytest.mark.parametrize(
    ("make_path", "message"),
    [
        (lambda: Conv(3, 4, groups=2), "groups=2 must divide 3 input"),
        (lambda: Conv(2, 3, groups=2), "and 3 output channels"),
        (lambda: Conv(2, 2, padding_mode="mirror"), "padding_mode 'mirror'"),
        (lambda: Conv(2, 2, 4), r"kernel_size \(4, 4\) is even"),
        (lambda: Bias((2, 1), (3, 4)), r"shape \(2, 1\) does not broadcast to \(3, 4\)"),
        (lambda: Bias((3,), (2, 3)), r"shape \(3,\) does not broadcast"),
    ],
)
def test_wrong_arguments_are_named(make_path, message):
    with pytest.raises(ValueError, match=message):
        make_path()
