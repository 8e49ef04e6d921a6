"""Samples that are drawn where all take too long: by class, the same in any order, and as far as minutes allow."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import autosym
from autosym.answer import deadline, discovering, inputs, sampling
from autosym.answer.answers import Answer
from autosym.answer.deadline import Deadline, Pace, TooShort
from autosym.answer.routes import Fitter, Store
from autosym.answer.sampling import Draw
from autosym.training.schedule import Schedule
from models import Samples
from searched import pictures


def test_every_class_has_its_part_and_larger_draws_contain_smaller_ones():
    x, _ = pictures(300)
    y = torch.tensor([0] * 240 + [1] * 57 + [2] * 3)
    draw = Draw((x, y), 3)
    some, labels = draw.first(60)
    assert labels.bincount().tolist() == [47, 12, 1]
    assert torch.equal(draw.first(20)[0], some[:20])
    larger = Draw((x, y), 3).first(100)
    assert torch.equal(larger[0][:60], some)
    assert torch.equal(larger[1][:60], labels)
    assert len({image.sum().item() for image in some}) == 60, "each once"
    places = [int((x == image).flatten(1).all(1).nonzero()[0, 0]) for image in some]
    assert torch.equal(y[places], labels), "with its own label"
    assert max(places[:47]) > 120, "not the first ones"


def test_a_draw_depends_on_the_samples_alone():
    x, y = pictures(90)
    order = torch.randperm(90, generator=torch.Generator().manual_seed(1))
    known = Draw((x, y), 3).first(30)
    for data in ((x[order], y[order]), TensorDataset(x, y), Samples(x, y), DataLoader(Samples(x, y), 7, shuffle=True)):
        assert all(torch.equal(one, other) for one, other in zip(Draw(data, 3).first(30), known, strict=True))


def test_numbers_are_drawn_without_classes_and_equal_samples_as_often_as_they_are_there():
    x, y = torch.ones(10, 1, 2, 2), torch.arange(10.0)[:, None] // 5
    assert sorted(Draw((x, y), None).first(10)[1].flatten().tolist()) == [0.0] * 5 + [1.0] * 5
    assert len(Draw((x, y), None).first(3)[0]) == 3


def test_data_that_change_are_refused():
    class Noisy(Samples):
        def __getitem__(self, index):
            return self.x[index] + torch.rand(()), self.y[index]

    with pytest.raises(ValueError, match=r"not the same when they are read again.*augment="):
        Draw(Noisy(*pictures(30)), 3).first(10)


def test_the_fewest_samples_and_their_schedule():
    assert Draw((), 10).least(1437) == 200
    assert Draw((), 40).least(1437) == 400
    assert Draw((), None).least(150) == 150
    asked = Schedule(epochs=67, batch_size=64)
    found = sampling.shortened(asked, 1437, 300)
    assert found.batch_size == 37
    assert found.epochs == math.ceil(67 * 23 / 9), "as many steps of the weights"
    assert sampling.said(300, 1437, 300.0) == "300 of 1,437 samples were used, to stay within 5 minutes: more minutes use more"
    assert sampling.said(1437, 1437, 300.0) == ""


@pytest.mark.parametrize(("expected", "samples"), [(60, 1000), (72, 1000), (96, 629), (6000, 200)])
def test_time_says_how_many(monkeypatch, expected, samples):
    fitter = SimpleNamespace(samples=1000, schedule=Schedule(epochs=100))
    monkeypatch.setattr(Deadline, "expected", lambda self, epochs, short=True: expected)
    monkeypatch.setattr(deadline.time, "perf_counter", lambda: 0.0)
    assert Deadline(fitter, (), None, 60.0, 0.0, 6.0).samples(200) == samples
    assert Deadline(replace_samples(fitter, 200), (), None, 60.0, 0.0, 6.0).samples(200) == 200


def replace_samples(fitter, samples):
    return SimpleNamespace(**(vars(fitter) | {"samples": samples}))


# ---- in a search


FORM = {"width": 4, "channels": (1, 2), "strides": (2, 2), "hidden": 2}


@pytest.fixture
def slow(monkeypatch):
    """A machine on which 90 samples take far too long, and 30 or fewer do not."""
    monkeypatch.setattr(sampling, "LEAST", (24, 2))
    monkeypatch.setattr(
        Deadline, "expected", lambda self, epochs, short=True: self.seconds * (0.5 if self.fitter.samples <= 30 else 8.0)
    )


def found(data, folder=None, **options):
    options = {"network": FORM, "epochs": 3, "seeds": 2, "batch_size": 16, "minutes": 2.0} | options
    return autosym.discover("f-fc+conv", data, "translations", resume=folder, **options)


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("kind", ["pair", "dataset"])
def test_a_search_of_some_samples_says_so_and_goes_on_with_the_same(kind, tmp_path, monkeypatch):
    x, y = pictures(90)
    data = (x, y) if kind == "pair" else Samples(x, y)
    with pytest.warns(TooShort, match="^24 of 90 samples were used, to stay within 2 minutes: more minutes use more$"):
        answer = found(data, tmp_path / "whole")
    assert answer.samples == 24
    assert answer.recipe["samples"] == 24
    assert any(note.startswith("24 of 90 samples were used") for note in answer.notes)
    (verdict,) = answer.verdicts
    assert verdict.judgement == "undecided"
    assert verdict.advice[-1] == "more minutes, in another folder: more samples are used then"
    answer.save(tmp_path / "answer")
    assert Answer.load(tmp_path / "answer").as_dict() == answer.as_dict()

    made, whole = [], Fitter._made

    def stop(self, run):
        made.append(run)
        if len(made) == 5:
            raise KeyboardInterrupt
        return whole(self, run)

    monkeypatch.setattr(Fitter, "_made", stop)
    with pytest.warns(TooShort), pytest.raises(KeyboardInterrupt):
        found(data, tmp_path / "stopped")
    for name in ("decided.json", "epochs.json"):  # as if the machine had been as fast
        (tmp_path / "stopped" / name).write_bytes((tmp_path / "whole" / name).read_bytes())
    assert json.loads((tmp_path / "stopped" / "samples.json").read_text()) == {"samples": 24}
    monkeypatch.setattr(Deadline, "expected", lambda self, epochs, short=True: 0.1 * self.seconds)  # fast enough for all, now
    again = found(data, tmp_path / "stopped")
    assert again.as_dict() | {"seconds": 0} == answer.as_dict() | {"seconds": 0}


def test_one_width_is_tried_where_time_is_short_for_two(monkeypatch, tmp_path):
    monkeypatch.setattr(
        Deadline,
        "expected",
        lambda self, epochs, short=True: self.seconds * (0.5 if len(self.fitter.plan.widths) == 1 else 8.0),
    )
    answer = found(pictures(90), tmp_path)
    assert answer.samples == 90
    assert {candidate.width for candidate in answer.candidates} == {1.0}
    assert [note for note in answer.notes if note.startswith("2 minutes are too few for networks of two widths")]
    assert json.loads((tmp_path / "widths.json").read_text()) == {"widths": 1}
    monkeypatch.setattr(Deadline, "expected", lambda self, epochs, short=True: 0.1 * self.seconds)  # fast enough for both, now
    assert found(pictures(90), tmp_path).as_dict() | {"seconds": 0} == answer.as_dict() | {"seconds": 0}
    assert not any("two widths" in note for note in found(pictures(90)).notes)


@pytest.mark.usefixtures("slow")
def test_a_search_that_takes_too_long_with_the_fewest_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(Deadline, "expected", lambda self, epochs, short=True: 20 * self.seconds)
    said = r"even the shortest search with 24 of 90 samples takes about 40 minutes here, more than the 2 that were given: give 40 or more$"
    with pytest.raises(ValueError, match=said):
        found(pictures(90), tmp_path)
    assert not list(tmp_path.iterdir())


def test_times_are_measured_by_some_samples(monkeypatch):
    monkeypatch.setattr(discovering, "MEASURED", 40)
    seen = []
    monkeypatch.setattr(Pace, "measured", classmethod(lambda cls, fitter, *more: seen.append(fitter) or Pace(1e-3, 1e-3, 1e-3)))
    answer = found(pictures(60))
    assert answer.samples == 60
    assert [len(fitter.tried[0]) for fitter in seen] == [40]
    assert seen[0].part_tried == pytest.approx(2 / 3)


def test_a_pace_is_of_all_samples_without_the_epoch_that_warms_up(monkeypatch):
    x, y = pictures(60)
    likelihood = autosym.Categorical()
    networks, _ = inputs.networks("f-fc+conv", ("translations",), x, 60, 3, (x, y), likelihood, FORM)
    fitter = Fitter(networks, (x, y), 60, likelihood, Schedule(epochs=3, batch_size=16), Store(None, {}))
    fitter.largest = ("f-fc+conv", 1.0)
    given = deadline.fit

    def timed(*arguments, **options):
        done = given(*arguments, **options)
        lines = [line | {"seconds": seconds} for line, seconds in zip(done.history, (50.0, 51.0, 52.0), strict=True)]
        return replace(done, history=lines)

    monkeypatch.setattr(deadline, "fit", timed)
    assert Pace.measured(fitter, 1.0, 2.0).epoch == pytest.approx(1.0)
    fitter.tried, fitter.part_tried = (x[:30], y[:30]), 0.5
    assert Pace.measured(fitter, 1.0, 2.0).epoch == pytest.approx(2.0)
