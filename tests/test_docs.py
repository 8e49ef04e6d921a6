"""The documentation is true: its code runs, its site builds without a warning, its reference holds every public name."""

import json
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

import autosym
import notebook_pages
import printed
from autosym.evidence.record import Evidence
from autosym.evidence.shares import PathShare, Symmetry
from autosym.linear import groups
from autosym.linear.path import Kept
from autosym.papers import quadrant_answers
from autosym.surgery.simplifying import PathWorth, Simplification

ROOT = Path(__file__).parent.parent
RUN = [
    "index.md",
    "own-network.md",
    "lift.md",
    "invariance.md",
    "noether.md",
    "noether-reference.md",
    "own-loop.md",
    "large-images.md",
    "saving.md",
    "deciding.md",
    "faq.md",
    "concepts.md",
    "fit-options.md",
    "new-group.md",
    "new-layer.md",
    "new-likelihood.md",
    "new-evidence.md",
    "performance.md",
]
LONGEST = 1200  # words of a page that is read from top to bottom


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


def test_the_readme_shows_what_the_demo_prints(monkeypatch, tmp_path, capsys):
    """As of demo.json, the file that it wrote; a slow test of the demo makes it anew."""
    commands = pytest.importorskip("autosym.cli.commands", exc_type=ImportError)
    found = json.loads((ROOT / "benchmarks" / "results" / "demo.json").read_text())
    monkeypatch.setattr(quadrant_answers, "execute_all", lambda *_: found)
    monkeypatch.chdir(tmp_path)
    assert commands.main(["demo"]) == 0
    assert f"```\n{capsys.readouterr().out.strip()}\n```" in (ROOT / "README.md").read_text()


def test_the_tutorial_shows_fits_and_simplifications_as_they_print():
    """Their lines, by records with the numbers of the page; a slow test runs its code."""
    outputs = [shown for _, shown in printed.cells((ROOT / "docs" / "tutorial.md").read_text()) if shown]
    shares = [text for text in outputs if "effective / all" in text]
    prices = [text.partition("\n...\n")[0] for text in outputs if re.match("layer +path +share +nats", text)]
    assert (len(shares), len(prices)) == (1, 2)
    for text in shares:
        parts = torch.tensor([*map(float, re.findall(r"(?:likelihood|factor) (\S+)", text)), 0.0], dtype=torch.float64)
        evidence = Evidence(*parts, samples=1000)
        assert f"{Symmetry(tuple(_shares(text)), evidence=evidence)}\n{evidence}" == text.strip()
    for text in prices:
        before, refit, after = map(float, re.search(r"(\S+) before \(after (\d+) more epochs\), (\S+) after:", text).groups())
        assert str(Simplification(tuple(_prices(text)), (before, after), refit=int(refit))) == text.strip()


def _shares(text):
    row = r"^(\w+) +(\S+) +(free|symmetric) +(.*?) +([\d.]+) / (\d+) +([\d.]+)%$"
    for layer, path, kind, precision, effective, parameters, share in re.findall(row, text, re.M):
        by_part = {name: float(value) for name, value in re.findall(r"(\w+) (\S+)", precision)}
        keeps = Kept(equivariant=kind == "symmetric")
        numbers = (int(parameters), float(effective), float(share) / 100)
        yield PathShare(layer, path, kind == "symmetric", by_part, *numbers, {}, keeps)


def _prices(text):
    for layer, path, share, nats, done in re.findall(r"^(\w+) +(\S+) +([\d.]+)% +([-+][\d.]+)(?:  (.*))?$", text, re.M):
        yield PathWorth(layer, path, float(share) / 100, float(nats), done == "left out")


def test_output_that_a_page_does_not_show_would_be_seen():
    said = "layer  nats\n-----------\nconv1  -0.5\nall: 2 nats gained in all\nCaution: short\n"
    assert printed.alike("layer  nats\n------\nconv1  +3.1\nall: nothing given up\n", said)
    assert printed.alike("layer  nats\n...\n", said)
    assert not printed.alike("layer  nats\n------\nconv1  +3.1\n", said), "the last line is missing"
    assert not printed.alike(said.replace("conv1", "conv2"), said)
    assert printed.cells("```python\na\n```\n\n```\nb\n```\n\n```python\nc\n```\n\nText\n\n```\nd\n```\n") == [
        ("a\n", "b\n"),
        ("c\n", None),
    ]


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


def parts():
    """The pages of each part of the navigation."""
    found: dict[str, list[str]] = {}
    for line in (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].splitlines():
        if part := re.fullmatch(r"  - (.*):", line):
            found[part[1]] = []
        elif page := re.fullmatch(r"      - .*: (\S+\.md)", line):
            found[list(found)[-1]].append(page[1])
    return found


def words(text):
    """How many words a page has: its own tables count, code and tables that are made from files do not."""
    text = re.sub(r"^<!-- table: .*?^<!-- end -->|^```.*?^```|^<pre.*?</pre>", "", text, flags=re.S | re.M)
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def test_every_page_is_in_the_navigation():
    listed = [page for pages in parts().values() for page in pages]
    docs = ROOT / "docs"
    notebooks = [f"notebooks/{path.stem}.md" for path in (ROOT / "examples").glob("*.ipynb")]
    assert sorted(listed) == sorted([*(str(page.relative_to(docs)) for page in docs.rglob("*.md")), *notebooks])


def text_of(page):
    """A page of the navigation: a file, or the notebook it is made from."""
    path = ROOT / "docs" / page
    return path.read_text() if path.exists() else notebook_pages.page(path.stem)[0]


def test_pages_are_short_but_for_reference_and_lab_notes():
    assert list(parts()) == ["Start", "How to", "Understand", "Reference", "Results", "Lab notes"]
    read = [page for part, pages in parts().items() if part not in ("Reference", "Lab notes") for page in pages]
    long = {page: count for page in read if (count := words(text_of(page))) > LONGEST}
    assert not long


def test_commits_stand_under_tables_or_in_lab_notes():
    for page in (ROOT / "docs").glob("*.md"):
        lines = [line for line in page.read_text().splitlines() if re.search(r"\bcommits? [0-9a-f]{7}\b", line)]
        assert all(line.startswith("*`") for line in lines), page.name


def test_words_are_counted_without_code_and_measured_tables():
    page = "# One two\n\n```python\nthree = 4\n```\n| five | - |\n<!-- table: six -->\n| 7 |\n<!-- end -->\n"
    assert words(page) == 3


def anchors(page):
    """The anchors of the headings of a page, as mkdocs makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    plain = [re.sub(r"[^\w\s-]", "", heading.lower()).strip() for heading in re.findall(r"^#+ (.*)$", text, re.M)]
    return {re.sub(r"[\s-]+", "-", heading) for heading in plain}


def test_pages_named_outside_of_the_site_exist():
    """In docstrings, comments and messages, and in the files at the root, which mkdocs does not see."""
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    named = [(file, *found) for file in files for found in re.findall(r"\bdocs/([\w/-]+\.\w+)(?:#([\w-]+))?", file.read_text())]
    assert len(named) > 20
    for file, page, anchor in named:
        target = ROOT / "docs" / page
        assert target.exists(), f"{file} names docs/{page}"
        assert not anchor or anchor in anchors(target), f"{file} names docs/{page}#{anchor}"


def links(text):
    """The links of a page to files of this repository, each with its anchor; code is left out."""
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.S | re.M)
    found = re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", text)
    return [(file, anchor) for file, anchor in found if file or anchor]


def broken(page):
    """The links of a page that lead nowhere."""
    wrong = []
    for file, anchor in links(page.read_text()):
        target = page.parent / file if file else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(f"{file}#{anchor}" if anchor else file)
    return wrong


def test_links_of_pages_lead_somewhere():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    assert sum(len(links(page.read_text())) for page in pages) > 100
    assert not {str(page.relative_to(ROOT)): wrong for page in pages if (wrong := broken(page))}


def test_a_link_that_leads_nowhere_would_be_seen(tmp_path):
    (tmp_path / "other.md").write_text("# What *is* here, and why?\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](other.md#what-is-here-and-why) [b](https://x.org/y) `[c](none.md)` [d](none.md) [e](other.md#not-here)"
    )
    assert broken(page) == ["none.md", "other.md#not-here"]


def test_links_to_notebooks_lead_somewhere_on_the_site_too():
    """In a checkout they lead to the notebook, on the site to the page that is made of it."""
    text = (ROOT / "docs" / "index.md").read_text()
    named = re.findall(r"\]\(\.\./examples/(\w+)\.ipynb\)", text)
    assert sorted(named) == sorted(path.stem for path in (ROOT / "examples").glob("*.ipynb"))
    shown = links(notebook_pages.on_page_markdown(text, page=None, config=None, files=None))
    assert {(f"notebooks/{name}.md", "") for name in named} <= set(shown)
    assert not [file for file, _ in shown if file.startswith("..")], "which the site does not have"


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
    for notebook in (ROOT / "examples").glob("*.ipynb"):
        shown = (tmp_path / "notebooks" / f"{notebook.stem}.html").read_text()
        pictures = re.findall(r'<img alt="([^"]+)" src="([^"]+)"', shown)
        assert pictures
        assert '<pre class="output">' in shown
        for _, picture in pictures:
            assert (tmp_path / "notebooks" / picture).read_bytes().startswith(b"\x89PNG")
    assert 'href="notebooks/which_symmetry.html"' in (tmp_path / "discover.html").read_text()
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(r"""<(?:script|link|img)[^>]*(?:src|href)=["']?(https?:[^"' >]*)""", page.read_text())
        assert not loaded, f"{page.name} loads {loaded[0]} from elsewhere"
