"""autosym fit, from a user's files to what is printed and written."""

import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

pytest.importorskip("tyro")
pytest.importorskip("rich")
pytest.importorskip("PIL")

from PIL import Image

from autosym.cli import commands, own_images, pictures
from autosym.cli.own_images import Run, network_for, schedule_for, working_size
from autosym.evidence import possible
from autosym.nn import nets
from commands import bars, shown

FILES = {"checkpoint.safetensors", "history.jsonl", "result.json", "report.json", "report.html"}


@pytest.fixture
def folder(tmp_path):
    images, labels = bars()
    for i, (image, label) in enumerate(zip(images, labels, strict=True)):
        place = tmp_path / "bars" / ("lying", "standing")[label]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(place / f"{i:02d}.png")
    return tmp_path / "bars"


# ---- what follows from the images


@pytest.mark.parametrize(
    ("given", "size"),
    [
        ((28, 28), (28, 28)),
        ((32, 32), (32, 32)),
        ((8, 8), (8, 8)),
        ((25, 25), (24, 24)),
        ((3, 5), (4, 4)),
        ((224, 224), (32, 32)),
        ((100, 50), (32, 16)),
        ((480, 640), (24, 32)),
        ((1, 64), (4, 32)),
    ],
)
def test_the_working_size(given, size):
    assert working_size(*given) == size


@pytest.mark.parametrize("size", [(4, 4), (8, 8), (12, 20), (24, 24), (28, 28), (32, 16), (32, 32)])
@pytest.mark.parametrize("name", ["f-fc+conv", "conv", "f-fc+conv+gconv:c4"])
def test_every_working_size_has_a_network(size, name):
    if "gconv" in name and size[0] != size[1]:
        return
    arguments = network_for(Run("x", name), (1, *size), 3, 100)
    assert len(arguments["strides"]) >= 3
    assert nets.build(**arguments)(torch.randn(2, 1, *size)).shape == (2, 3)


def test_small_data_are_trained_long_enough():
    for samples in (10, 50, 200, 1000, 5000, 60_000):
        schedule = schedule_for(Run("x"), samples)
        assert schedule.epochs * math.ceil(samples / schedule.batch_size) >= own_images.WEIGHT_STEPS
        assert len(schedule.evidence_epochs()) <= 130
    assert schedule_for(Run("x", epochs=3), 100).epochs == 3


def test_images_are_normalised_by_those_of_training():
    images = torch.arange(1.0, 41)[:, None, None, None] * torch.rand(40, 2, 8, 8)
    found = pictures.Pictures(images, torch.arange(40) % 2, ("a", "b"))
    (x, y), (x_test, y_test), how, notes = own_images._prepared(found, Run("images", test=0.25))
    assert (len(x), len(y), len(x_test), len(y_test), notes) == (30, 30, 10, 10, [])
    torch.testing.assert_close((x.mean((0, 2, 3)), x.std((0, 2, 3))), (torch.zeros(2), torch.ones(2)), rtol=0, atol=1e-5)
    mean, std = (torch.tensor(how[key])[:, None, None] for key in ("mean", "std"))
    back, labels = torch.cat([x, x_test]) * std + mean, torch.cat([y, y_test])
    order = back.sum((1, 2, 3)).argsort(), images.sum((1, 2, 3)).argsort()
    torch.testing.assert_close(back[order[0]], images[order[1]])
    assert torch.equal(labels[order[0]], found.labels[order[1]])


# ---- fit


@pytest.mark.parametrize("kind", ["npz", "folder"])
def test_fit_from_files(capsys, tmp_path, kind, request):
    data = request.getfixturevalue(kind)
    out, err = shown(capsys, "fit", data, "--out", tmp_path / "r", "--epochs", "3", "--test", "0.25", "--json")
    assert err == ""
    result = json.loads(out)
    assert json.loads((tmp_path / "r" / "result.json").read_text()) == result
    assert {file.name for file in (tmp_path / "r").iterdir()} >= FILES
    assert result["classes"] == (["0", "1"] if kind == "npz" else ["lying", "standing"])
    assert result["row"]["samples"] == 30
    assert 0 <= result["row"]["accuracy"] <= 100
    assert math.isfinite(result["row"]["evidence"])
    assert {path["path"] for path in result["symmetry"]} == {"conv", "f-fc"}
    assert result["config"]["task"] == str(data)
    assert result["provenance"]["autosym"]
    assert len((tmp_path / "r" / "history.jsonl").read_text().splitlines()) == 3


def test_fit_for_people(capsys, tmp_path, npz):
    out, err = shown(capsys, "fit", npz, "--out", tmp_path / "r", "--epochs", "2", "--size", "12x8")
    result = json.loads((tmp_path / "r" / "result.json").read_text())
    assert result["network"]["in_shape"] == [1, 12, 8]
    assert result["row"]["accuracy"] is None, "nothing was held out"
    for words in (result["headline"], "Learned symmetry", "blocks.2", f"Written to {tmp_path / 'r'}:", "training accuracy"):
        assert words in " ".join(out.split())
    assert err == "", "no progress where stderr is no terminal"


def test_an_accuracy_is_called_by_what_it_was_measured_on(capsys, tmp_path, npz):
    for options, known, words, other in (
        ((), "training", "training accuracy", "held-out"),
        (("--test", "0.25"), "held out", "held-out accuracy", "training accuracy"),
        (("--test", "0.02"), "training", "training accuracy", "held-out"),  # one image is no test
    ):
        out = shown(capsys, "fit", npz, "--out", tmp_path / "r", "--epochs", "1", "--force", *options).out
        assert ("test accuracy" in out) == (known == "held out")
        report = json.loads((tmp_path / "r" / "report.json").read_text())
        assert report["measured_on"] == known
        text = (tmp_path / "r" / "report.html").read_text()
        assert f"<dt>{words}</dt>" in text
        assert f"<dt>{other}" not in text


@pytest.mark.parametrize(
    ("error", "said"), [(1.94, "test accuracy 98.3 ± 1.9 %"), (0.0, "test accuracy 100 % of only 60 images")]
)
def test_that_all_of_few_images_are_right_is_not_printed_without_error(error, said):
    assert commands._test_accuracy({"accuracy": 100.0 if not error else 98.33, "standard_error": error, "tested": 60}) == said


def test_noise_is_not_said_to_have_a_symmetry(capsys, tmp_path):
    draw = np.random.default_rng(0)
    np.savez(tmp_path / "noise.npz", x=draw.normal(size=(60, 8, 8)), y=draw.integers(0, 3, 60))
    out = shown(capsys, "fit", tmp_path / "noise.npz", "--out", tmp_path / "r", "--epochs", "40").out
    result = json.loads((tmp_path / "r" / "result.json").read_text())
    assert result["row"]["evidence"] <= -math.log(3)
    assert result["headline"].startswith("Nothing is established yet: ")
    assert result["headline"] in " ".join(out.split())
    assert result["headline"] in (tmp_path / "r" / "report.html").read_text()


def test_evidence_that_cannot_be_is_the_headline(capsys, tmp_path, npz, monkeypatch):
    monkeypatch.setattr(possible, "most", lambda *_: -1e6)
    out = shown(capsys, "fit", npz, "--out", tmp_path / "r", "--epochs", "2").out
    result = json.loads((tmp_path / "r" / "result.json").read_text())
    assert result["headline"] == "The evidence must not be used: the Laplace approximation has failed."
    assert result["cautions"][0].startswith("The log evidence, -")
    for said in (result["headline"], result["cautions"][0].partition(". Do not")[0]):
        assert said in " ".join(out.split())
        assert said in (tmp_path / "r" / "report.html").read_text()


def test_cautions_are_shown_after_the_headline(capsys, tmp_path, npz):
    out = shown(capsys, "fit", npz, "--out", tmp_path / "r", "--epochs", "5", "--seed", "3").out
    result = json.loads((tmp_path / "r" / "result.json").read_text())
    for caution in result["cautions"]:
        assert f"Caution: {caution}" in " ".join(out.split())
    assert result["headline"].startswith("Nothing") or result["cautions"], "five epochs are too few"


def test_what_was_done_to_the_images_is_said(capsys, tmp_path):
    images, labels = bars(size=11)
    np.savez(tmp_path / "odd.npz", x=images, y=labels + 1)
    out = shown(capsys, "fit", tmp_path / "odd.npz", "--out", tmp_path / "r", "--epochs", "1").out
    assert "Note: images of 11x11 were resized to 12x12" in out
    assert "Note: labels 1, 2 are the 2 classes" in out


def test_a_finished_run_resumes_to_itself(capsys, tmp_path, npz):
    options = ("fit", npz, "--out", tmp_path / "r", "--epochs", "2", "--json")
    first = json.loads(shown(capsys, *options).out)
    again = json.loads(shown(capsys, *options, "--resume").out)
    assert again["symmetry"] == first["symmetry"]
    assert again["row"]["evidence"] == first["row"]["evidence"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--test", "1.5"), "--test is the fraction of images to hold out"),
        (("--test", "0.99"), "is left to train on"),
        (("--size", "10x10"), "both sides must be multiples of 4"),
        (("--size", "big"), "--size 'big' is not HEIGHTxWIDTH"),
        (("--model", "spam"), "unknown network 'spam'"),
        (("--classes", "1"), "labels run from 0 to 1"),
        (("--epochs", "0"), "epochs"),
    ],
)
def test_options_that_are_refused(capsys, tmp_path, npz, options, message):
    out, err = shown(capsys, "fit", npz, "--out", tmp_path / "r", *options, status=1)
    assert out == ""
    assert err.startswith("autosym: ")
    assert message in err
    assert err.count("\n") == 1


def test_data_that_are_refused(capsys, tmp_path, folder, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "does not exist" in shown(capsys, "fit", tmp_path / "none", status=1).err
    (folder / "lying" / "00.png").write_bytes(b"broken")
    assert "lying/00.png cannot be read as an image" in shown(capsys, "fit", folder, status=1).err
    Image.new("L", (5, 9)).save(folder / "lying" / "00.png")
    assert "different sizes" in shown(capsys, "fit", folder, status=1).err
    (folder / "lying" / "00.png").unlink()
    (folder / "new").mkdir()
    assert "new holds no image" in shown(capsys, "fit", folder, status=1).err
    np.savez(tmp_path / "flat.npz", x=np.zeros((8, 8, 8)), y=np.arange(8) % 2)
    assert "is constant" in shown(capsys, "fit", tmp_path / "flat.npz", status=1).err


def test_bad_usage_is_2(capsys):
    for arguments in (["fit"], ["audit", "x"], ["fit", "x", "--spam"], ["fit", "x", "--epochs", "many"]):
        with pytest.raises(SystemExit) as stop:
            commands.main(arguments)
        assert stop.value.code == 2
        assert capsys.readouterr().out == ""


# ---- compared, interrupted, or cut off


def test_runs_on_other_labels_or_sizes_are_not_compared(capsys, tmp_path, npz):
    images, labels = bars()
    np.savez(tmp_path / "other.npz", images=images, labels=(labels + (np.arange(40) < 4)) % 2)
    runs = {
        "one": (npz,),
        "conv": (npz, "--model", "conv"),
        "labels": (tmp_path / "other.npz",),
        "size": (npz, "--size", "12x12"),
    }
    for name, options in runs.items():
        shown(capsys, "fit", *options, "--out", tmp_path / name, "--epochs", "1", "--json")
    shown(capsys, "report", tmp_path / "one", "--compare", tmp_path / "conv")
    text = (tmp_path / "one" / "report.html").read_text()
    for name in ("one", "conv"):
        assert f"{'f-fc+' if name == 'one' else ''}conv · evidence ({tmp_path / name})" in text
    for name in ("labels", "size"):
        message = shown(capsys, "report", tmp_path / "one", "--compare", tmp_path / name, status=1).err
        assert "only on the same data" in message
        assert str(tmp_path / name) in message


def test_a_new_run_leaves_nothing_of_the_one_before(capsys, tmp_path, npz, monkeypatch):
    """Interrupted after its first epoch, it is no finished run: neither its report nor its checkpoint pass for the old one's."""
    options = ("fit", npz, "--out", tmp_path / "r", "--epochs", "3")
    shown(capsys, *options, "--json")
    shown(capsys, "fit", npz, "--out", tmp_path / "r", "--size", "10x10", "--force", status=1)
    shown(capsys, "fit", npz, "--out", tmp_path / "r", "--model", "spam", "--force", status=1)
    assert (tmp_path / "r" / "result.json").exists(), "a call that is refused costs nothing"

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("autosym.training.evidence_steps.estimate", interrupt)
        shown(capsys, *options, "--seed", "1", "--force", status=130)
    assert {file.name for file in (tmp_path / "r").iterdir()} == {"checkpoint.safetensors", "history.jsonl"}
    assert "result.json does not exist" in shown(capsys, "report", tmp_path / "r", status=1).err
    assert "is not a finished run" in shown(capsys, "audit", tmp_path / "r", npz, status=1).err
    shown(capsys, *options, "--seed", "1", "--resume", "--json")
    result = (tmp_path / "r" / "result.json").read_text()
    with monkeypatch.context() as patch:
        patch.setattr("autosym.training.evidence_steps.estimate", interrupt)
        shown(capsys, *options, "--seed", "1", "--force", status=130)
    (tmp_path / "r" / "result.json").write_text(result)  # as older versions left it
    assert "0 of 3 epochs" in shown(capsys, "audit", tmp_path / "r", npz, status=1).err


def test_other_images_do_not_resume(capsys, tmp_path, npz):
    options = ("--out", tmp_path / "r", "--epochs", "2")
    shown(capsys, "fit", npz, *options, "--json")
    images, labels = bars()
    np.savez(tmp_path / "flipped.npz", images=images[:, ::-1], labels=labels)
    message = shown(capsys, "fit", tmp_path / "flipped.npz", *options, "--resume", status=1).err
    assert "checksum of the data" in message


def command(*arguments):
    return [sys.executable, "-m", "autosym", *map(str, arguments)]


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_an_interrupted_run_goes_on_to_the_same_result(tmp_path, npz):
    arguments = ("fit", npz, "--epochs", "150")
    whole = subprocess.run(
        command(*arguments, "--out", tmp_path / "a", "--json"), env=ENVIRONMENT, capture_output=True, check=True
    )
    with subprocess.Popen(
        command(*arguments, "--out", tmp_path / "b", "--json"),
        env=ENVIRONMENT,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it, and so would we
    ) as process:
        history = tmp_path / "b" / "history.jsonl"
        while process.poll() is None and not (history.exists() and history.read_text().count("\n") > 3):
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        message = process.communicate()[1]
    assert process.returncode == 130, message
    assert "Traceback" not in message
    assert (tmp_path / "b" / "checkpoint.safetensors").exists()
    assert not (tmp_path / "b" / "result.json").exists()
    found = re.search(r"autosym: interrupted; go on by: autosym (.*)", message)
    done = subprocess.run(command(*shlex.split(found[1])), env=ENVIRONMENT, capture_output=True, check=True)
    one, two = json.loads(whole.stdout), json.loads(done.stdout)
    assert one["symmetry"] == two["symmetry"]
    assert one["row"]["evidence"] == two["row"]["evidence"]


def test_an_interruption_names_no_checkpoint_where_there_is_none(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(own_images, "audit", interrupt)
    assert shown(capsys, "audit", "x", "y", status=130).err == "\nautosym: interrupted\n"
    monkeypatch.setattr(own_images, "train", interrupt)
    assert (
        shown(capsys, "fit", "x y", "--resume", status=130).err
        == "\nautosym: interrupted; go on by: autosym fit 'x y' --resume\n"
    )


@pytest.mark.parametrize("options", [pytest.param(("--json",), marks=pytest.mark.slow), ()], ids=["json", "table"])
def test_a_pipe_that_was_closed_is_no_error(options):
    """As by `autosym table 1 | head -0`."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command("table", "1", *options), env=ENVIRONMENT, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert done.stderr == ""
    assert done.returncode != 0
