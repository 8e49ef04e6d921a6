"""The documentation is true: its code runs, its site builds without a warning, its reference holds every public name."""

import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

import autosym
from autosym.linear import groups

ROOT = Path(__file__).parent.parent
RUN = [
    "index.md",
    "concepts.md",
    "new-group.md",
    "new-layer.md",
    "new-likelihood.md",
    "new-evidence.md",
    "faq.md",
    "invariance.md",
    "lift.md",
    "noether.md",
    "own-loop.md",
    "performance.md",
]


def blocks(page):
    """The python blocks of a page, each with the number of its first line."""
    text = (ROOT / "docs" / page).read_text()
    return [(text[: m.start(1)].count("\n"), m[1]) for m in re.finditer(r"^```python\n(.*?)^```", text, re.S | re.M)]


@pytest.mark.parametrize("page", RUN)
def test_the_code_of_a_page_runs_from_top_to_bottom(page):
    found = blocks(page)
    assert found
    names: dict = {"__name__": page}
    with mock.patch.dict(groups.GROUPS):  # to which a page may add
        for line, code in found:
            exec(compile("\n" * line + code, str(ROOT / "docs" / page), "exec"), names)


def test_a_page_that_does_not_run_would_be_seen(tmp_path, monkeypatch):
    monkeypatch.setattr("test_docs.ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "bad.md").write_text("# Bad\n\n```python\nassert False\n```\n")
    with pytest.raises(AssertionError):
        test_the_code_of_a_page_runs_from_top_to_bottom("bad.md")


def test_the_reference_holds_every_public_name():
    shown = set(re.findall(r"^::: autosym\.(\w+)$", (ROOT / "docs" / "api.md").read_text(), re.M))
    assert shown == {name for name in autosym.__all__ if name != "__version__"}


def test_what_the_reference_shows_has_a_docstring():
    for name in re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(), re.M):
        module, _, attribute = name.rpartition(".")
        thing = getattr(__import__(module, fromlist=[attribute]), attribute)
        assert thing.__doc__, name
        own = vars(thing).values() if isinstance(thing, type) else ()
        methods = {m.__name__ for m in own if callable(m) and not m.__name__.startswith("_") and not m.__doc__}
        assert methods <= {"forward", "extra_repr", "log_likelihood", "scale", "root"}, f"{name}: {methods}"


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert f": {page.name}\n" in navigation, page.name


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    reference = (tmp_path / "api.html").read_text()
    for name in autosym.__all__:
        if name != "__version__":
            assert f'id="autosym.{name}"' in reference
    for page in tmp_path.glob("*.html"):
        loaded = re.findall(r"""<(?:script|link|img)[^>]*(?:src|href)=["']?(https?:[^"' >]*)""", page.read_text())
        assert not loaded, f"{page.name} loads {loaded[0]} from elsewhere"
