"""What a fit will take: counted before the first step, warned of or refused where it does not fit."""

import warnings
from dataclasses import replace

import pytest
import torch

import autosym
from autosym.evidence import laplace
from autosym.runtime import room
from autosym.training import forecasting, starting
from autosym.training.fitting import prepare
from autosym.training.schedule import Schedule
from models import draw, images, mlp, small

SMALL = forecasting.Forecast(optimiser=10, batch=20, part=30, factors=5, largest="head", free=100)


def wide():
    """More inputs than samples: their columns are kept in place of the factor."""
    torch.manual_seed(0)
    return mlp(300, 4, 3), (torch.randn(20, 300), torch.arange(20) % 3)


@pytest.mark.parametrize("make", [lambda: (mlp(5, 4, 3), draw("categorical", 20)), lambda: (small(), images()), wide])
def test_factors_are_forecast_to_the_byte(make):
    model, data = make()
    run = prepare(model, data, "categorical", Schedule(epochs=5))
    at = laplace.at(model, data)
    assert run.forecast.factors == at.nbytes
    sizes = {name: f.nbytes for name, f in at.curvature.factors.items()}
    assert sizes[run.forecast.largest] == max(sizes.values())


def test_a_part_of_a_pass_is_bounded_by_memory_and_a_batch_by_its_size():
    model, data = small(), images()
    each = prepare(model, data, "categorical", Schedule(epochs=5)).verified.bytes_per_sample
    run = prepare(model, data, "categorical", Schedule(epochs=5, batch_size=4), memory=2.5 * each / 2**30)
    assert run.forecast.part == int(2 * each)
    assert run.forecast.batch == int(4 * each)


def test_kernel_evidence_has_no_factors():
    assert prepare(small(), images(), "categorical", Schedule(epochs=5, kernel=8)).forecast.factors == 0


def test_the_most_at_one_time_is_in_a_batch_or_in_the_pass_at_the_end():
    assert SMALL.memory == 10 + 30 + 2 * 5
    assert replace(SMALL, batch=90).memory == 100
    assert replace(SMALL, batch=90).fits
    assert not replace(SMALL, batch=91).fits
    assert replace(SMALL, batch=10**9, free=None).fits, "nobody knows"


@pytest.mark.parametrize(
    ("changes", "named"), [({"batch": 200}, "batch_size="), ({"part": 200}, "memory="), ({"factors": 60}, "freeze head")]
)
def test_what_does_not_fit_is_warned_of_with_what_to_do(changes, named):
    with pytest.warns(UserWarning, match=named):
        replace(SMALL, **changes).check()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SMALL.check()
        replace(SMALL, **changes, free=None).check()


def test_factors_larger_than_all_memory_are_refused_before_the_first_step(monkeypatch):
    monkeypatch.setattr(room, "free", lambda device: 100)
    model, data = small(), images()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(MemoryError, match=r"factors take .*freeze it .*kernel=150"):
        autosym.fit(model, data, epochs=2)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_time_grows_with_epochs_steps_and_the_end():
    def seconds(samples=24, **changes):
        (x, y), schedule = draw("categorical", samples), Schedule(**({"epochs": 50} | changes))
        run = prepare(mlp(5, 4, 3), (x, y), "categorical", schedule)
        return run.timed(forward=1e-3)

    base = seconds()
    weights = 50 * 24 * 3 * 1e-3
    assert base.seconds - base.evidence_seconds == pytest.approx(weights)
    assert seconds(epochs=100, every=2).seconds > 1.5 * base.seconds
    assert seconds(every=10).evidence_seconds < base.evidence_seconds
    assert seconds(subset=6).evidence_seconds < base.evidence_seconds
    assert seconds(sampled_end=True).evidence_seconds < base.evidence_seconds
    assert 0 < seconds(step="none").evidence_seconds < 0.2 * weights, "the end alone"


def test_a_fit_says_it_where_progress_is_shown_and_keeps_it(capsys):
    fit = autosym.fit(small(), images(), epochs=2, progress="mine")
    assert "mine: expects 0.0" in capsys.readouterr().err
    assert fit.forecast.seconds > fit.forecast.evidence_seconds > 0
    autosym.fit(small(), images(), epochs=1)
    assert "expects" not in capsys.readouterr().err


def test_the_start_times_a_forward_pass_and_draws_nothing():
    run = prepare(small(), images(), "categorical", Schedule(epochs=5))
    assert run.forecast.seconds is None
    state = torch.random.get_rng_state()
    starting.begin(run)
    assert run.forecast.seconds > 0
    assert torch.equal(state, torch.random.get_rng_state())
