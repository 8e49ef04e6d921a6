"""Products in blocks against einsum, with their derivatives, and the layout that spares copies."""

import pytest
import torch

from autosym.linear.products import factored_in, factored_out, fast_products

CASES = {
    "in": (factored_in, (3, 4, 6), (4, 5, 6), "bcs,cds->bdc"),
    "out": (factored_out, (3, 5, 4), (5, 7, 4), "bdc,dtc->bdt"),
}


@pytest.fixture(params=CASES)
def case(request):
    product, *shapes, formula = CASES[request.param]
    generator = torch.Generator().manual_seed(0)
    operands = [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]
    return product, operands, formula


def test_values_are_those_of_einsum(case):
    product, operands, formula = case
    torch.testing.assert_close(product(*operands), torch.einsum(formula, *operands))


def test_first_and_second_derivatives(case):
    product, operands, _ = case
    assert torch.autograd.gradcheck(product, operands)
    assert torch.autograd.gradgradcheck(product, operands)


def test_forward_mode_derivatives(case):
    product, operands, formula = case
    operands = tuple(t.detach() for t in operands)
    tangents = tuple(torch.randn_like(t) for t in operands)
    plain = lambda *t: torch.einsum(formula, *t)  # noqa: E731
    for chosen in ((0, 1), (0,), (1,)):

        def of(f, chosen=chosen):
            return lambda *moved: f(*(moved[chosen.index(i)] if i in chosen else operands[i] for i in range(2)))

        given = tuple(operands[i] for i in chosen), tuple(tangents[i] for i in chosen)
        torch.testing.assert_close(torch.func.jvp(of(product), *given)[1], torch.func.jvp(of(plain), *given)[1])
    torch.testing.assert_close(
        torch.func.hessian(lambda w: product(operands[0], w).square().sum())(operands[1]),
        torch.func.hessian(lambda w: plain(operands[0], w).square().sum())(operands[1]),
    )


def test_under_autocast_it_is_in_the_lower_precision_and_gradients_are_not(case):
    product, operands, formula = case
    operands = [t.detach().float().requires_grad_() for t in operands]
    with torch.autocast("cpu", torch.bfloat16):
        output = product(*operands)
        assert product(*(t.double() for t in operands)).dtype == torch.float64
    assert output.dtype == torch.bfloat16
    gradients = torch.autograd.grad(output.float().square().sum(), operands)
    expected = torch.autograd.grad(torch.einsum(formula, *operands).square().sum(), operands)
    for gradient, exact in zip(gradients, expected, strict=True):
        assert gradient.dtype == torch.float32
        assert (gradient - exact).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize("mapped", [(None, 0), (0, None), (0, 0)])
def test_vmap(case, mapped):
    product, operands, formula = case
    operands = [
        t.detach() if m is None else torch.stack([t.detach(), 2 * t.detach()]) for t, m in zip(operands, mapped, strict=True)
    ]
    each = [[t if m is None else t[i] for t, m in zip(operands, mapped, strict=True)] for i in range(2)]
    found = torch.func.vmap(product, mapped)(*operands)
    torch.testing.assert_close(found, torch.stack([torch.einsum(formula, *pair) for pair in each]))


def test_no_samples(case):
    product, (x, weight), _ = case
    assert product(x[:0], weight).shape[0] == 0


def test_between_the_factors_samples_are_next_to_each_other():
    """h and its gradient: then both products, and the sums of outer products of both, read it as it is."""
    _, x_shape, w_shape, _ = CASES["in"]
    h = factored_in(torch.randn(x_shape), torch.randn(w_shape)).requires_grad_()
    assert h.stride(0) == 1
    (g,) = torch.autograd.grad(factored_out(h, torch.randn(CASES["out"][2])).square().sum(), h)
    assert g.stride(0) == 1


@pytest.fixture
def setting():
    """Of torch, which is put back; it is no plain attribute, so that monkeypatch cannot set it."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    yield matmul
    matmul.fp32_precision = before


@pytest.mark.parametrize(("before", "within"), [("none", "tf32"), ("tf32", "tf32"), ("ieee", "ieee")])
def test_fast_products_leave_the_setting_as_it_was_and_heed_a_refusal(before, within, setting):
    setting.fp32_precision, seen = before, []

    def work():
        with fast_products():
            seen.append(setting.fp32_precision)
            raise KeyError

    with pytest.raises(KeyError):
        work()
    assert seen == [within]
    assert setting.fp32_precision == before
    with fast_products(False):
        assert setting.fp32_precision == before
