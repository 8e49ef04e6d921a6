"""Hardened models export: to torch.export and to ONNX."""

import pytest
import torch
from torch.testing import assert_close

import autosym
from architectures import ARCHITECTURES, labels, net, relaxed

MODELS = {
    **{f"relaxed {name}": lambda name=name: relaxed(name, dtype=torch.float32) for name in ARCHITECTURES},
    "relaxed resnet, where": lambda: relaxed("resnet", "where", torch.float32),
    "relaxed conv3d, where": lambda: relaxed("conv3d", "where", torch.float32),
    **{
        f"net {name}": lambda name=name: net(name, torch.float32)
        for name in ("f-fc+conv", "conv", "fc+conv", "f-fc+conv+gconv:c4", "s-fc+s-conv", "where+conv")
    },
}


FAST = ("relaxed lenet", "relaxed conv1d", "net f-fc+conv")  # with every small module but Offset


@pytest.mark.parametrize("name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in MODELS])
def test_hardened_models_export(name):
    model, x = MODELS[name]()
    hard = autosym.harden(model, (x, labels()), tolerance=0.0)
    program = torch.export.export(hard, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    assert_close(program.module()(x[:3]), hard(x[:3]), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_hardened_models_run_in_onnxruntime(name, tmp_path):
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install 'autosym[test]'")
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install 'autosym[test]'")
    model, x = MODELS[name]()
    hard = autosym.harden(model, (x, labels()), tolerance=0.0).eval()
    program = torch.onnx.export(hard, (x,), dynamo=True, dynamic_shapes=({0: torch.export.Dim("batch")},), verbose=False)
    program.save(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (found,) = session.run(None, {session.get_inputs()[0].name: x[:3].numpy()})
    assert_close(torch.tensor(found), hard(x[:3]).detach(), rtol=1e-3, atol=1e-4)
