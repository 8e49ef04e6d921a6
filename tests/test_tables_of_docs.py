"""Measured tables of the pages are those of the files in results/ and benchmarks/results/."""

import pytest

import findings
import tables_of_docs


@pytest.mark.parametrize("page", tables_of_docs.pages(), ids=lambda page: str(page.relative_to(tables_of_docs.ROOT)))
def test_a_page_has_the_numbers_of_the_files(page):
    text = page.read_text()
    assert tables_of_docs.filled(text) == text, "run python benchmarks/tables_of_docs.py"


def test_every_table_stands_in_a_page():
    text = "\n".join(page.read_text() for page in tables_of_docs.pages())
    assert not [name for name in tables_of_docs.TABLES if f"<!-- table: {name} -->" not in text]


def test_a_number_that_was_typed_is_seen_and_mended():
    page = "Before.\n\n<!-- table: one -->\n\n| a |\n| --- |\n| 2 |\n\n<!-- end -->\n\nAfter <!-- end -->.\n"
    tables = {"one": lambda: findings.markdown(("a",), [(1,)])}
    mended = tables_of_docs.filled(page, tables)
    assert mended == page.replace("| 2 |", "| 1 |")
    assert tables_of_docs.filled(mended, tables) == mended


def test_places_that_cannot_be_filled_are_refused():
    with pytest.raises(ValueError, match="no table is called two: there are one"):
        tables_of_docs.filled("<!-- table: two -->\n<!-- end -->\n", {"one": str})
    with pytest.raises(ValueError, match="no <!-- end --> of its own"):
        tables_of_docs.filled("<!-- table: one -->\n", {"one": str})
    with pytest.raises(ValueError, match="no <!-- end --> of its own"):
        tables_of_docs.filled("<!-- table: one -->\n<!-- table: one -->\n<!-- end -->\n", {"one": str})


def test_the_check_names_the_pages_that_differ(tmp_path, monkeypatch, capsys):
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("<!-- table: cautions -->\n<!-- end -->\n")
    monkeypatch.setattr(tables_of_docs, "ROOT", tmp_path)
    monkeypatch.setattr(tables_of_docs, "pages", lambda: [tmp_path / "README.md"])
    assert tables_of_docs.main(["--check"]) == 1
    assert "README.md" in capsys.readouterr().out
    assert tables_of_docs.main([]) == 0
    assert tables_of_docs.main(["--check"]) == 0
    assert tables_of_docs.main(["cautions"]) == 0
    assert capsys.readouterr().out.rstrip().endswith(findings.cautions())


def test_ranges_of_numbers():
    assert findings.span([1.0, 3.0], ".0f") == "1 to 3"
    assert findings.span([0.012, 0.011], ".0f", 0.01) == "1"


def test_the_line_under_a_table_says_what_made_it():
    one = {"provenance": {"device": "CPU", "torch": "2.13.0+cpu", "commit": "0123456789abcdef-dirty"}}
    two = {"provenance": {"device": "GPU", "torch": "2.13.0+cu130", "commit": "abcdef0"}}
    assert findings.made([one], "x").strip() == "*`x`; CPU; torch 2.13.0; commit 0123456-dirty.*"
    assert findings.made([one, two], "x").strip() == "*`x`; CPU and GPU; torch 2.13.0; commits 0123456-dirty, abcdef0.*"


def test_our_numbers_beside_published_ones():
    assert tables_of_docs.beside(1.234, 2.0, 2, 0.1) == "1.23 ± 0.10 (2.00)"
    assert tables_of_docs.beside(None, 2.0, 1) == "- (2.0)"
    assert tables_of_docs.beside(1.0, None, 0) == "1"
