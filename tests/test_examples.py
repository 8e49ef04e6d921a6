"""The examples run, and end with what they promise; the notebooks show outputs of the code they hold."""

import base64
import importlib.util
import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import notebook_pages
import printed
import run_notebooks

pytest.importorskip("sklearn")

EXAMPLES = Path(__file__).parent.parent / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def found_in_your_own_cnn(names):
    free = {name: [p.layer for p in fit.model.simplification.paths if not p.left_out] for name, fit in names["simple"].items()}
    assert free == {"digit": [], "digit and half": ["conv3"]}
    assert all(isinstance(names["plain"]["digit"].get_submodule(f"conv{i}"), nn.Conv2d) for i in (1, 2, 3))
    assert names["accuracy"](names["plain"]["digit and half"], "digit and half") > 0.6


def found_in_which_symmetry(names):
    said = {name: answer.verdict("translations").judgement for name, answer in names["answers"].items()}
    assert said["digit"] != "no", said
    assert said["digit and quadrant"] != "yes", said
    assert set(said.values()) != {"undecided"}, said
    gains = {name: max(values) - values[0] for name, values in names["counted"].items()}
    assert gains["digit"] < 40 < 150 < gains["digit and quadrant"], gains


def found_in_how_much_rotation(names):
    ranges = {R: [names["learned"](R, seed, names["kept"](R, seed)) for seed in names["SEEDS"]] for R in (0, 90, 180)}
    assert all(abs(value - R) < 20 for R, values in ranges.items() for value in values), ranges
    best = max(zip(names["evidence"], names["FIXED"], strict=True))[1]
    assert 60 <= best <= 120


def found_in_what_is_conserved(names):
    found = names["found"]
    assert [found[name].symmetries for name in names["data"]] == [1, 1, 0]
    truth = names["truth"] / names["truth"].norm()
    assert abs(names["coefficients"](found["spring"].quantities[0]) @ truth) > 0.99


# What the code of a notebook must have found: the answer that its data were made for.
ANSWERS = {
    "your_own_cnn": found_in_your_own_cnn,
    "which_symmetry": found_in_which_symmetry,
    "how_much_rotation": found_in_how_much_rotation,
    "what_is_conserved": found_in_what_is_conserved,
}


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_finds_what_it_says(path):
    with torch.random.fork_rng():
        notebook, names = run_notebooks.run(path)
    ANSWERS[path.stem](names)
    shown, kept = (kinds(run_notebooks.code_cells(one)) for one in (notebook, json.loads(path.read_text())))
    assert shown == kept, "the outputs in the file are not those that its code makes"


def kinds(cells):
    return [[output["output_type"] for output in cell["outputs"]] for cell in cells]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_with_the_outputs_of_its_code(path):
    notebook = json.loads(path.read_text())
    assert notebook["nbformat"] == 4
    assert notebook["metadata"]["outputs_of"] == run_notebooks.fingerprint(notebook), "run examples/run_notebooks.py"
    assert path.stat().st_size < 400_000
    assert len(notebook["cells"]) <= 25
    cells = run_notebooks.code_cells(notebook)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} == {"stream", "display_data"}  # text and pictures, and no error
    for cell in cells:
        source = "".join(cell["source"])
        if "print(" in source.replace("def print(", "") or "plt.subplots" in source:
            assert cell["outputs"], source
        for output in cell["outputs"]:
            if output["output_type"] == "stream":
                assert "".join(output["text"]).strip()
                assert "Traceback" not in "".join(output["text"])
            else:
                assert base64.b64decode(output["data"]["image/png"]).startswith(b"\x89PNG")
                assert len(notebook_pages.description(source)) > 20, (
                    "a cell with a picture begins with a comment that describes it"
                )


def written(path, *sources):
    cells = [{"cell_type": "code", "source": source, "outputs": [], "execution_count": None} for source in sources]
    path.write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    return path


def test_outputs_are_captured_cell_by_cell_and_an_error_is_not_hidden(tmp_path):
    first = "# Two points, a line.\nfrom matplotlib import pyplot as plt\nplt.plot([0, 1])\nprint('a')"
    notebook, names = run_notebooks.run(written(tmp_path / "one.ipynb", first, "b = 1", "print(b)"))
    assert kinds(notebook["cells"]) == [["stream", "display_data"], [], ["stream"]]
    assert notebook["cells"][2]["outputs"][0]["text"] == ["1\n"]
    assert names["b"] == 1
    before = run_notebooks.fingerprint(notebook)
    notebook["cells"][1]["source"] = "b = 2"
    assert run_notebooks.fingerprint(notebook) != before
    with pytest.raises(ZeroDivisionError):
        run_notebooks.run(written(tmp_path / "two.ipynb", "1 / 0"))


def test_a_notebook_becomes_a_page(tmp_path, monkeypatch):
    path = written(
        tmp_path / "one.ipynb", "# A line\n# of two points.\nimport matplotlib.pyplot as plt\nplt.plot([0, 1])\nprint('<b>')"
    )
    notebook, _ = run_notebooks.run(path)
    prose = {"cell_type": "markdown", "source": ["# Title\n", "[a](../docs/wrong.md) and [b](two.ipynb)"]}
    path.write_text(json.dumps(notebook | {"cells": [prose, *notebook["cells"]]}))
    monkeypatch.setattr(notebook_pages, "EXAMPLES", tmp_path)
    text, pictures = notebook_pages.page("one")
    assert text.startswith("# Title\n[a](../wrong.md) and [b](two.md)\n\n```python\n# A line")
    assert '<pre class="output">&lt;b&gt;</pre>' in text
    assert "![A line of two points.](one-1.png)" in text
    assert pictures["one-1.png"].startswith(b"\x89PNG")


def test_compare_groups(capsys, monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setattr(sys, "argv", ["compare_groups.py", "--turned", "--epochs", "1", "--samples", "60"])
    runpy.run_path(str(EXAMPLES / "compare_groups.py"), run_name="__main__")
    shown = capsys.readouterr().out
    for words in ("Turned digits", "log evidence", "gconv:c4", "probability", "effective / all"):
        assert words in shown


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
def test_the_tutorial_prints_what_its_page_shows_and_finds_both_answers():
    cells = printed.cells((EXAMPLES.parent / "docs" / "tutorial.md").read_text())
    assert len(cells) >= 7
    names: dict = {"__name__": "tutorial"}
    for code, shown in cells:
        said = printed.run(code, names)
        assert printed.alike(shown or "", said), f"the page shows\n{shown}\nbut its code prints\n{said}"
    place, digit = (names[name].symmetry() for name in ("simple", "again"))
    assert place.network_share() > 0.05 > digit.network_share(), "the half of the image needs position, the digit does not"
    assert isinstance(names["plain"].conv1, nn.Conv2d)
