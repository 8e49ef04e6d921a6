"""Exported programs: read without unpickling, and without running anything but torch's own operators."""

import json
import zipfile
from contextlib import suppress

import pytest
import torch
from torch import nn

import autosym
from autosym.cli import exported
from autosym.nn import nets
from files import Bait, network, save


def changed(path, edit):
    """The archive with its parts as ``edit(name, content)`` returns them; None drops a part."""
    with zipfile.ZipFile(path) as archive:
        parts = {name: edit(name, archive.read(name)) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in parts.items():
            if content is not None:
                archive.writestr(name, content)
    return path


SIZES = {
    "fixed": None,
    "any batch": ({0: torch.export.Dim("batch")},),
    "any size": ({0: torch.export.Dim("batch"), 2: torch.export.Dim("h", min=4), 3: torch.export.Dim("w", min=4)},),
}


@pytest.mark.parametrize("sizes", SIZES)
def test_a_program_computes_what_the_model_does(tmp_path, sizes):
    model = network()
    program = exported.load(save(model, tmp_path / "m.pt2", SIZES[sizes]))
    for count in (1, 2, 5):
        x = torch.randn(count, 1, 8, 8)
        torch.testing.assert_close(program(x), model(x))
    assert program(torch.randn(3, 1, 8, 8).double()).dtype == torch.float32
    assert not list(program.children()), "eval() of an exported module is not supported by torch"
    error = autosym.equivariance_error(program, ["translations", "c4"], (torch.randn(6, 1, 8, 8), torch.zeros(6)))
    assert error.output()["translations"] < 1e-5
    assert error.output()["c4"] > 1e-4
    if sizes == "any size":
        assert program(torch.randn(2, 1, 6, 5)).shape == (2, 3)
    else:
        with pytest.raises(ValueError, match=r"takes images \(1, 8, 8\), but these are \(1, 6, 5\)"):
            program(torch.randn(2, 1, 6, 5))


def test_networks_of_autosym_can_be_exported_and_read(tmp_path):
    net = nets.build("f-fc+conv", (1, 8, 8), 3, 2, (1, 2), (2, 2))
    x = torch.randn(4, 1, 8, 8)
    torch.testing.assert_close(exported.load(save(net, tmp_path / "m.pt2"))(x), net(x))


@pytest.mark.parametrize("kind", ["module", "state dict", "torchscript"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_pickles_are_refused(tmp_path, kind):
    path, model = tmp_path / "m.pt", network()
    if kind == "torchscript":
        torch.jit.trace(model, torch.randn(2, 1, 8, 8)).save(path)
    else:
        torch.save(model if kind == "module" else model.state_dict(), path)
    with pytest.raises(ValueError, match=r"a pickle .* can run any code when it is read: save it by torch.export.save"):
        exported.load(path)


def test_example_inputs_are_never_unpickled(tmp_path):
    evil = tmp_path / "evil.pt"
    torch.save((Bait(tmp_path / "ran"),), evil)
    path = changed(save(network(), tmp_path / "m.pt2"), lambda name, old: evil.read_bytes() if "sample_inputs" in name else old)
    assert exported.load(path)(torch.randn(1, 1, 8, 8)).shape == (1, 3)
    assert not (tmp_path / "ran").exists()
    with suppress(TypeError):  # of its own warning
        torch.export.load(path)
    assert (tmp_path / "ran").exists(), "the control: torch.export.load does run it"


def replaced(key, old, new):
    """An edit of one kind of JSON file: a string for another."""

    def edit(name, content):
        if not name.endswith(key):
            return content
        text = content.decode()
        assert old in text
        return text.replace(old, new, 1).encode()

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (replaced("weights_config.json", '"use_pickle": false', '"use_pickle": true'), "pickled object, weight_0"),
        (replaced("weights_config.json", '"path_name": "weight_0"', '"path_name": "../x"'), "pickled object, ../x"),
        (replaced("model.json", "torch.ops.aten.relu.default", "torch.hub.load"), "calls torch.hub.load, which is not one of"),
        (
            replaced("model.json", "torch.ops.aten.relu.default", "torch.ops.aten.from_file.default"),
            "calls torch.ops.aten.from_",
        ),
        (replaced("model.json", "Symbol('s", "exit() or Symbol('s"), "which is not arithmetic"),
        (replaced("model.json", "{", "["), "is broken, or no exported program"),
        (
            lambda name, content: None if name.endswith("model.json") else content,
            "is not an exported program but something else",
        ),
        (lambda name, content: None if name.endswith("weight_0") else content, "cannot be read by torch"),
    ],
    ids=["pickled weight", "path", "function", "file", "expression", "json", "no graph", "no weight"],
)
def test_archives_that_are_refused(tmp_path, edit, message):
    path = changed(save(network(), tmp_path / "m.pt2", SIZES["any batch"]), edit)
    with pytest.raises(ValueError, match=message):
        exported.load(path)


def test_compiled_code_is_refused(tmp_path):
    path = save(network(), tmp_path / "m.pt2")
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("m/data/aotinductor/model/run.so", b"")
    with pytest.raises(ValueError, match=r"holds data/aotinductor/model/run.so, .*compiled code"):
        exported.load(path)


def test_guards_are_not_run(tmp_path):
    def edit(name, content):
        if not name.endswith("models/model.json"):
            return content
        return json.dumps({**json.loads(content), "guards_code": [f"open({str(tmp_path / 'ran')!r}, 'w')"]}).encode()

    path = changed(save(network(), tmp_path / "m.pt2"), edit)
    exported.load(path)(torch.randn(2, 1, 8, 8))
    assert not (tmp_path / "ran").exists()


def test_arithmetic_of_sizes_is_allowed(tmp_path):
    """A size to the power of two is a call of Python's own operator in the graph."""

    class Power(nn.Module):
        def forward(self, x):
            return x.flatten(1).mean(1, keepdim=True) * (x.shape[2] ** 2 / 2)

    path = save(Power(), tmp_path / "m.pt2", ({2: torch.export.Dim("h", min=2, max=64)},))
    x = torch.randn(2, 1, 10, 8)
    torch.testing.assert_close(exported.load(path)(x), Power()(x))
    for name in ("_operator.methodcaller", "_operator.attrgetter", "builtins.eval", "_operator.call"):
        assert not exported.OPERATOR.fullmatch(name)


def test_images_with_other_channels_are_not_told_to_be_resized(tmp_path):
    program = exported.load(save(network(), tmp_path / "m.pt2"))
    with pytest.raises(ValueError, match="give images with as many channels"):
        program(torch.randn(2, 3, 8, 8))
    with pytest.raises(ValueError, match="--size"):
        program(torch.randn(2, 1, 9, 8))


def test_networks_that_take_no_images_or_return_no_tensor_are_refused(tmp_path):
    with pytest.raises(ValueError, match="does not take one batch of images"):
        exported.load(save(nn.Linear(3, 2), tmp_path / "m.pt2", example=torch.randn(2, 3)))

    class Two(nn.Module):
        def forward(self, x):
            return x, x

    program = exported.load(save(Two(), tmp_path / "m.pt2"))
    with pytest.raises(ValueError, match="returns a tuple, not a tensor"):
        program(torch.randn(2, 1, 8, 8))


def test_what_is_no_archive_is_refused(tmp_path):
    for content in (b"", b"hello", b"PK\x03\x04broken"):
        (tmp_path / "m.pt2").write_bytes(content)
        with pytest.raises(ValueError, match=r"torch.export.save"):
            exported.load(tmp_path / "m.pt2")
