"""Adam's step in Triton's kernels against the same step in torch, and who is sent to them."""

import importlib.util
import os
import subprocess
import sys
import warnings

import pytest
import torch
from torch import Tensor, nn

from autosym.training import fused_moves
from autosym.training.fused_moves import FusedMoves
from autosym.training.steps import Weights

PATHS = {"one": 1, "few": 3, "still": 5, "many": 1000}
# of a block and of the largest path, in the last with more blocks than are added at a time
SIZES = [(fused_moves.BLOCK, 70_000), (32, 1100)]
RATES = (0.0, 0.3, 0.01, 0.01, 1e-4)
APART = {torch.float64: 1e-12, torch.float32: 3e-6}  # how far the results may be apart, relative to the largest


def steps(paths: dict[str, int], dtype: torch.dtype, momentum: float, device: str, kernels=None) -> list[Tensor]:
    """Weights and moments after steps with gradients that grow (so that steps are bounded); one path has none."""
    made = torch.Generator().manual_seed(0)
    draw = lambda n: torch.randn(n, generator=made, dtype=torch.float64).to(device, dtype)  # noqa: E731
    parameters = {name: nn.Parameter(draw(n)) for name, n in paths.items()}
    units = {name: float(p.detach().square().mean().sqrt()) for name, p in parameters.items()}
    weights = Weights(parameters, 10, "adam", momentum, sizes=units)
    weights._fused = kernels and FusedMoves(kernels, torch.tensor(list(paths.values())), weights._first, momentum)
    weights._delta.copy_(draw(len(weights._delta)).square())
    w, found = torch.cat([p.detach() for p in parameters.values()]), []
    for index, lr in enumerate(RATES):
        g = draw(len(w)) * 10**index
        weights._by_name(g)["still"].zero_()
        weights.lr.fill_(lr)
        weights.steps += 1
        before = w.clone()
        moved = weights._move(w, g)
        assert torch.equal(w, before), "frames take the step from the old weights"
        w = moved
        found += [w, weights._first.clone(), weights._second.clone()]
    return found


def compare(device: str, most: int) -> None:
    """In both dtypes, and the same again to the last bit."""
    paths, kernels = {**PATHS, "blocks": 2 * fused_moves.BLOCK, "most": most}, fused_moves._kernels()
    for dtype, apart in APART.items():
        for momentum in (0.9, 0.0):
            wanted, found = steps(paths, torch.float64, momentum, device), steps(paths, dtype, momentum, device, kernels)
            for ours, theirs in zip(found, wanted, strict=True):
                assert ours.dtype == dtype
                for part, other in zip(ours.split(list(paths.values())), theirs.split(list(paths.values())), strict=True):
                    assert float((part - other).abs().max()) <= apart * float(other.abs().max())
            assert all(map(torch.equal, found, steps(paths, dtype, momentum, device, kernels)))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton, which comes with torch's builds for GPUs")
def test_kernels_in_the_interpreter_move_as_torch_does():
    subprocess.run([sys.executable, __file__], env=os.environ | {"TRITON_INTERPRET": "1"}, check=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("block", "most"), [*SIZES, (fused_moves.BLOCK, 5_000_000)])
def test_on_a_gpu_they_move_as_torch_does(block, most, monkeypatch):
    monkeypatch.setattr(fused_moves, "BLOCK", block)
    compare("cuda", most)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_adam_is_sent_to_them():
    parameters = {"weight": nn.Parameter(torch.ones(3, device="cuda"))}
    assert Weights(parameters, 10, "adam")._fused is not None
    assert Weights(parameters, 10, "sgd")._fused is None


def test_without_a_gpu_it_is_left_to_torch():
    assert Weights({"weight": nn.Parameter(torch.ones(3))}, 10, "adam")._fused is None


def test_kernels_that_cannot_be_compiled_are_left_to_torch_with_a_warning(monkeypatch):
    """Before anything has moved: here the device is a CPU, of which no kernel can be made."""

    class Broken:
        def __getitem__(self, grid):
            raise RuntimeError("no compiler")

    kernels = type("Kernels", (), {"moments": Broken()})
    monkeypatch.setattr(fused_moves, "_kernels", lambda: kernels)
    fused_moves._compiled.cache_clear()
    with pytest.warns(UserWarning, match="slower: no compiler"):
        assert fused_moves._compiled(torch.float32, torch.device("cpu"), 0.9) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        assert fused_moves._compiled(torch.float32, torch.device("cpu"), 0.9) is None
    fused_moves._compiled.cache_clear()


if __name__ == "__main__":
    for fused_moves.BLOCK, most in SIZES:
        compare("cpu", most)
