"""Figures as files."""

import pytest

from autosym.report import drawing


@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a", b"\x89PNG")])
def test_a_figure_is_a_file_of_the_kind_that_its_name_says(tmp_path, name, start):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    open_before = pyplot.get_fignums()
    figure = drawing.new_figure(2, 1)
    axes = figure.subplots()
    drawing.open_frame(axes)
    assert [side for side, line in axes.spines.items() if line.get_visible()] == ["left", "bottom"]
    drawing.save_figure(figure, tmp_path / "new" / name, 50)
    assert (tmp_path / "new" / name).read_bytes().startswith(start)
    assert [file.name for file in (tmp_path / "new").iterdir()] == [name]
    assert pyplot.get_fignums() == open_before, "nothing is left to close"
    if start.endswith(b"PNG"):
        assert pyplot.imread(tmp_path / "new" / name, format="png").shape == (50, 100, 4)
