"""Every fast form against its definition."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from autosym import paths
from autosym.likelihoods import Categorical
from autosym.paths import Conv, gram

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("mode", ["circular", "zeros"])
@pytest.mark.parametrize("kernel", [1, 3, 5, (3, 5), (1, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_correlations_with_shifts_are_the_gram_of_patches(mode, kernel, dtype, monkeypatch):
    conv = Conv(9, 2, kernel, padding_mode=mode).to(dtype)
    x = torch.randn(3, 9, 11, 13, dtype=dtype)
    monkeypatch.setattr(Conv, "columns", None)  # the fast form does not go through patches
    fast = conv.gram(x)
    monkeypatch.undo()
    torch.testing.assert_close(fast, gram(conv.columns(x)), rtol=1e-5, atol=1e-3 if dtype == torch.float32 else 1e-10)


@pytest.mark.parametrize(
    "options",
    [
        {"stride": 2},
        {"dilation": 2},
        {"groups": 4},
        {"padding": (0, 0, 0, 0)},
        {"padding": (1, 0, 1, 0)},
        {"padding_mode": "reflect"},
    ],
    ids=str,
)
def test_other_convolutions_take_the_general_form(options, monkeypatch):
    conv = Conv(8, 4, 3, **{"padding_mode": "zeros", **options}).double()
    x = torch.randn(2, 8, 10, 10, dtype=torch.float64)
    expected = gram(conv.columns(x))
    monkeypatch.setattr(paths, "shifted_correlations", None)
    torch.testing.assert_close(conv.gram(x), expected)


def test_small_maps_take_the_general_form():
    conv = Conv(8, 4, 3, padding_mode="zeros").double()
    for size in (1, 2, 3, 4, 5):
        x = torch.randn(2, 8, size, size, dtype=torch.float64)
        torch.testing.assert_close(conv.gram(x), gram(conv.columns(x)))


@pytest.mark.parametrize("classes", [2, 3, 10])
@pytest.mark.parametrize("scale", [0.1, 3.0, 100.0])
def test_the_root_of_a_categorical_has_one_column_less_than_classes(classes, scale):
    logits = scale * torch.randn(20, classes)
    for f, tolerance in ((logits, 1e-6), (logits.double(), 1e-14)):
        root, p = Categorical().root(f), f.softmax(1)
        assert root.shape == (20, classes, classes - 1)
        assert torch.isfinite(root).all()
        expected = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
        torch.testing.assert_close(root @ root.mT, expected, rtol=0, atol=tolerance)


@pytest.mark.slow
def test_the_benchmark_runs(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks" / "curvature.py"), "--quick", "--out", str(tmp_path / "r.json")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    result = json.loads((tmp_path / "r.json").read_text())
    wanted = {
        f"{net}/{kind}/{peer}"
        for net in ("conv", "mlp")
        for kind in ("exact", "sampled")
        for peer in ("laplace-torch-best", "floor")
    }
    assert wanted <= set(result["ratios"])
    assert all(ratio > 0 for ratio in result["ratios"].values())
    assert {"device", "torch", "commit", "processor"} <= set(result["provenance"])
