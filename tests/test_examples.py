"""The examples run and end with what they promise."""

import importlib.util
from pathlib import Path

import pytest
from torch import nn

EXAMPLES = Path(__file__).parent.parent / "examples"


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
def test_the_tutorial_runs_from_top_to_bottom(capsys):
    text = (EXAMPLES.parent / "docs" / "tutorial.md").read_text()
    blocks = [block.split("```")[0] for block in text.split("```python\n")[1:]]
    assert len(blocks) >= 7
    exec(compile("\n".join(blocks), "tutorial.md", "exec"), {"__name__": "tutorial"})
    assert "('norm2',)" in capsys.readouterr().out
