"""Every fast form against its definition."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from autosym.bayes.likelihoods import LIKELIHOODS, Categorical
from autosym.linear import conv as conv_module
from autosym.linear.conv import Conv
from autosym.linear.products import add_gram, gram, mirrored
from models import curvature, draw, mlp

ROOT = Path(__file__).parents[2]


ENOUGH = {"circular": 8, "zeros": 32}  # channels from which correlations with shifts are the faster form


def plain_gram(t):
    return torch.einsum("bski,bskj->kij", t, t)


@pytest.mark.parametrize("mode", ENOUGH)
@pytest.mark.parametrize("kernel", [1, 3, 5, (3, 5), (1, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_correlations_with_shifts_are_the_gram_of_patches(mode, kernel, dtype, monkeypatch):
    conv = Conv(ENOUGH[mode], 2, kernel, padding_mode=mode).to(dtype)
    x = torch.randn(3, ENOUGH[mode], 11, 13, dtype=dtype)
    monkeypatch.setattr(conv_module, "patches", None)  # the fast form does not go through patches
    fast = conv.gram(x)
    monkeypatch.undo()
    expected = plain_gram(conv.columns(x))
    assert_close(fast, expected, rtol=1e-5, atol=1e-3 if dtype == torch.float32 else 1e-10)


@pytest.mark.parametrize("mode", ["circular", "zeros", "reflect", "replicate"])
@pytest.mark.parametrize(
    "options",
    [
        {"stride": 2},
        {"stride": (1, 3)},
        {"dilation": 2},
        {"dilation": (2, 1), "stride": (1, 2)},
        {"groups": 4},
        {"groups": 32, "stride": 2},
        {"padding": (0, 0, 0, 0)},
        {"padding": (1, 0, 1, 0)},
        {"kernel_size": 2, "padding": (1, 0, 0, 1)},
    ],
    ids=str,
)
def test_other_convolutions_take_the_general_form(options, mode, monkeypatch):
    conv = Conv(32, 32, **{"kernel_size": 3, "padding_mode": mode, **options}).double()
    x = torch.randn(2, 32, 10, 9, dtype=torch.float64)
    monkeypatch.setattr(conv_module, "shifted_correlations", None)
    assert_close(conv.gram(x), plain_gram(conv.columns(x)))


@pytest.mark.parametrize("mode", ["circular", "zeros", "reflect", "replicate"])
@pytest.mark.parametrize(
    ("channels", "sizes"), [(7, (24, 24)), (32, (4, 9)), (32, (9, 4))], ids=["few channels", "low", "narrow"]
)
def test_small_maps_take_the_general_form(mode, channels, sizes, monkeypatch):
    conv, x = Conv(channels, 4, 3, padding_mode=mode).double(), torch.randn(2, channels, *sizes, dtype=torch.float64)
    monkeypatch.setattr(conv_module, "shifted_correlations", None)
    assert_close(conv.gram(x), plain_gram(conv.columns(x)))


@pytest.mark.parametrize("mode", ENOUGH)
def test_maps_as_small_as_can_be(mode):
    conv = Conv(32, 4, 3, padding_mode=mode).double()
    for size in (1, 2, 3, 4, 5):
        x = torch.randn(2, 32, size, size, dtype=torch.float64)
        assert_close(conv.gram(x), plain_gram(conv.columns(x)))


WIDTHS = [1, 100, 127, 128, 129, 255, 256, 257, 300, 384, 400]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("samples", "positions", "blocks"), [(3, 1, 1), (3, 4, 1), (2, 1, 3), (2, 4, 3), (1, 450, 1)], ids=str)
def test_gram_is_the_sum_of_outer_products(width, samples, positions, blocks):
    t = torch.randn(samples, positions, blocks, width, dtype=torch.float64)
    found = gram(t)
    assert found.shape == (blocks, width, width)
    assert_close(found, plain_gram(t), rtol=1e-12, atol=1e-11)


def test_gram_of_columns_that_lie_otherwise_in_memory():
    t = torch.randn(3, 1, 300, 5, dtype=torch.float64).transpose(1, 3)  # (3, 5, 300, 1)
    for strange in (t, t.mT, t.mT[:, ::2, :, 20:], t[:1].expand(4, -1, -1, -1)):
        assert_close(gram(strange), plain_gram(strange), rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("blocks", [1, 3])
def test_sums_of_products_are_whole_once_mirrored(width, blocks):
    """Whatever comes first: a sum of several products, one of them added as a whole, as where positions are shared."""
    parts = [torch.randn(blocks, n, width, dtype=torch.float64) for n in (4, 1, 7)]
    total = torch.zeros(blocks, width, width, dtype=torch.float64)
    for part in parts[:2]:
        assert add_gram(total, part) is total, "in place"
    total.add_(parts[2].mT @ parts[2])
    expected = sum(part.mT @ part for part in parts)
    upper = total.triu()
    assert_close(upper, expected.triu(), rtol=1e-12, atol=1e-11)
    assert mirrored(total) is total
    assert_close(total, expected, rtol=1e-12, atol=1e-11)
    assert torch.equal(total.triu(), upper)


def test_wide_products_are_computed_by_halves():
    """Else the strips save nothing: what lies below them is not written."""
    total, t = torch.zeros(1, 300, 300, dtype=torch.float64), torch.randn(1, 2, 300, dtype=torch.float64)
    add_gram(total, t)
    assert (total[0, 256:, :256] == 0).all()
    assert (total[0, 128:256, :128] == 0).all()
    assert (total != 0).sum() > 300 * 301 / 2


def test_mirroring_changes_nothing_of_what_is_whole():
    whole = plain_gram(torch.randn(5, 2, 2, 300, dtype=torch.float64))
    whole = (whole + whole.mT) / 2
    assert torch.equal(mirrored(whole.clone()), whole)


@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
def test_factors_wider_than_two_strips_are_whole(likelihood):
    """A of 300 inputs and G of 270 outputs, by S = 1, over several batches."""
    model, data = mlp(300, 270, 3), draw(likelihood, 7, (300,))
    found = curvature(model, data, likelihood, batch_size=3)
    inner = torch.func.jacrev(lambda h: model[2](torch.tanh(h)).sum(0))(model[0](data[0]).detach())  # (3, 7, 270)
    root = LIKELIHOODS[likelihood]().root(model(data[0])).detach()
    g = torch.einsum("cnh,ncr->nrh", inner, root)
    assert_close(found.factors["0.weight"].A, plain_gram(data[0][:, None, None]) / 7, rtol=1e-12, atol=1e-12)
    for name in ("0.weight", "0.bias"):
        assert_close(found.factors[name].G, plain_gram(g[:, :, None]), rtol=1e-12, atol=1e-12)


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
