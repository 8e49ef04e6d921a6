"""autosym audit, from a user's files to what is printed."""

import json

import numpy as np
import pytest
import torch

pytest.importorskip("tyro")
pytest.importorskip("rich")
pytest.importorskip("PIL")

from autosym.cli import own_images
from commands import bars, shown
from files import network, save


def test_audit_of_a_program(capsys, tmp_path, npz):
    program = save(network(), tmp_path / "m.pt2")
    out, err = shown(capsys, "audit", program, npz, "--json")
    assert err == ""
    found = json.loads(out)["output"]
    assert set(found) == {"shifts", "flip-horizontal", "flip-vertical", "c2", "c4", "d4"}
    assert found["shifts"] < 1e-5
    assert found["c4"] > 1e-5
    out = shown(capsys, "audit", program, npz, "--groups", "translations", "c4", "--mean", "0.1", "--std", "0.3").out
    assert out.splitlines()[0].split() == ["layer", "translations", "c4"]
    assert "(output)" in out
    assert "takes images (1, 8, 8)" in shown(capsys, "audit", program, npz, "--size", "12x12", status=1).err
    assert "2 values for the 1 channels" in shown(capsys, "audit", program, npz, "--mean", "0.1", "0.2", status=1).err
    assert "unknown group 'spam'" in shown(capsys, "audit", program, npz, "--groups", "spam", status=1).err


def test_audit_of_a_run_sees_its_layers_and_knows_its_images(capsys, tmp_path, npz):
    shown(capsys, "fit", npz, "--out", tmp_path / "r", "--epochs", "2", "--model", "conv", "--size", "12x12", "--json")
    rows = json.loads(shown(capsys, "audit", tmp_path / "r", npz, "--groups", "translations", "c4", "--json").out)["rows"]
    assert {row["layer"] for row in rows} == {"blocks.0", "blocks.1", "blocks.2", ""}
    errors = {(row["layer"], row["group"]): row["error"] for row in rows}
    assert errors["", "translations"] < 1e-4, "the weights of a convolutional network were read, or any would do:"
    assert errors["", "c4"] > 1e-3
    assert "leave these options out" in shown(capsys, "audit", tmp_path / "r", npz, "--size", "8x8", status=1).err


def test_a_read_run_computes_what_the_trained_network_did(capsys, tmp_path, npz):
    result = json.loads(shown(capsys, "fit", npz, "--out", tmp_path / "r", "--epochs", "30", "--json").out)
    net, preprocessing = own_images._read_run(tmp_path / "r")
    images, labels = bars()
    x = (torch.tensor(images)[:, None] / 255 - preprocessing["mean"][0]) / preprocessing["std"][0]
    accuracy = 100 * (net(x.float()).argmax(1).numpy() == labels).mean()
    assert accuracy == pytest.approx(result["row"]["train_accuracy"])
    assert accuracy > 80


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda found: found.pop("preprocessing"), "audit reads runs of autosym fit"),
        (lambda found: found["preprocessing"].pop("mean"), "result.json is of another version or broken (KeyError"),
        (lambda found: found["preprocessing"].update(size="big"), "result.json is of another version or broken"),
        (lambda found: found["network"].update(spam=1), "result.json is of another version or broken (TypeError"),
        (lambda found: found.update(schedule=3), "result.json is of another version or broken"),
    ],
    ids=["preprocessing", "mean", "size", "network", "schedule"],
)
def test_audit_of_a_run_that_was_changed(capsys, tmp_path, npz, edit, message):
    shown(capsys, "fit", npz, "--out", tmp_path / "r", "--epochs", "1", "--json")
    path = tmp_path / "r" / "result.json"
    found = json.loads(path.read_text())
    edit(found)
    path.write_text(json.dumps(found))
    err = shown(capsys, "audit", tmp_path / "r", npz, status=1).err
    assert message in err
    assert err.count("\n") == 1
    path.write_text("{")
    assert f"{path} is not JSON" in shown(capsys, "audit", tmp_path / "r", npz, status=1).err


def test_audit_of_a_run_without_its_weights(capsys, tmp_path, npz):
    shown(capsys, "fit", npz, "--out", tmp_path / "r", "--epochs", "1", "--json")
    result = shown(capsys, "audit", tmp_path / "r", npz, "--json").out
    (tmp_path / "r" / "checkpoint.safetensors").unlink()
    assert shown(capsys, "audit", tmp_path / "r", npz, "--json").out == result, "a checkpoint is to go on from"
    (tmp_path / "r" / "fit.safetensors").unlink()
    assert "audit needs the weights of the run" in shown(capsys, "audit", tmp_path / "r", npz, status=1).err


def test_audit_of_a_run_of_version_0_1_0_reads_its_checkpoint(capsys, tmp_path, npz):
    shown(capsys, "fit", npz, "--out", tmp_path / "r", "--epochs", "1", "--json", "--no-simplify", "--tries", "1")
    now = shown(capsys, "audit", tmp_path / "r", npz, "--json").out
    (tmp_path / "r" / "fit.safetensors").unlink()
    assert shown(capsys, "audit", tmp_path / "r", npz, "--json").out == now


def test_audit_of_a_run_on_images_with_other_channels(capsys, tmp_path, npz):
    shown(capsys, "fit", npz, "--out", tmp_path / "r", "--epochs", "1", "--json")
    images, labels = bars()
    np.savez(tmp_path / "rgb.npz", x=np.stack([images] * 3, -1), y=labels)
    message = shown(capsys, "audit", tmp_path / "r", tmp_path / "rgb.npz", status=1).err
    assert "the run had images with 1 channels, but the images of" in message


def test_a_deviation_is_positive(capsys, tmp_path, npz):
    program = save(network(), tmp_path / "m.pt2")
    for option, value in (("--std", "0"), ("--std", "-1"), ("--std", "nan"), ("--mean", "inf")):
        assert f"{option} {float(value)}: must be finite" in shown(capsys, "audit", program, npz, option, value, status=1).err
    shown(capsys, "audit", program, npz, "--mean", "0", "--groups", "translations")


def test_rectangles_are_not_turned_by_default(capsys, tmp_path):
    images, labels = bars()
    np.savez(tmp_path / "wide.npz", x=images[:, :4], y=labels)
    program = save(network(), tmp_path / "m.pt2", example=torch.randn(2, 1, 4, 8))
    found = json.loads(shown(capsys, "audit", program, tmp_path / "wide.npz", "--json").out)["output"]
    assert set(found) == {"shifts", "flip-horizontal", "flip-vertical", "c2"}
    assert "must be square" in shown(capsys, "audit", program, tmp_path / "wide.npz", "--groups", "c4", status=1).err


def test_models_that_are_refused(capsys, tmp_path, npz):
    assert "does not exist" in shown(capsys, "audit", tmp_path / "none.pt2", npz, status=1).err
    torch.save(network().state_dict(), tmp_path / "m.pt")
    assert "torch.export.save" in shown(capsys, "audit", tmp_path / "m.pt", npz, status=1).err
    (tmp_path / "r").mkdir()
    assert "is not a finished run" in shown(capsys, "audit", tmp_path / "r", npz, status=1).err
    (tmp_path / "r" / "result.json").write_text('{"row": {}}')
    assert "audit reads runs of autosym fit" in shown(capsys, "audit", tmp_path / "r", npz, status=1).err
