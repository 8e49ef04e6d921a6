"""autosym discover, from a user's files to what is printed and written."""

import json

import numpy as np
import pytest

pytest.importorskip("tyro")
pytest.importorskip("rich")

import autosym
from autosym.answer import discovering
from autosym.answer.deadline import Deadline
from commands import bars, shown


@pytest.fixture
def few(monkeypatch):
    """Searches of few epochs, and of small networks."""
    given = discovering.discover

    def discover(*arguments, network, schedule, **options):
        form = network | {"width": 4, "channels": (1, 2), "strides": (2, 2), "hidden": 2}
        return given(*arguments, network=form, epochs=2, batch_size=16, **options)

    monkeypatch.setattr(discovering, "discover", discover)


@pytest.fixture
def file(tmp_path):
    images, labels = bars()
    np.savez(tmp_path / "bars.npz", images=images, labels=labels)
    return tmp_path / "bars.npz"


@pytest.mark.usefixtures("few")
def test_the_answer_is_printed_and_written_and_again_at_once(capsys, file, tmp_path):
    out = tmp_path / "r"
    arguments = ("discover", file, "--symmetries", "translations", "--seeds", "2", "--test", "0.2", "--out", out)
    text, err = shown(capsys, *arguments)
    assert "translations" in text
    assert "symmetric under shifts" in text
    assert "Test accuracy of the best network" in text
    first, *runs = err.splitlines()
    assert first.startswith("3 networks, up to 6 fits of the largest: about ")
    assert "short run: conv, width 1, seed 0" in runs[1], "where there is no terminal, a line for each run"
    result = json.loads((out / "result.json").read_text())
    assert result["headline"] in text
    assert all(text.count(f"Note: {note}") == 1 for note in result["notes"])
    assert any("samples" in note or "epochs" in note for note in result["notes"]), "those of the answer too"
    assert {file.name for file in out.iterdir()} == {"answer.json", "fit.safetensors", "report.html", "result.json", "runs"}
    assert autosym.Answer.load(out).fit.model is not None
    again = json.loads(shown(capsys, *arguments, "--json").out)
    assert again["verdicts"] == result["verdicts"]


@pytest.mark.usefixtures("few")
def test_minutes_that_are_too_few_are_said_before_the_start(capsys, file, tmp_path, monkeypatch):
    arguments = ("discover", file, "--symmetries", "translations", "--seeds", "2", "--minutes", "0.001", "--out")
    assert shown(capsys, *arguments, tmp_path / "r", status=1).err.startswith("autosym: even the shortest search takes about ")
    assert not (tmp_path / "r").exists()
    monkeypatch.setattr(Deadline, "expected", lambda self, epochs: 1.5 * self.seconds)
    text, err = shown(capsys, *arguments, tmp_path / "r")
    assert err.startswith("autosym: even the shortest search takes about ")
    assert err.count("even the shortest search") == 1
    assert "shortest search" not in text
    assert shown(capsys, *arguments, tmp_path / "s", "--quiet").err == ""


def test_what_is_wrong_is_said(capsys, file, tmp_path):
    arguments = ("discover", file, "--out", tmp_path / "r", "--symmetries")
    assert "must name some of translations" in shown(capsys, *arguments, "spam", status=1).err
    assert "minutes must be positive" in shown(capsys, *arguments, "c4", "--minutes", "0", status=1).err
