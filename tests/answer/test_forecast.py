"""How far a search has come, in words and numbers."""

import pytest

from autosym.answer.forecast import Forecast, spoken, told
from autosym.answer.plans import Outcome, Run


def test_the_time_that_is_left_follows_what_runs_took():
    forecast = Forecast(10.0, 100.0)
    assert forecast.left == 100.0
    forecast.add(2.0, 40.0)
    assert forecast.left == pytest.approx(8 * 20.0), "a fifth is done: what was expected no longer counts"
    forecast.add(10.0, 200.0)
    assert forecast.left == 0.0, "more was done than planned"
    assert str(forecast).startswith("99 %"), "runs that are optional still come"


@pytest.mark.parametrize(("seconds", "words"), [(5, "5 s"), (120, "2 min"), (7200, "2.0 h")])
def test_times_in_words(seconds, words):
    assert spoken(seconds) == words


def test_a_line_for_every_run_where_there_is_no_terminal(capsys):
    run = Run("conv", 2.0, 1, "long")
    with told(True, Forecast(2.0, 10.0), lambda run: 1.0) as (say, tell):
        tell("long runs")
        say(run, None)
        say(run, Outcome(-12.3, seconds=5.0))
    err = capsys.readouterr().err
    assert err.splitlines()[0] == "long runs"
    assert "50 %, about 5 s left" in err
    assert "long run: conv, width 2, seed 1: log evidence -12" in err


@pytest.mark.parametrize(("left", "named"), [(("blocks.1", "blocks.2"), "(blocks.1, blocks.2)"), ((), "(none)")])
def test_runs_without_layers_name_them(capsys, left, named):
    with told(True, Forecast(2.0, 10.0), lambda run: 1.0) as (say, _):
        say(Run("f-fc+conv", 1.0, 2, "layers", "end", left), Outcome(-301.0, seconds=1.0))
    assert f"without layers {named}: f-fc+conv, width 1, seed 2: log evidence -301" in capsys.readouterr().err


def test_nothing_is_said_unless_it_is_wanted(capsys):
    forecast = Forecast(2.0, 10.0)
    with told(False, forecast, lambda run: 1.0) as (say, tell):
        tell("long runs")
        say(Run("conv", 2.0, 1, "long"), Outcome(-12.3, seconds=5.0))
    assert capsys.readouterr().err == ""
    assert forecast.done == 1.0
