"""The report of discover: the verdict in one sentence, all numbers, words escaped, and a file that needs nothing else."""

import math
import re
import shutil

import pytest

pytest.importorskip("jinja2")

import autosym
from autosym.answer.answers import Answer, Candidate, LayerAnswer, Verdict
from autosym.answer.margins import Margin
from autosym.answer.symmetrising import Gain, Opinion
from autosym.report import answered
from pages import Page

EVIL = "<script>document.title = 'taken'</script>"


def verdict(symmetry, judgement, **changes):
    opinion = Opinion(symmetry, "conv of width 2", 4, Gain(-30.5, 3.0), Gain(2.0, 1.0))
    made = {"breaking": Margin(2.4, 6.0, 3), "tie": Margin(803.0, 60.0, 3), "opinion": opinion}
    return Verdict(symmetry, judgement, **(made | changes))


def answer(*verdicts, **changes):
    candidates = (Candidate("conv", 2.0, 1, -500.25, 3.0, 11, "", 1234), Candidate("f-fc", 1.0, 0, -1303.5, 4.0, 9, "", 4321))
    return Answer(verdicts, candidates, 500, 4.2, 60.0, **changes)


@pytest.mark.parametrize(
    ("judgements", "sentence"),
    [
        ({"translations": "yes"}, "The data are symmetric under shifts."),
        ({"translations": "no", "c4": "no"}, "The data are not symmetric under shifts or quarter turns."),
        (
            {"translations": "yes", "c4": "no", "flip-horizontal": "no"},
            "The data are symmetric under shifts, but not under quarter turns or left-right mirror images.",
        ),
        ({"c2": "undecided"}, "Whether the data are symmetric under half turns is undecided."),
        (
            {"translations": "yes", "c4": "no", "flip-horizontal": "undecided"},
            "The data are symmetric under shifts, not under quarter turns, but whether they are under left-right mirror images is "
            "undecided.",
        ),
    ],
)
def test_the_headline_is_the_verdict_in_one_plain_sentence(judgements, sentence):
    found = answer(*(verdict(name, judgement) for name, judgement in judgements.items()))
    page = Page(answered.html(found.as_dict()))
    assert answered.headline(found.as_dict()["verdicts"]) == sentence
    assert sentence in page.text


def test_an_answer_by_its_name_is_one_short_line():
    found = answer(verdict("c4", "yes"), verdict("translations", "no"))
    assert repr(found) == "<Answer: c4: yes, translations: no; 20 fits on 500 samples>"
    assert "breaking gains" in str(found), "print shows the table"


def test_a_no_by_moved_data_says_so():
    found = answer(verdict("c4", "no", breaking=Margin(38.0, 74.0, 4), moved=0.0025), verdict("c2", "yes", moved=0.4))
    page = Page(answered.html(found.as_dict()))
    said = "The data change when images are moved. Data with this symmetry would do so with probability"
    assert page.text.count(f"{said} 0.0025") == 1
    assert "c4: the data change when they are moved" in str(found)
    assert found.verdicts[0].probability == Margin(38.0, 74.0, 4).probability  # that of moved data is of another kind
    plain = answer(verdict("c4", "no", breaking=Margin(500.0, 20.0, 4), moved=0.0025))
    assert "data change when" not in str(plain)
    assert said not in Page(answered.html(plain.as_dict())).text


def test_the_page_holds_all_that_was_found():
    layers = (LayerAnswer("blocks.0", 0.5, False), LayerAnswer("blocks.1", 333.0, True))
    broken = verdict("c4", "no", breaking=Margin(math.inf, 0.0, 1), layers=layers)
    open_yet = verdict("flip-horizontal", "undecided", why="the tie is worth too little", tried={"longer runs": 12.0})
    found = answer(verdict("translations", "yes"), broken, open_yet, notes=("only one width was tried",))
    page = Page(answered.html(found.as_dict() | {"command": "autosym discover x", "provenance": {"autosym": "0"}}))
    assert page.values["verdict"] == ["yes", "no", "undecided"]
    assert page.values["breaking"] == ["2.4", "", "2.4"]
    assert page.values["layer"] == ["0.5", "333.0"]
    assert page.values["log_evidence"] == ["-500.25", "-1303.5"]
    assert page.values["opinion"] == ["-30.5"] * 3
    for words in (
        "+803 ± 60 nats",
        "all of it",
        "What would decide",
        "longer runs (gained +12 nats when tried)",
        "Note: only one width",
    ):
        assert words in page.text
    assert "autosym discover x" in page.text


def test_a_page_made_from_python_names_the_version(tmp_path):
    page = Page(answer(verdict("c4", "yes")).report(tmp_path).read_text())
    assert f"Made by autosym {autosym.__version__}." in page.text


def test_words_of_others_are_escaped_and_nothing_is_fetched(tmp_path):
    found = answer(verdict("translations", "undecided", why=EVIL), notes=(EVIL,))
    file = answered.write(found, tmp_path, title=EVIL, command=EVIL)
    text = file.read_text()
    assert file == tmp_path / "report.html"
    assert "<script>" not in text
    assert not re.search(r'(src|href)="(?!data:|#)', text)


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium")
@pytest.mark.parametrize("width", [320, 1280])
def test_the_page_in_a_browser(tmp_path, width):
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    names = ("translations", "c4", "flip-horizontal")
    found = answer(*(verdict(name, j, why="why " * 30) for name, j in zip(names, ("yes", "no", "undecided"), strict=True)))
    answered.write(found, tmp_path)
    complaints = []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": width, "height": 800})
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto((tmp_path / "report.html").as_uri())
        assert "The data are symmetric under shifts" in page.inner_text("h1")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        browser.close()
    assert complaints == []


def test_an_error_that_nobody_knows_is_said():
    """Of no network two runs learned something: margins have no error, in print, in the report and when they are read again."""
    margin = Margin(129.0, math.inf, 1)
    verdict = Verdict("c4", "undecided", Margin(-2.0, math.inf, 1), margin, "nobody knows what chance is worth")
    answer = Answer((verdict,), (Candidate("conv", 1.0, 0, -100.0, 1.0, 3),), 100, 3.0, 5.0, (), {"name": None})
    assert "+129 +- ? nats" in str(answer)
    page = answered.html(answer.as_dict())
    assert "+129 ± an unknown error" in page
    assert "To repeat it" not in page, "there is nothing to repeat it by"
