"""True float32: every pass of the evidence has it, whatever torch is set to, and every switch is as it was afterwards."""

import copy
from itertools import pairwise, permutations

import pytest
import torch
from torch import nn

import autosym
from autosym.bayes.priors import Prior
from autosym.evidence import gradient, kernel, laplace, variational
from autosym.runtime.arithmetic import true_float32
from models import randomised

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CUDNN, MATMUL, MKLDNN = torch.backends.cudnn, torch.backends.cuda.matmul, torch.backends.mkldnn
PARTS = (MATMUL, CUDNN.conv, CUDNN.rnn, MKLDNN.matmul, MKLDNN.conv)
SETTINGS = {  # ways to change them, of both kinds
    "products in TF32": lambda: setattr(MATMUL, "allow_tf32", True),
    "products": lambda: setattr(MATMUL, "allow_tf32", False),
    "no convolutions in TF32": lambda: setattr(CUDNN, "allow_tf32", False),
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "new: products in TF32": lambda: setattr(MATMUL, "fp32_precision", "tf32"),
    "new: convolutions": lambda: setattr(CUDNN.conv, "fp32_precision", "ieee"),
    "new: all in TF32": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
    "new: all": lambda: setattr(torch.backends, "fp32_precision", "ieee"),
}


def reset():
    torch.backends.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    CUDNN.allow_tf32 = True
    for part in (MATMUL, MKLDNN.matmul, MKLDNN.conv):
        part.fp32_precision = "none"


@pytest.fixture(autouse=True)
def as_it_comes():
    reset()
    yield
    reset()


def switches():
    """All of them. The old ones cannot be read where they contradict the new ones."""
    old = (lambda: MATMUL.allow_tf32, lambda: CUDNN.allow_tf32, torch.get_float32_matmul_precision)
    found = [torch.backends.fp32_precision, *(part.fp32_precision for part in PARTS)]
    for read in old:
        try:
            found.append(read())
        except RuntimeError:
            found.append("contradicts")
    return found


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_every_switch_is_off_inside_and_as_it_was_afterwards(count):
    for names in permutations(SETTINGS, count):
        reset()
        for name in names:
            SETTINGS[name]()
        before = switches()
        with true_float32(False):
            assert switches() == before
        with pytest.raises(KeyError), true_float32():  # noqa: PT012
            assert {part.fp32_precision for part in PARTS} == {"ieee"}, names
            raise KeyError
        assert switches() == before, names


def test_the_old_switches_can_be_read_inside():
    for name in ("products in TF32", "high", "medium", "no convolutions in TF32", "new: all in TF32"):
        reset()
        SETTINGS[name]()
        with true_float32(), true_float32():
            assert (MATMUL.allow_tf32, CUDNN.allow_tf32, torch.get_float32_matmul_precision()) == (False, False, "highest")


class Watched(nn.Module):
    """A network that notes the switches in every pass."""

    def __init__(self):
        super().__init__()
        self.net = randomised(nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2)))
        self.seen = []

    def forward(self, x):
        self.seen.append({part.fp32_precision for part in PARTS})
        return self.net(x)

    def __deepcopy__(self, memo):
        made = Watched()
        made.net, made.seen = copy.deepcopy(self.net, memo), self.seen
        return made


def data():
    return torch.randn(6, 1, 4, 4, dtype=torch.float64), torch.arange(6) % 2


def with_range(model):
    return autosym.symmetrise(model, {"rotation": 0.3}, samples=2).double()


def evidence_gradient(model):
    averaged, pair = with_range(model), data()
    at = laplace.at(averaged, pair)
    model.seen.clear()
    leaves = {name: leaf for name, leaf in averaged.named_parameters() if not leaf.requires_grad}
    assert gradient.gradient(averaged, pair, Prior(at.names), at, leaves)


def comparison(model):
    pair = data()
    fit = autosym.fit(model, pair, epochs=2)
    model.seen.clear()
    autosym.compare([fit, fit], pair)


PASSES = {
    "Kronecker": lambda model: laplace.at(model, data()),
    "log_evidence": lambda model: autosym.log_evidence(model, data(), sampled=True),
    "kernel": lambda model: kernel.at(model, data(), samples=3),
    "gradient": evidence_gradient,
    "variational": lambda model: variational.at(model, data(), variational.Posterior(model)),
    "compare": comparison,
    "relax": lambda model: autosym.relax(model, data()[0]),
}


@pytest.mark.parametrize("name", PASSES)
def test_passes_have_true_float32_and_leave_torch_as_it_was(name):
    SETTINGS["high"]()
    before, model = switches(), Watched()
    PASSES[name](model)
    assert model.seen
    assert all(seen == {"ieee"} for seen in model.seen)
    assert switches() == before


def test_it_can_be_asked_otherwise():
    SETTINGS["high"]()
    as_set, model, (x, y) = {part.fp32_precision for part in PARTS}, Watched(), data()
    for at in (laplace.at, kernel.at):
        model.seen.clear()
        at(model, (x, y), tf32=True)
        assert as_set in model.seen


def test_torch_is_as_it_was_after_an_error_in_the_model():
    SETTINGS["high"]()
    before, model, (x, y) = switches(), Watched(), data()
    with pytest.raises(ValueError, match="labels run from"):
        laplace.at(model, (x, y + 5))
    assert switches() == before


# ---- on a GPU


def folded():
    """A network of convolutions with normalisation, and images of it."""
    torch.manual_seed(0)
    widths, blocks = (3, 32, 64, 64, 64), []
    for i, o in pairwise(widths):
        blocks += [nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU()]
    net = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    x = torch.randn(64, 3, 16, 16)
    for _ in range(20):
        net(x + 0.1 * torch.randn_like(x))
    return net.eval(), x


@gpu
def test_relax_folds_on_a_gpu_as_on_the_cpu():
    SETTINGS["high"]()
    net, x = folded()
    relaxed = autosym.relax(net.cuda(), x[:8].cuda(), fold=True)
    assert len(relaxed.relaxation.names("folded")) == 4
    with true_float32(), torch.no_grad():
        torch.testing.assert_close(relaxed(x[:8].cuda()), net(x[:8].cuda()), rtol=1e-4, atol=1e-4)


@gpu
@pytest.mark.parametrize("estimate", [laplace.at, kernel.at])
def test_evidence_on_a_gpu_is_the_cpus_though_tf32_is_allowed(estimate):
    SETTINGS["high"]()
    net, x = folded()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.requires_grad_(False)
    pair = x, torch.arange(64) % 10

    @torch.no_grad()
    def found(model, pair, **options):
        at = estimate(model, pair, **options)
        return at(Prior(at.names, 1.0)).log_evidence.item()

    exact = found(copy.deepcopy(net).double(), (pair[0].double(), pair[1]))
    cpu, cuda = found(net, pair), tuple(t.cuda() for t in pair)
    net = net.cuda()
    true, fast = found(net, cuda), found(net, cuda, tf32=True)
    assert cpu == pytest.approx(exact, rel=1e-5)
    assert true == pytest.approx(exact, rel=1e-5)
    assert abs(fast - exact) > 3 * abs(true - exact), "TF32 is seen where it is asked for"
