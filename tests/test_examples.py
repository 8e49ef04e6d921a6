"""The examples run, in small, and end with what they promise."""

import importlib.util
import json
import runpy
import sys
from pathlib import Path

import pytest
from torch import nn

from autosym.papers import datasets

pytest.importorskip("sklearn")

EXAMPLES = Path(__file__).parent.parent / "examples"
NOTEBOOK = EXAMPLES / "read_a_fit.ipynb"


def test_compare_groups(capsys, monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setattr(sys, "argv", ["compare_groups.py", "--turned", "--epochs", "1", "--samples", "60"])
    runpy.run_path(str(EXAMPLES / "compare_groups.py"), run_name="__main__")
    shown = capsys.readouterr().out
    for words in ("Turned digits", "log evidence", "gconv:c4", "probability", "effective / all"):
        assert words in shown


def cells():
    notebook = json.loads(NOTEBOOK.read_text())
    assert notebook["nbformat"] == 4
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_runs(capsys, monkeypatch):
    """Its code cells in order, in one namespace; with one epoch on a few digits."""
    few = tuple(part[:200] for part in datasets.digits())
    monkeypatch.setattr(datasets, "digits", lambda: few)
    names: dict = {"__name__": "__main__"}
    for number, cell in enumerate(cells()):
        code = "".join(cell["source"]).replace("EPOCHS = 20", "EPOCHS = 1")
        exec(compile(code, f"{NOTEBOOK.name}, cell {number}", "exec"), names)
    assert names["fit"].schedule.epochs == 1
    shown = capsys.readouterr().out
    for words in ("log evidence", "f-fc", "translations", "probability"):
        assert words in shown


def test_the_notebook_is_kept_without_outputs():
    for cell in cells():
        assert cell["outputs"] == []
        assert cell["execution_count"] is None


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_relax_your_cnn(capsys):
    example = load("relax_your_cnn")
    plain = example.answer(ask_quadrant=False, epochs=4)
    printed = capsys.readouterr().out
    assert isinstance(plain, example.YourCNN)
    assert isinstance(plain.norm2, nn.Identity)
    for words in ("relaxed  conv + f-fc", "effective / all", "parameters: ", "hardened "):
        assert words in printed


@pytest.mark.slow
def test_the_tutorial_runs_from_top_to_bottom_and_finds_both_answers(capsys):
    text = (EXAMPLES.parent / "docs" / "tutorial.md").read_text()
    blocks = [block.split("```")[0] for block in text.split("```python\n")[1:]]
    assert len(blocks) >= 7
    names: dict = {"__name__": "tutorial"}
    exec(compile("\n".join(blocks), "tutorial.md", "exec"), names)
    assert "('norm2',)" in capsys.readouterr().out
    place, digit = (names[name].symmetry() for name in ("simple", "again"))
    assert place.network_share() > 0.05 > digit.network_share(), "the half of the image needs position, the digit does not"
    assert isinstance(names["plain"].conv1, nn.Conv2d)
