"""Circular convolutions, patches and correlations with shifts, against pixel by pixel forms."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import jacrev, vmap
from torch.testing import assert_close

from autosym.linear import circular
from autosym.linear.circular import circular_conv, circular_correlations, patches, shifted_correlations, transposed, wrap
from autosym.linear.conv import Conv

KERNELS = [(1, 1), (3, 3), (1, 3), (3, 5), (5, 1)]


def maps(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def around(x, kernel):
    """The map continued around its sides, by positions modulo its size."""
    rows, columns = (torch.arange(-(k // 2), n + k // 2) % n for k, n in zip(kernel, x.shape[-2:], strict=True))
    return x[..., rows[:, None], columns]


def slow_conv(x, filters):
    """Without a form of its own for the adjoint: torch differentiates positions and products."""
    return F.conv2d(around(x, filters.shape[-2:]), filters)


# ---- the map around its sides


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("shape", [(2, 3, 4, 6), (3, 4, 6), (1, 1, 2, 3)], ids=str)
def test_wrap_takes_positions_around_the_sides(shape, kernel):
    x = maps(*shape)
    assert torch.equal(wrap(x, kernel), around(x, kernel))
    reach = [k // 2 for k in kernel]
    assert torch.equal(wrap(x, kernel), F.pad(x, (reach[1], reach[1], reach[0], reach[0]), "circular"))


@pytest.mark.parametrize("kernel", KERNELS)
def test_wrap_by_one_gather_is_the_same(kernel):
    """The form on a GPU, from a table of positions."""
    x = maps(2, 3, 4, 6)
    table = circular._around((4, 6), (kernel[0] // 2, kernel[1] // 2), x.device)
    assert torch.equal(x.flatten(-2)[..., table], around(x, kernel))


def test_a_filter_that_sees_one_position_needs_no_copy():
    x = maps(2, 3, 4, 6)
    assert wrap(x, (1, 1)) is x


@pytest.mark.parametrize(("kernel", "size"), [((7, 3), (2, 6)), ((3, 9), (5, 3)), ((3, 3), (0, 4))], ids=str)
def test_a_filter_that_reaches_around_more_than_once_is_refused(kernel, size):
    x = maps(1, 2, *size)
    message = rf"a {kernel[0]}x{kernel[1]} filter reaches around a map of \({size[0]}, {size[1]}\) more than once"
    with pytest.raises(ValueError, match=message):
        wrap(x, kernel)
    with pytest.raises(ValueError, match=message):
        circular_conv(x, maps(1, 2, *kernel))


def test_a_filter_may_reach_around_just_once():
    x = maps(1, 2, 2, 3)
    assert torch.equal(wrap(x, (5, 7)), around(x, (5, 7)))


# ---- patches


@pytest.mark.parametrize("kernel", [*KERNELS, (2, 4)])
@pytest.mark.parametrize("stride", [(1, 1), (2, 1), (3, 2)], ids=str)
@pytest.mark.parametrize("dilation", [(1, 1), (1, 2), (2, 1)], ids=str)
def test_patches_are_those_of_unfold(kernel, stride, dilation):
    x = maps(2, 3, 9, 10)
    seen = patches(x, kernel, stride, dilation)
    unfolded = F.unfold(x, kernel, dilation=dilation, stride=stride)  # (B, C k^2, S)
    assert torch.equal(seen.permute(0, 1, 4, 5, 2, 3).reshape(unfolded.shape), unfolded)
    assert seen.data_ptr() == x.data_ptr(), "there is no copy"


@pytest.mark.parametrize(
    "strange",
    [
        lambda x: x[:, 1:, 2:, 1:],
        lambda x: x.transpose(0, 1),
        lambda x: x.mT,
        lambda x: x.contiguous(memory_format=torch.channels_last),
        lambda x: x[:1].expand(3, -1, -1, -1),
    ],
    ids=["slice", "channels first", "transposed", "channels last", "expanded"],
)
def test_patches_of_maps_that_lie_otherwise_in_memory(strange):
    x = strange(maps(2, 3, 7, 8))
    seen = patches(x, (3, 2), (2, 1), (1, 2))
    assert torch.equal(seen, patches(x.clone(memory_format=torch.contiguous_format), (3, 2), (2, 1), (1, 2)))
    assert torch.equal(seen[1, 1, 1, 3], x[1, 1, 2:5, 3:6:2])


# ---- the convolution and its derivatives


@pytest.mark.parametrize("kernel", [*KERNELS, (5, 7)])
def test_circular_conv_is_the_sum_over_positions_around(kernel):
    x, filters = maps(2, 3, 4, 6), maps(5, 3, *kernel)
    expected = torch.zeros(2, 5, 4, 6, dtype=torch.float64)
    for i in range(kernel[0]):
        for j in range(kernel[1]):
            moved = x.roll((kernel[0] // 2 - i, kernel[1] // 2 - j), (2, 3))
            expected += torch.einsum("oc,bchw->bohw", filters[:, :, i, j], moved)
    assert_close(circular_conv(x, filters), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kernel", [(1, 1), (3, 3), (3, 1), (1, 5)])
def test_gradients_and_their_gradients(kernel):
    x, filters = maps(2, 2, 3, 4).requires_grad_(), maps(2, 2, *kernel).requires_grad_()
    assert torch.autograd.gradcheck(circular_conv, (x, filters), fast_mode=True)
    assert torch.autograd.gradgradcheck(circular_conv, (x, filters), fast_mode=True)


@pytest.mark.parametrize("kernel", [(3, 3), (5, 7)])
def test_gradients_are_those_of_the_padded_form(kernel):
    """More outputs than inputs, and a filter that reaches around once."""
    x, filters, cotangent = maps(2, 3, 2, 3).requires_grad_(), maps(4, 3, *kernel).requires_grad_(), maps(2, 4, 2, 3)
    found, expected = (torch.autograd.grad(form(x, filters), (x, filters), cotangent) for form in (circular_conv, slow_conv))
    assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [(2, 2), (1, 3), (4,), (1, 2, 2)])
def test_maps_of_few_positions_are_one_product_with_the_same_values_and_derivatives(size, monkeypatch):
    x, filters = maps(3, 2, *size).requires_grad_(), maps(5, 2, *(3 if n > 1 else 1 for n in size)).requires_grad_()
    cotangent, found = maps(3, 5, *size), []
    for few in (0, 4):
        monkeypatch.setattr(circular, "FEW_POSITIONS", few)
        y = circular_conv(x, filters)
        found.append((y.detach(), *torch.autograd.grad(y, (x, filters), cotangent)))
    assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradgradcheck(circular_conv, (x, filters), fast_mode=True)
    assert_close(vmap(circular_conv, (0, None))(torch.stack([x, 2 * x]), filters), torch.stack([found[0][0], 2 * found[0][0]]))


def test_it_can_be_vectorised_and_differentiated_by_functions():
    x, filters = maps(3, 2, 2, 4, 5), maps(3, 4, 2, 3, 3)
    assert_close(vmap(circular_conv)(x, filters), torch.stack([slow_conv(*pair) for pair in zip(x, filters, strict=True)]))
    assert_close(
        vmap(circular_conv, (0, None))(x, filters[0]), slow_conv(x.flatten(0, 1), filters[0]).unflatten(0, x.shape[:2])
    )
    for argument in (0, 1):
        found, expected = (jacrev(form, argument)(x[0], filters[0]) for form in (circular_conv, slow_conv))
        assert_close(found, expected)


@pytest.mark.parametrize(("wanted", "spare"), [("x", "GRADIENTS"), ("filters", "circular_conv")])
def test_only_the_gradient_that_is_asked_for_is_computed(wanted, spare, monkeypatch):
    inputs = {"x": maps(2, 3, 4, 5), "filters": maps(4, 3, 3, 3)}
    inputs[wanted].requires_grad_()
    expected = torch.autograd.grad(slow_conv(**inputs).square().sum(), inputs[wanted])
    one = circular_conv(**inputs)
    both = circular_conv(**{name: t.detach().requires_grad_() for name, t in inputs.items()})

    def refuse(*_):
        raise AssertionError(f"{spare} is not needed")

    monkeypatch.setattr(circular, spare, {2: refuse} if spare == "GRADIENTS" else refuse)
    assert_close(torch.autograd.grad(one.square().sum(), inputs[wanted]), expected)
    with pytest.raises(AssertionError, match="not needed"):
        both.sum().backward()


def test_autocast_leaves_float64_as_torch_does():
    x, filters = maps(2, 3, 5, 5), maps(4, 3, 3, 3)
    with torch.autocast("cpu", torch.bfloat16):
        assert circular_conv(x, filters).dtype == F.conv2d(x, filters).dtype == torch.float64


def test_under_autocast_it_is_in_the_lower_precision_and_gradients_are_not():
    x, filters = maps(2, 3, 4, 5).float().requires_grad_(), maps(4, 3, 3, 3).float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        output = circular_conv(x, filters)
    assert output.dtype == torch.bfloat16
    gradients = torch.autograd.grad(output.float().square().sum(), (x, filters))
    expected = torch.autograd.grad(slow_conv(x, filters).square().sum(), (x, filters))
    for gradient, exact in zip(gradients, expected, strict=True):
        assert gradient.dtype == torch.float32
        assert (gradient - exact).norm() < 0.02 * exact.norm()


# ---- correlations with shifts


def unfolded_gram(x, kernel, mode):
    height, width = (k // 2 for k in kernel)
    padded = F.pad(x, (width, width, height, height), "circular" if mode == "circular" else "constant")
    columns = F.unfold(padded, kernel)
    return torch.einsum("bis,bjs->ij", columns, columns)[None]


@pytest.mark.parametrize("mode", ["circular", "zeros"])
@pytest.mark.parametrize(
    ("kernel", "size", "flat"),
    [
        ((3, 3), (24, 25), True),
        ((3, 3), (23, 40), False),
        ((3, 3), (5, 7), False),
        ((1, 3), (24, 24), True),
        ((3, 1), (6, 5), False),
        ((5, 5), (48, 48), True),
        ((5, 5), (24, 24), False),
        ((5, 3), (9, 11), False),
        ((3, 5), (50, 48), True),
        ((7, 1), (13, 13), False),
        ((1, 1), (4, 5), True),
    ],
    ids=str,
)
def test_shifted_correlations_are_the_gram_of_patches(kernel, size, flat, mode, monkeypatch):
    calls, real = [], circular._lagged
    monkeypatch.setattr(circular, "_lagged", lambda *a: calls.append(1) or real(*a))
    x = maps(2, 2, *size)
    assert_close(shifted_correlations(x, kernel, mode), unfolded_gram(x, kernel, mode), rtol=1e-12, atol=1e-10)
    assert bool(calls) is flat, "the other form was meant"
    if mode == "circular":
        assert_close(circular_correlations(x, kernel), unfolded_gram(x, kernel, mode), rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize(
    ("size", "kernel"), [((7,), (3,)), ((1,), (3,)), ((2, 2), (3, 3)), ((1, 5), (3, 5)), ((3, 4, 2), (3, 1, 3))]
)
def test_circular_correlations_of_maps_of_any_size(size, kernel):
    """On the smallest maps two offsets are the same position: these rows are equal to the last bit, so the rank is what it was."""
    x = maps(4, 2, *size)
    conv = Conv(2, 1, kernel, dims=len(size)).double()
    columns = conv.columns(x)
    found = circular_correlations(x, kernel)
    assert_close(found, torch.einsum("bski,bskj->kij", columns, columns), rtol=1e-12, atol=1e-10)
    assert torch.equal(found, found.mT)


@pytest.mark.parametrize(("size", "kernel"), [((7,), (3,)), ((2, 2), (3, 3)), ((6, 5), (3, 5)), ((3, 4, 2), (3, 1, 3))])
def test_the_form_of_the_adjoint_for_a_gpu(size, kernel):
    x, filters = maps(4, 2, *size).requires_grad_(), maps(3, 2, *kernel)
    y = circular_conv(x, filters)
    g = torch.randn_like(y)
    assert_close(transposed(g, filters), torch.autograd.grad(y, x, g)[0], rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize("mode", ["circular", "zeros"])
@pytest.mark.parametrize("size", [24, 8])
@pytest.mark.parametrize(
    "strange",
    [lambda x: x.mT, lambda x: x.contiguous(memory_format=torch.channels_last), lambda x: x[:1], lambda x: x[:, :1]],
    ids=["transposed", "channels last", "one sample", "one channel"],
)
def test_shifted_correlations_of_other_maps(strange, size, mode):
    x = strange(maps(3, 2, size, size))
    assert_close(shifted_correlations(x, (3, 3), mode), unfolded_gram(x, (3, 3), mode), rtol=1e-12, atol=1e-10)


def test_the_sides_matter():
    """Where the modes differ, the two forms are not one."""
    x = maps(2, 2, 24, 24)
    circular, zeros = (shifted_correlations(x, (3, 3), mode) for mode in ("circular", "zeros"))
    assert not torch.allclose(circular, zeros)
