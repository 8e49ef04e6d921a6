"""autosym.discover on small images: what it asks of its networks, the answer it gives, and that a search that was killed goes on."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import autosym
from autosym.answer import discovering, inputs, symmetrising
from autosym.answer.answers import Answer, Candidate, LayerAnswer, Verdict
from autosym.answer.hypotheses import AS_GIVEN, USUAL, Built, Given, breaking, checked
from autosym.answer.margins import RARE, Margin
from autosym.answer.routes import Fitter, Store
from autosym.answer.search import Finding
from autosym.answer.symmetrising import Gain, Opinion
from autosym.evidence.verdicts import LITTLE
from autosym.linear.path import Path
from autosym.papers import datasets
from autosym.surgery import free_paths
from models import Samples
from searched import pictures

FORM = {"width": 4, "channels": (1, 2), "strides": (2, 2), "hidden": 2}


def plain(width=1):
    return nn.Sequential(
        nn.Conv2d(1, 4 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4 * width * 16, 3)
    )


@pytest.fixture(scope="module")
def data():
    return pictures()


def found(data, folder=None, **options):
    options = {"network": FORM, "epochs": 4, "seeds": 2, "batch_size": 16} | options
    return autosym.discover("f-fc+conv", data, "translations", resume=folder, **options)


@pytest.fixture(scope="module")
def answer(data):
    return found(data)


# ---- networks


@pytest.mark.parametrize("symmetry", ["translations", "c4", "flip-horizontal", "d4"])
@pytest.mark.parametrize("kind", ["named", "module", "factory"])
def test_strict_networks_keep_their_symmetry_and_relaxed_ones_contain_them(kind, symmetry):
    x = torch.randn(3, 1, 8, 8, dtype=torch.float64)
    model = {"module": plain().double(), "factory": plain}.get(kind)
    networks = Built("f-fc+conv", (symmetry,), x, 3, 100, **FORM) if model is None else Given(model, (symmetry,), x, False)
    (question,) = networks.questions
    strict, relaxed, untied = (networks.build(name, 2, 1).double() for name in question.networks)
    autosym.assert_equivariant(strict, symmetry, x)
    assert not breaking(strict)
    assert breaking(relaxed)
    for other in (relaxed, untied):
        with pytest.raises(AssertionError):
            autosym.assert_equivariant(other, symmetry, x)
    names = {name for name, _ in strict.named_parameters()}
    assert names <= {name for name, _ in relaxed.named_parameters()}
    again = networks.build(question.relaxed, 2, 1).double()
    assert all(
        torch.equal(one, other) for one, other in zip(relaxed.state_dict().values(), again.state_dict().values(), strict=True)
    )


def test_a_trained_model_begins_with_its_weights():
    x = torch.randn(3, 1, 8, 8)
    model = plain()
    networks = Given(model, ("translations",), x, True)
    assert networks.others == (AS_GIVEN,)
    torch.testing.assert_close(networks.build(AS_GIVEN, 1, 0)(x), model(x))
    assert not torch.equal(networks.build(AS_GIVEN, 1, 1)(x), model(x))
    kept = autosym.lift(model, x, "translations")
    torch.testing.assert_close(networks.build("translations kept", 1, 0)(x), kept(x))
    torch.testing.assert_close(networks.build("translations relaxed", 1, 0)(x), kept(x))


def test_a_model_that_cannot_be_widened_is_tried_at_one_width_and_says_so():
    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.head = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.conv(x).relu().mean((2, 3)).reshape(-1, 4))

    networks = Given(Fixed(), ("translations",), torch.randn(2, 1, 8, 8), False)
    assert networks.widths == (1.0,)
    assert "only one width" in networks.notes[0]


def test_maps_that_are_too_large_for_free_paths_are_said(monkeypatch):
    monkeypatch.setattr(free_paths, "LARGE", 10)
    networks = Given(plain(), ("translations",), torch.randn(2, 1, 8, 8), False)
    assert any("weak rival" in note for note in networks.notes)


def test_symmetries_are_checked():
    assert checked("c4", (8, 8)) == ("c4",)
    assert checked(USUAL, (8, 8)) == USUAL
    assert checked(USUAL, (8, 12)) == ("translations", "flip-horizontal"), "nobody chose quarter turns"
    with pytest.raises(ValueError, match="must name some of translations"):
        checked(("c8",), (8, 8))
    with pytest.raises(ValueError, match="must be square"):
        checked(("c4",), (8, 4))


# ---- the second opinion


def test_averaging_a_network_that_keeps_the_symmetry_changes_nothing(answer, data):
    fit = answer.fit
    strict = Built("f-fc+conv", ("translations",), data[0], 3, len(data[0]), **FORM).build("conv", 1, 0)
    group = symmetrising.group_of("translations", tuple(data[0].shape[2:]))
    averaged = autosym.nn.symmetrised.Symmetrised(strict, symmetrising.Moves(group))
    torch.testing.assert_close(averaged(data[0]), strict(data[0]), rtol=1e-4, atol=1e-5)
    gain = symmetrising.gain(strict, averaged, data, fit.likelihood)
    assert abs(gain.nats) < 1e-2


def test_the_gain_of_averaging_is_a_sum_over_samples(data):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(data[0][0].numel(), 3)).to(data[0])
    averaged = autosym.nn.symmetrised.Symmetrised(net, symmetrising.Moves(symmetrising.group_of("c4", (8, 8))))
    x, y = data
    turned = torch.stack([net(x.rot90(k, (2, 3))) for k in range(4)]).mean(0)
    loss = nn.functional.cross_entropy
    expected = loss(net(x), y, reduction="sum") - loss(turned, y, reduction="sum")
    gain = symmetrising.gain(net, averaged, data, autosym.Categorical())
    assert gain.nats == pytest.approx(float(expected.detach()), rel=1e-4)


def finding(judgement):
    return Finding("c4", judgement, Margin(500, 30, 3), Margin(900, 30, 3), {})


@pytest.mark.parametrize(
    ("judgement", "gained", "ahead", "expected"),
    [
        ("no", 20.0, 500.0, "keeps it is as good"),  # averaged it is no worse: nothing is broken
        ("no", -1e-3, 500.0, "keeps it is as good"),  # what it loses is rounding
        ("no", -900.0, 500.0, ""),
        ("yes", -900.0, 500.0, "among networks of its kind"),  # a network of another kind is better, and breaks it
        ("yes", -900.0, 2.0, ""),
        ("yes", 20.0, 500.0, ""),
        ("undecided", 20.0, 500.0, ""),
    ],
)
def test_a_second_opinion_that_contradicts_leaves_it_undecided(judgement, gained, ahead, expected):
    opinion = Opinion("c4", "conv", 4, Gain(gained, abs(gained) / 9))
    said = discovering.contradicted(finding(judgement), opinion, Margin(ahead, 30, 3))
    assert expected in said
    assert bool(said) == bool(expected)


# ---- the answer


def test_the_answer_has_verdicts_candidates_and_a_fit(answer, data):
    (verdict,) = answer.verdicts
    assert answer.verdict("translations") is verdict
    assert verdict.judgement in ("yes", "no", "undecided")
    assert {candidate.network for candidate in answer.candidates} == {"conv", "f-fc+conv", "f-fc"}
    assert answer.cost <= 6
    assert answer.fit.symmetry() is not None
    assert answer.best.log_evidence >= max(c.log_evidence for c in answer.candidates) - 10
    assert answer.best.network == answer.recipe["network"]
    assert "translations" in str(answer)
    assert json.loads(json.dumps(answer.as_dict())) == answer.as_dict()
    with pytest.raises(ValueError, match="'c4' was not asked for"):
        answer.verdict("c4")


def test_an_answer_is_saved_and_loaded(answer, data, tmp_path):
    answer.save(tmp_path)
    again = Answer.load(tmp_path)
    assert again.as_dict() == answer.as_dict()
    torch.testing.assert_close(again.fit.model(data[0]), answer.fit.model(data[0]))
    assert again.fit.evidence.log_evidence == answer.fit.evidence.log_evidence
    with pytest.raises(FileNotFoundError, match="does not exist"):
        Answer.load(tmp_path / "no")
    (tmp_path / "answer.json").write_text("{}")
    with pytest.raises(ValueError, match="damaged"):
        Answer.load(tmp_path)


def test_an_answer_without_an_error_is_the_same_when_loaded(tmp_path):
    """A seed of each kind has no spread, and paths without which a network fails have no finite worth."""
    open_yet = (Margin(5.0, math.inf, 1), Margin(-math.inf, math.inf, 1))
    opinion = Opinion("c4", "conv", 4, Gain(3.0, math.inf))
    verdict = Verdict("c4", "undecided", *open_yet, "why", {}, opinion, (LayerAnswer("conv1", math.inf, True),))
    recipe = {"name": None, "in_shape": [1, 4, 4], "dtype": "float32"}
    answer = Answer((verdict,), (Candidate("conv", 1, 0, -10.0, 1.0, 3),), 10, 1.0, 1.0, (), recipe)
    answer.save(tmp_path)
    again = Answer.load(tmp_path)
    assert again == answer
    assert str(again) == str(answer)
    assert again.as_dict() == answer.as_dict()


@pytest.mark.parametrize(("symmetry", "how"), [("c4", "moved"), ("translations", "shifted around the border (torch.roll)")])
def test_where_the_data_change_no_training_is_advised(symmetry, how):
    """Objects that the border never cuts were answered by "more seeds", which could not change it."""
    verdict = Verdict(symmetry, "undecided", Margin(-2, 11, 6), Margin(656, 12, 6), "why", {"longer runs": 18.0}, moved=RARE)
    assert verdict.advice == (f"the same images, each {how} by lot, if you know that its label stays",)
    assert "larger budget" in replace(verdict, tie=Margin(2, 12, 6)).advice[-1], "not the only reason"
    assert "larger budget" in replace(verdict, moved=0.1).advice[-1]


def test_more_seeds_are_no_advice_where_none_learned_anything():
    verdict = Verdict("c4", "undecided", Margin(0.0, math.inf, 1), Margin(0.0, math.inf, 1), "why")
    assert verdict.advice == ("more samples, more epochs, or a larger network: seeds that learn nothing tell nothing",)
    assert replace(verdict, left_out="some").advice == ("more minutes, in another folder: more samples are used then",)


def test_undecided_says_what_would_decide():
    verdict = Verdict("c4", "undecided", Margin(2, 30, 3), Margin(50, 30, 3), "why", {"longer runs": 12.0})
    assert any("times as many samples" in advice for advice in verdict.advice)
    assert any("longer runs (gained +12 nats when tried)" in advice for advice in verdict.advice)
    shown = Answer((verdict,), (Candidate("conv", 1, 0, -10.0, 1.0, 3),), 10, 1.0, 1.0)
    assert "c4 is undecided: why" in str(shown)
    chance = Verdict("c4", "undecided", Margin(2, 30, 3), Margin(20, 30, 3), "why", {"a larger network": -3.0})
    assert chance.advice == ("more seeds, by a larger budget",), "neither what is chance nor what lost"
    broken = Verdict("c4", "no", Margin(math.inf, 0, 1), Margin(50, 30, 3), layers=(LayerAnswer("conv1", 30.0, True),))
    assert broken.advice == ()
    assert "broken in conv1" in str(Answer((broken,), shown.candidates, 10, 1.0, 1.0))
    with pytest.raises(ValueError, match="load the answer by"):
        _ = shown.fit


@pytest.mark.slow
@pytest.mark.parametrize("trained", [False, True])
def test_a_users_own_network_goes_through(data, trained, tmp_path):
    torch.manual_seed(0)
    model = plain().to(data[0])
    if trained:
        optimiser = torch.optim.Adam(model.parameters(), 0.02)
        for _ in range(60):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(data[0]), data[1]).backward()
            optimiser.step()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    answer = autosym.discover(model, data, ("translations", "c4"), epochs=3, seeds=2, batch_size=16)
    assert [verdict.symmetry for verdict in answer.verdicts] == ["translations", "c4"]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items()), (
        "the given model is left alone"
    )
    assert answer.recipe["trained"] == trained
    hardened = answer.plain()
    assert not any(isinstance(module, Path) for module in hardened.modules())
    assert (hardened(data[0]) - answer.fit.model(data[0])).abs().max() < 0.1
    answer.save(tmp_path)
    torch.testing.assert_close(Answer.load(tmp_path, model).fit.model(data[0]), answer.fit.model(data[0]))
    with pytest.raises(ValueError, match="with the model of discover"):
        _ = Answer.load(tmp_path).fit


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("gconv:c4", {}, "discover makes its own networks"),
        ("conv", {"spam": 1}, "discover got spam"),
        ("conv", {"step": "none"}, "learned precisions"),
        ("conv", {"budget": 0.1}, "too small"),
        ("conv", {"seeds": 1}, "seeds must be at least 2"),
        ("conv", {"minutes": 0}, "minutes must be positive"),
        (3, {}, "model must be a torch module"),
    ],
)
def test_what_cannot_be_is_refused(data, model, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        autosym.discover(model, data, "translations", **({"network": FORM} if isinstance(model, str) else {}), **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, y: (x[0], y[0]), r"without an axis of samples: give all samples, x and y in place of x\[0\] and y\[0\]"),
        (lambda x, y: (x[0], y[:1]), r"got \(1, 8, 8\): this looks like one image; give all of them"),
        (lambda x, y: (x[:, 0], y), r"no channel axis; use x\[:, None\]"),
        (lambda x, y: x, "one tensor, without targets: give a pair"),
        (
            lambda x, y: (x, torch.arange(len(x)) % 7),
            "labels run from 0 to 6, but the model has 4 outputs.*: give the model 7 outputs",
        ),
    ],
)
def test_data_that_are_not_a_batch_with_targets_are_refused(data, change, message):
    with pytest.raises((ValueError, TypeError), match=message):
        autosym.discover("f-fc+conv", change(*data), "translations", network=FORM | {"classes": 4})


@pytest.mark.parametrize(
    ("likelihood", "lost", "expected"),
    [(-30.0, -1225.0, True), (-30.0, -250.0, False), (-30.0, 5.0, False), (-320.0, -1225.0, False)],
    ids=["sure of other labels", "worse, but not than guessing", "no worse", "it explains nothing"],
)
def test_a_network_that_can_only_guess_is_not_stuck_if_averaging_is_worse_than_guessing(likelihood, lost, expected):
    guessing = 240 * math.log(4)
    opinion = Opinion("c4", "conv", 4, Gain(lost, 20.0))
    assert discovering.mistaken(lambda value: 1 + value / guessing, LITTLE, likelihood, opinion) is expected


# ---- a real case of each verdict: embedded digits in one of four quadrants


def quadrant_digits(samples, quadrant, seed=3, digits=5):
    images, labels = datasets.digits()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    chosen = order[labels[order] < digits][:samples]
    canvas, place = datasets.in_quadrants(images[chosen], 2, seed)
    return (canvas - canvas.mean()) / canvas.std(), labels[chosen] + (digits * place if quadrant else 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("samples", "quadrant", "expected"), [(500, False, "yes"), (500, True, "no"), (50, False, "undecided")]
)
def test_digits_in_quadrants(samples, quadrant, expected):
    pytest.importorskip("sklearn")
    form = {"width": 6, "channels": (1, 2, 3), "strides": (2, 2, 2), "hidden": 4}
    answer = autosym.discover("f-fc+conv", quadrant_digits(samples, quadrant), "translations", network=form, epochs=60)
    (verdict,) = answer.verdicts
    assert verdict.judgement == expected, str(answer)
    assert answer.cost <= 6
    assert verdict.opinion.training.loses == quadrant
    assert bool([layer for layer in verdict.layers if layer.breaks]) == (expected == "no")
    assert bool(verdict.advice) == (expected == "undecided")


# ---- resuming


def test_a_folder_of_another_search_is_refused(tmp_path):
    Store(tmp_path, {"seeds": 3, "budget": 6.0})  # refused before it began
    for _ in range(2):
        Store(tmp_path, {"seeds": 2, "budget": 6.0}).begin()
    with pytest.raises(ValueError, match=r"other settings \(seeds\)"):
        Store(tmp_path, {"seeds": 3, "budget": 6.0})
    (tmp_path / "settings.json").write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        Store(tmp_path, {})


def test_other_models_and_data_are_told_apart(data):
    def known(model=None, given=data):
        torch.manual_seed(0)
        return inputs.known(plain() if model is None else model, given, {})

    def smooth(width=1):
        torch.manual_seed(0)
        layers = list(plain(width))
        return nn.Sequential(layers[0], nn.Tanh(), *layers[2:])  # with the same weights

    assert known() == known()
    assert known() != known(smooth()), "a module with other layers"
    assert known(plain) == known(lambda width: plain(width)), "a factory is known by what it makes"
    assert known(plain) != known(smooth)
    x, y = data
    some, order = Samples(x, y), torch.randperm(len(x))
    assert known(given=some) == known(given=torch.utils.data.DataLoader(some, 7, shuffle=True))
    assert known(given=some) == known(given=Samples(x[order], y[order]))
    assert known(given=some) != known(given=Samples(x, y.roll(1)))
    assert known(given=some) != known(given=Samples(-x, y))


def test_a_trained_model_is_told_where_data_are_sorted():
    x, y = pictures(900)
    first = y.argsort(stable=True)

    def knows(x):  # as if it had learned them by heart
        return 5.0 * nn.functional.one_hot(y[first], 3).float()[int(x[0, 0, 0, 0]) : int(x[-1, 0, 0, 0]) + 1]

    class Knows(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, x):
            return knows(x) + self.weight

    numbered = torch.arange(900.0)[:, None, None, None].expand(900, 1, 8, 8)
    assert inputs.is_trained(Knows(), (numbered, y[first]), autosym.Categorical())
    assert not inputs.is_trained(plain(), (x, y), autosym.Categorical())


SCRIPT = """
import sys, torch, autosym
sys.path.insert(0, {tests!r})
from models import Samples
from searched import pictures
torch.set_num_threads(1)
answer = autosym.discover("f-fc+conv", pictures(), "translations", network={form!r}, epochs=4, seeds=2, batch_size=16, resume={folder!r})
answer.save({out!r})
"""


def test_a_search_that_was_stopped_goes_on_as_if_it_had_not_been(data, answer, tmp_path, monkeypatch):
    made, whole = [], Fitter._made

    def stop(self, run):
        made.append(run)
        if len(made) in (5, 20):
            raise KeyboardInterrupt
        return whole(self, run)

    monkeypatch.setattr(Fitter, "_made", stop)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            found(data, tmp_path)
    again = found(data, tmp_path)
    assert len(made) == len(set(made)) + 2, "only the runs that were stopped were begun again"
    assert again.as_dict() | {"seconds": 0} == answer.as_dict() | {"seconds": 0}
    assert all(torch.equal(t, again.fit.weights[name]) for name, t in answer.fit.weights.items())


@pytest.mark.slow
def test_a_search_that_was_killed_goes_on_bit_for_bit(tmp_path):
    def script(folder):
        tests = os.path.dirname(os.path.dirname(__file__))
        text = SCRIPT.format(tests=tests, form=FORM, folder=str(folder / "runs"), out=str(folder))
        return [sys.executable, "-c", text]

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    subprocess.run(script(whole), check=True)
    total = len(list((whole / "runs").glob("*/outcome.json")))
    for part in (0.3, 0.7):
        process = subprocess.Popen(script(killed))
        while process.poll() is None and len(list((killed / "runs").glob("*/outcome.json"))) < part * total:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not (killed / "answer.json").exists()
    subprocess.run(script(killed), check=True)
    ours, theirs = (json.loads((folder / "answer.json").read_text())["answer"] for folder in (killed, whole))
    assert ours | {"seconds": 0} == theirs | {"seconds": 0}
    ours, theirs = (load_file(folder / "fit.safetensors") for folder in (killed, whole))
    assert set(ours) == set(theirs)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


# ---- data that are moved


def test_counts_are_numbers_and_not_classes(data):
    x, y = data
    counts = torch.stack([y, 2 * y], 1).to(torch.int64)
    answer = autosym.discover(
        "f-fc+conv", (x, counts), "translations", "poisson", network=FORM | {"classes": 2}, epochs=3, seeds=2
    )
    assert 0 < answer.verdict("translations").moved <= 1


def test_a_folder_remembers_how_data_change_when_they_are_moved(tmp_path):
    store = Store(tmp_path, {})
    assert store.moved(lambda: {"c4": 0.25}) == {"c4": 0.25}
    assert store.moved(lambda: {"c4": 0.5}) == {"c4": 0.25}
    assert Store(None, {}).moved(lambda: {"c4": 0.5}) == {"c4": 0.5}


def arrows(count, size=12, seed=0):
    """An arrow that points to one of four sides, anywhere around the border; to which one? Shifts do not matter, quarter turns do."""
    draw = torch.Generator().manual_seed(seed)
    head = torch.tensor([[1.0, 1, 1], [0, 1, 0], [0, 1, 0]]).repeat_interleave(2, 0).repeat_interleave(2, 1)
    x, y = torch.zeros(count, 1, size, size), torch.arange(count) % 4
    for image, turn in zip(x, y.tolist(), strict=True):
        image[0, :6, :6] = head.rot90(turn)
        image.copy_(image.roll(torch.randint(size, (2,), generator=draw).tolist(), (1, 2)))
    return x + 0.1 * torch.randn(x.shape, generator=draw), y


@pytest.mark.slow
def test_labels_that_are_the_pose_are_a_no(monkeypatch):
    """The network that keeps quarter turns can only guess, and was taken for stuck where the witness of moved data notices nothing."""
    monkeypatch.setattr(discovering.moving, "probability", lambda *_: 0.5)
    answer = autosym.discover("f-fc+conv", arrows(480), "c4", network={**FORM, "classes": 4}, epochs=60)
    verdict = answer.verdict("c4")
    assert verdict.judgement == "no", str(answer)
