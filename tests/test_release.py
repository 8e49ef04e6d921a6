"""What a release says of itself is the same everywhere: version, changelog, citation, templates for reports."""

import datetime
import re
from pathlib import Path

import pytest

import autosym

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parent.parent
TEMPLATES = ROOT / ".github" / "ISSUE_TEMPLATE"
SECTION = r"^## \[(.+?)\](?: - (\d{4}-\d{2}-\d{2}))?$"


def read(path):
    return yaml.safe_load((ROOT / path).read_text())


def sections():
    """Version and date of every section of the changelog, newest first."""
    return re.findall(SECTION, (ROOT / "CHANGELOG.md").read_text(), re.M)


def test_the_version_is_one_of_semantic_versioning():
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+)?", autosym.__version__)


def test_the_changelog_has_a_section_of_this_version_below_what_is_not_released():
    assert sections()[0] == ("Unreleased", "")
    dates = dict(sections())
    assert datetime.date.fromisoformat(dates[autosym.__version__])
    assert all(date for version, date in sections() if version != "Unreleased")


def test_the_citation_is_of_this_version():
    found = read("CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= set(found), "what the format needs"
    assert found["version"] == autosym.__version__
    assert found["date-released"] == dict(sections())[autosym.__version__]
    assert found["authors"] == [{"name": "The autosym developers"}]
    assert found["license"] == "MIT"
    (paper,) = found["references"]
    assert paper["title"] == "Learning Layer-wise Equivariances Automatically using Gradients"
    assert paper["title"] in " ".join((ROOT / "README.md").read_text().split())
    assert [author["family-names"] for author in paper["authors"]] == ["Ouderaa", "Immer", "Wilk"]
    assert paper["year"] == 2023


def test_templates_ask_for_what_an_answer_needs():
    forms = {path.stem: yaml.safe_load(path.read_text()) for path in TEMPLATES.glob("*.yml")}
    assert set(forms) == {"bug", "wrong-answer", "feature"}
    for form in forms.values():
        assert {"name", "description", "body"} <= set(form)
        asked = [part for part in form["body"] if part["type"] != "markdown"]
        assert len({part["id"] for part in asked}) == len(asked)
    required = {
        name: {part["id"] for part in form["body"] if part.get("validations", {}).get("required")}
        for name, form in forms.items()
    }
    assert required["bug"] >= {"doctor", "code"}
    assert required["wrong-answer"] >= {"data", "expected", "found", "doctor"}
