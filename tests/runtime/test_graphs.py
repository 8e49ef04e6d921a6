"""A step is called as it is on a CPU, and on a GPU replayed as a CUDA graph, bit for bit the same."""

import copy
import warnings

import pytest
import torch
from torch import nn

import autosym
from autosym import Categorical, Prior
from autosym.curvature.owners import sites
from autosym.runtime.graphs import WARM_UP, Captured, beside
from autosym.training.steps import Weights
from models import draw, images, mlp, small

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("wanted", [True, False])
def test_on_a_cpu_a_step_is_called_as_it_is(wanted):
    calls = []
    step = Captured(lambda *inputs: calls.append(inputs), wanted)
    x, y = torch.zeros(3), torch.ones(3)
    for _ in range(WARM_UP + 3):
        step(x, y)
    assert len(calls) == WARM_UP + 3
    assert all(a is x and b is y for a, b in calls), "the tensors themselves, not copies"
    assert not step.graphs


def test_on_a_cpu_errors_pass():
    def fails(x):
        raise RuntimeError("the step's own")

    step = Captured(fails)
    for _ in range(WARM_UP + 2):
        with pytest.raises(RuntimeError, match="the step's own"):
            step(torch.zeros(3))


def test_on_a_cpu_work_beside_is_done_in_order():
    order, x = [], torch.ones(2, requires_grad=True)

    def work():
        order.append("beside")
        return [2 * x, 3 * x]

    join = beside(work, x)
    order.append("between")
    first, second = join()
    assert order == ["beside", "between"]
    assert torch.equal(torch.autograd.grad((first * second).sum(), x)[0], torch.full((2,), 12.0))


# ---- on a GPU


@pytest.fixture
def deterministic():
    """Kernels that add in the same order every time."""
    before = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    yield
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before


def steps(model, batches, wanted):
    """Weights, moments and loss after a step on each batch, and the steps that were taken in Python."""
    model, called = copy.deepcopy(model).cuda(), []
    weights = Weights({site.name: site.parameter for site in sites(model)}, 20, "adam", clip=1.0)
    weights.set_prior(Prior(list(weights.parameters)), Categorical())

    def step(x, y):
        called.append(len(x))
        weights.step(model, Categorical(), x, y)

    run = Captured(step, wanted)
    for index, (x, y) in enumerate(batches):
        weights.lr.fill_(0.01 / (index + 1))
        run(x.cuda(), y.cuda())
    tensors = [*model.parameters(), *weights.first.values(), *weights.second.values(), weights.loss, weights.steps]
    return [t.detach().cpu() for t in tensors], called, run


NETS = {
    "mlp": lambda: (mlp(5, 4, 3).float(), *draw("categorical", 20)),
    "f-fc+conv": lambda: (small("f-fc+conv"), *images(samples=20)),
    "s-fc+s-conv": lambda: (small("s-fc+s-conv"), *images(samples=20)),
    "f-fc+conv+gconv:c4": lambda: (small("f-fc+conv+gconv:c4"), *images(samples=20)),
}


@gpu
@pytest.mark.parametrize("kind", NETS)
def test_replayed_steps_are_the_eager_ones_bit_for_bit(kind, deterministic):
    """Over seven epochs of two whole batches and a smaller last one: after a warm-up neither is launched from Python."""
    model, x, y = NETS[kind]()
    batches = [(x[i : i + 8].float(), y[i : i + 8]) for _ in range(7) for i in (0, 8, 16)]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*CUDA graph.*")
        replayed, called, run = steps(model, batches, True)
    eager, each, _ = steps(model, batches, False)
    assert len(replayed) == len(eager)
    assert all(torch.equal(a, b) for a, b in zip(replayed, eager, strict=True))
    assert len(each) == 21
    assert sorted(called) == [4] * (WARM_UP + 1) + [8] * (WARM_UP + 1), "the warm-up, and once to record"
    assert len(run.graphs) == 2


@gpu
def test_a_third_shape_is_called_as_it_is(deterministic):
    model, x, y = NETS["mlp"]()
    batches = [(x[:n].float(), y[:n]) for _ in range(6) for n in (8, 4, 6)]
    replayed, called, run = steps(model, batches, True)
    eager, _, _ = steps(model, batches, False)
    assert all(torch.equal(a, b) for a, b in zip(replayed, eager, strict=True))
    assert called.count(6) == 6
    assert {kind[0][0][0] for kind in run.graphs} == {8, 4}


class Waits(nn.Module):
    """A layer that reads a value back, as what cannot be recorded does."""

    def forward(self, x):
        return x if x.sum().item() < 1e30 else 0 * x


@gpu
def test_a_step_that_waits_for_the_device_is_called_as_it_is_after_one_warning(deterministic):
    model, x, y = NETS["mlp"]()
    model = nn.Sequential(model, Waits())
    batches = [(x[i : i + 8].float(), y[i : i + 8]) for _ in range(7) for i in (0, 8, 16)]
    torch.cuda.manual_seed(3)
    expected = torch.randn(5, device="cuda")
    torch.cuda.manual_seed(3)
    with pytest.warns(UserWarning, match=r"could not be recorded as a CUDA graph .*\.item\(\)") as caught:
        called_anew, called, run = steps(model, batches, True)
    assert len([w for w in caught if "CUDA graph" in str(w.message)]) == 1
    assert torch.equal(torch.randn(5, device="cuda"), expected), "the generator is as it was"
    assert not run.graphs
    assert len(called) == 21 + 1, "and the one that failed"
    eager, _, _ = steps(model, batches, False)
    assert all(torch.equal(a, b) for a, b in zip(called_anew, eager, strict=True))


@gpu
def test_another_model_can_be_recorded_after_one_that_could_not(deterministic):
    model, x, y = NETS["mlp"]()
    batches = [(x[:8].float(), y[:8])] * 6
    with pytest.warns(UserWarning, match="CUDA graph"):
        steps(nn.Sequential(model, Waits()), batches, True)
    replayed, _, run = steps(model, batches, True)
    assert len(run.graphs) == 1
    assert all(torch.equal(a, b) for a, b in zip(replayed, steps(model, batches, False)[0], strict=True))


@gpu
@pytest.mark.parametrize("options", [{}, {"optimiser": "sgd"}, {"nu": 4.0}], ids=str)
def test_a_run_is_the_same_with_and_without_graphs(options):
    runs = []
    for capture in (True, False):
        torch.manual_seed(3)
        model, (x, y) = small().cuda(), images()
        settings = {"epochs": 8, "batch_size": 10, "burn_in": 1, "every": 2, "deterministic": True, **options}
        fit = autosym.fit(model, (x.cuda(), y.cuda()), capture=capture, **settings)
        lines = [{key: value for key, value in line.items() if key != "seconds"} for line in fit.history]
        runs.append((lines, [p.detach().cpu() for p in model.parameters()]))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True))


@gpu
def test_work_beside_is_recorded_in_a_stream_of_its_own():
    """Its result is there when it is joined, at every replay."""
    x, out, streams = torch.zeros(1000, device="cuda"), torch.zeros(1000, device="cuda"), []

    def step(t):
        join = beside(lambda: streams.append(torch.cuda.current_stream()) or [t * 2], t)
        between = t + 1
        out.copy_(between + join()[0])

    run = Captured(step)
    for value in range(WARM_UP + 4):
        run(x.fill_(value))
        torch.cuda.synchronize()
        assert (out == 3 * value + 1).all()
    assert streams[-1] != streams[0]
