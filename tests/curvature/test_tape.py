"""The tape of a forward pass: rows that come together, weights that take no part, and a model left as it was."""

import pytest
import torch
from torch import nn
from torch.func import jacrev
from torch.testing import assert_close

import oracles
from autosym.bayes.likelihoods import LIKELIHOODS, Gaussian
from autosym.curvature.kronecker import kfac
from autosym.curvature.owners import sites
from autosym.curvature.tape import Tape
from autosym.curvature.verification import verify
from autosym.linear.dense import Bias, Dense
from autosym.nn import layers
from models import EXACT, KINDS, assert_same, convnet, curvature, draw, mlp, randomised


def ignore(*_):
    pass


def together(model, x, expand_bias=False):
    """Which paths' rows come together, and all rows, for one cotangent."""
    with Tape(sites(model, expand_bias), ignore) as tape, torch.enable_grad():
        f = tape.record(model, x)
        found = list(tape.backward(f, torch.ones_like(f)))
    return [names for names, _ in found], {name: rows for names, rows in found for name in names}


def apart(monkeypatch):
    """From now on no rows are shared: those of a bias are copies."""
    real = Bias.rows
    monkeypatch.setattr(Bias, "rows", lambda self, g: real(self, g).clone())


# ---- rows that are the same numbers at the same place


class Parallel(nn.Module):
    """Two dense maps whose outputs are added: the cotangent of both is one tensor."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.head = nn.Linear(5, 4), nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.one(x) + self.two(x)))


SHARED = {
    "torch": (lambda: mlp(5, 4, 3), (5,), [("0.weight", "0.bias"), ("2.weight", "2.bias")]),
    "ours": (
        lambda: nn.Sequential(layers.fc((5,), (4,)), nn.Tanh(), layers.fc((4,), (3,))),
        (5,),
        [("0.linear", "0.bias"), ("2.linear", "2.bias")],
    ),
    "parallel": (Parallel, (5,), [("one.weight", "one.bias", "two.weight", "two.bias"), ("head.weight", "head.bias")]),
    "other shapes": (  # one cotangent for both paths, but rows of other shapes
        lambda: nn.Sequential(
            layers.Relaxed({"conv": layers.conv((2, 4, 6), (3, 4, 6))}, {"fc": layers.fc((2, 4, 6), (3, 4, 6))}),
            nn.Tanh(),
            layers.fc((3, 4, 6), (3,)),
        ),
        (2, 4, 6),
        [("0.conv.bias",), ("0.conv.linear",), ("0.fc.linear", "0.fc.bias"), ("2.linear", "2.bias")],
    ),
    "conv": (convnet, (2, 6, 5), [("0.bias",), ("0.weight",), ("2.bias",), ("2.weight",), ("5.weight", "5.bias")]),
}


@pytest.mark.parametrize("case", SHARED)
def test_a_map_and_its_bias_have_their_rows_together(case):
    make, shape, expected = SHARED[case]
    names, rows = together(randomised(make()), draw("gaussian", 4, shape)[0])
    assert sorted(names) == sorted(expected)
    assert sorted(name for group in names for name in group) == sorted(rows), "every path comes once"


@pytest.mark.parametrize("case", SHARED)
@pytest.mark.parametrize("options", [{}, {"sampled": True}, {"subset": 5}, {"expand_bias": True}], ids=str)
def test_factors_of_shared_rows_are_those_of_separate_ones(case, options, monkeypatch):
    make, shape, _ = SHARED[case]
    model, data = randomised(make()), draw("categorical", 11, shape)
    shared = curvature(model, data, batch_size=4, **options)
    apart(monkeypatch)
    assert all(len(names) == 1 or not any("bias" in name for name in names) for names in together(model, data[0])[0])
    assert_same(shared, curvature(model, data, batch_size=4, **options), 1e-12, 1e-12)


@pytest.mark.parametrize("likelihood", KINDS)
def test_shared_rows_give_the_exact_block_of_a_bias(likelihood):
    model, (x, y) = randomised(Parallel()), draw(likelihood, 9)
    found = curvature(model, (x, y), likelihood, batch_size=4)
    for name in ("one.bias", "two.bias", "head.bias"):
        exact = oracles.block_ggn(model, name, x, y, likelihood)
        assert_close(found.factors[name].A[0], torch.ones(1, 1, dtype=torch.float64), **EXACT)
        assert_close(found.factors[name].G[0], exact, **EXACT)
        assert_close(found.factors[name.replace("bias", "weight")].G[0], exact, **EXACT)


class Pooled(nn.Module):
    """(B, T, 4) -> 2 by a linear layer at every time, and the mean over times."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x):
        return self.outer(torch.tanh(self.inner(x)).mean(1))


def pooled_factors(model, data, likelihood, expand_bias):
    """The factors of the inner layer by loops over samples and times: of its weight and of its bias."""
    count = sum(len(x) for x, _ in data)
    A, G = (torch.zeros(1, d, d, dtype=torch.float64) for d in (4, 3))
    bias_A, bias_G = (torch.zeros(1, d, d, dtype=torch.float64) for d in (1, 3))
    for x, _ in data:
        for sample in x:
            J = jacrev(lambda h: model.outer(torch.tanh(h).mean(0)))(model.inner(sample).detach()).detach()  # (2, T, 3)
            root = LIKELIHOODS[likelihood]().root(model(sample[None]).detach())[0]
            g = torch.einsum("cth,cr->rth", J, root)
            times = len(sample)
            A[0] += sample.T @ sample / count
            G[0] += torch.einsum("rth,rtk->hk", g, g) / times
            bias_A += (times if expand_bias else 1) / count
            bias_G[0] += torch.einsum("rth,rtk->hk", g, g) / times if expand_bias else torch.einsum("rth,rsk->hk", g, g)
    return (A, G), (bias_A, bias_G)


@pytest.mark.parametrize("likelihood", KINDS)
@pytest.mark.parametrize("expand_bias", [False, True])
@pytest.mark.parametrize("lengths", [(1, 3, 1, 2), (3, 1, 3), (2, 2), (1, 1)], ids=str)
def test_rows_may_be_shared_in_some_batches_only(lengths, expand_bias, likelihood):
    """Of one time the bias sees what the weight sees; of several its rows are a sum, or with expand_bias the same again."""
    model = randomised(Pooled())
    data = [(torch.randn(3, times, 4, dtype=torch.float64), draw(likelihood, 3, outputs=2)[1]) for times in lengths]
    found = curvature(model, data, likelihood, expand_bias=expand_bias)
    weight, bias = pooled_factors(model, data, likelihood, expand_bias)
    for name, expected in (("inner.weight", weight), ("inner.bias", bias)):
        assert_close((found.factors[name].A, found.factors[name].G), expected, **EXACT)
    for x, _ in data:
        shared = expand_bias or x.shape[1] == 1
        assert (("inner.weight", "inner.bias") in together(model, x, expand_bias)[0]) is shared


# ---- weights take no part


class Product(torch.autograd.Function):
    """x W^T, which counts how often the gradient of W is asked for."""

    asked = 0

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.mT

    @staticmethod
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        if not ctx.needs_input_grad[1]:
            return g @ weight, None
        Product.asked += 1
        return g @ weight, g.mT @ x


class Counted(Dense):
    def forward(self, x):
        return Product.apply(x, self.weight[0])


def counted():
    Product.asked = 0
    return randomised(nn.Sequential(Counted((5,), (4,)), nn.Tanh(), Counted((4,), (4,)), nn.Tanh(), Counted((4,), (3,))))


def test_no_gradient_of_a_weight_is_computed():
    model, (x, _) = counted(), draw("gaussian", 6)
    together(model, x)
    assert Product.asked == 0
    model(x).sum().backward()
    assert Product.asked == 3, "the count would be empty"


@pytest.mark.parametrize("options", [{}, {"sampled": True}, {"subset": 5}], ids=str)
def test_a_pass_asks_for_gradients_of_weights_only_to_verify_them(options):
    model, data = counted(), draw("gaussian", 12)
    verify(model, data[0][:2])
    once, Product.asked = Product.asked, 0
    found = kfac(model, data, Gaussian(), batch_size=2, **options)
    assert Product.asked == once > 0
    plain = randomised(nn.Sequential(Dense((5,), (4,)), nn.Tanh(), Dense((4,), (4,)), nn.Tanh(), Dense((4,), (3,))))
    plain.load_state_dict(model.state_dict())
    assert_same(found, kfac(plain, data, Gaussian(), **options))


def test_verification_is_with_weights():
    """The gradient of a weight that is used elsewhere too is not that of its path: only a graph with weights shows it."""

    class Doubled(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(5, 3)

        def forward(self, x):
            return self.inner(x) + x @ self.inner.weight.T

    x, _ = draw("gaussian", 2)
    with pytest.raises(ValueError, match=r"inner.weight .* also used outside of Linear"):
        verify(randomised(Doubled()), x)


# ---- the parameters afterwards


class Raises(nn.Module):
    """Passes its input on, but not for the n-th time."""

    def __init__(self, at):
        super().__init__()
        self.left = at

    def forward(self, x):
        self.left -= 1
        if self.left == 0:
            raise KeyError("the model's own error")
        return x


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"subset": 4}], ids=str)
def test_parameters_are_as_they_were_when_the_model_raises(at, options):
    """In the verification, or in the first or second batch."""
    model = nn.Sequential(nn.Linear(5, 4), Raises(at), nn.Linear(4, 4), nn.Linear(4, 3)).double()
    model[2].requires_grad_(False)
    model[0].weight.grad = torch.full_like(model[0].weight, 7.0)
    gradient = model[0].weight.grad
    with pytest.raises(KeyError, match="the model's own error"):
        curvature(model, draw("categorical", 12), batch_size=6, **options)
    wanted = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    assert wanted == {f"{i}.{name}": i != 2 for i in (0, 2, 3) for name in ("weight", "bias")}
    assert model[0].weight.grad is gradient
    assert (gradient == 7).all()
    assert all(parameter.grad is None for name, parameter in model.named_parameters() if name != "0.weight")
    assert not any(module._forward_hooks for module in model.modules())


def test_a_pass_writes_no_gradients():
    model, data = convnet(), draw("categorical", 6, (2, 6, 5))
    curvature(model, data)
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    model(data[0]).sum().backward()
    kept = [parameter.grad.clone() for parameter in model.parameters()]
    curvature(model, data)
    assert all(torch.equal(parameter.grad, grad) for parameter, grad in zip(model.parameters(), kept, strict=True))


@pytest.mark.parametrize("frozen", [[0], [0, 2], [2], [4]], ids=str)
def test_what_is_frozen_before_or_after_a_layer_changes_nothing(frozen):
    """The graph begins at the first layer with a path: nothing before it needs one."""
    model, data = mlp(5, 4, 4, 3), draw("categorical", 6)
    whole = curvature(model, data)
    for index in frozen:
        model[index].requires_grad_(False)
    found = curvature(model, data)
    assert {int(name[0]) for name in found.factors} == {0, 2, 4} - set(frozen)
    for name, factors in found.factors.items():
        assert_close((factors.A, factors.G), (whole.factors[name].A, whole.factors[name].G), **EXACT)
