"""Products in blocks against einsum, with their derivatives, and the layout that spares copies."""

import pytest
import torch

from autosym.products import factored_in, factored_out

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


def test_vmap(case):
    product, (x, weight), formula = case
    several = torch.stack([weight.detach(), 2 * weight.detach()])
    found = torch.func.vmap(product, (None, 0))(x.detach(), several)
    torch.testing.assert_close(found, torch.stack([torch.einsum(formula, x.detach(), w) for w in several]))


def test_between_the_factors_samples_are_next_to_each_other():
    """h and its gradient: then both products, and the sums of outer products of both, read it as it is."""
    _, x_shape, w_shape, _ = CASES["in"]
    h = factored_in(torch.randn(x_shape), torch.randn(w_shape)).requires_grad_()
    assert h.stride(0) == 1
    (g,) = torch.autograd.grad(factored_out(h, torch.randn(CASES["out"][2])).square().sum(), h)
    assert g.stride(0) == 1
