"""Steps in bfloat16: the model computes in it, evidence does not, and where the gradient is another one it is refused."""

import pytest
import torch
from torch import nn

import autosym
from autosym.nn import layers


class Noted(nn.Module):
    """Notes whether autocast is on."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append((torch.is_autocast_enabled("cpu"), torch.is_grad_enabled(), x.dtype))
        return x


def network():
    torch.manual_seed(0)
    shape = (2, 8, 8)
    layer = layers.Relaxed({"conv": layers.conv((1, 8, 8), shape)}, {"f-fc": layers.Factored((1, 8, 8), shape)})
    return nn.Sequential(layer, nn.Conv2d(2, 2, 3), Noted(), nn.Tanh(), nn.Flatten(), nn.Linear(72, 3))


@pytest.fixture(scope="module")
def data():
    torch.manual_seed(0)
    return torch.randn(24, 1, 8, 8), torch.arange(24) % 3


def test_only_steps_compute_in_bfloat16(data):
    model = network()
    fit = autosym.fit(model, data, epochs=2, every=1, burn_in=0, bf16=True)
    seen = set(model[2].seen)
    assert (True, True, torch.bfloat16) in seen, "steps"
    assert (False, True, torch.float32) in seen, "evidence"
    assert all(kind is torch.bfloat16 for cast, _, kind in seen if cast)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    with torch.no_grad():
        again = autosym.evidence.laplace.at(model, data)(fit.prior).log_evidence
    assert float(fit.estimate(fit.prior).log_evidence.detach()) == pytest.approx(float(again), rel=1e-5), "of these weights"


def test_by_default_nothing_is_in_bfloat16(data):
    model = network()
    autosym.fit(model, data, epochs=1)
    assert not any(cast for cast, *_ in model[2].seen)


class Shifted(nn.Module):
    """The same outputs, but for rounding: eight bits leave little of them."""

    def forward(self, x):
        return (x + 4096.0) - 4096.0


def test_a_gradient_that_is_another_one_in_bfloat16_is_refused(data):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3), Shifted())
    with pytest.raises(ValueError, match=r"away from that in float32 by .* fit without bf16"):
        autosym.fit(model, data, epochs=1, bf16=True)
    autosym.fit(nn.Sequential(*model[:2]), data, epochs=1, bf16=True)


def test_float64_is_refused(data):
    with pytest.raises(ValueError, match="float64"):
        autosym.fit(network().double(), data, epochs=1, bf16=True)


def test_a_run_in_float32_is_not_resumed_in_bfloat16(data, tmp_path):
    file = tmp_path / "run.safetensors"
    autosym.fit(network(), data, epochs=2, checkpoint=file)
    with pytest.raises(ValueError, match="other settings"):
        autosym.fit(network(), data, epochs=2, checkpoint=file, resume=True, bf16=True)
