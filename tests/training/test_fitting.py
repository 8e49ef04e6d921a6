"""fit: what a step touches, repeatability, data, history, faults."""

import copy
import json
import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

import autosym
from autosym import Gaussian, Schedule
from autosym.evidence import laplace
from models import Samples, draw, images, mlp, small

# ---- what a step touches


@pytest.mark.parametrize("step", ["mackay", "gradient"])
@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
def test_a_step_changes_every_parameter_and_every_precision(likelihood, step):
    model, data = small(), images(likelihood)
    before = copy.deepcopy(model.state_dict())
    kind = Gaussian(0.7) if likelihood == "gaussian" else autosym.Categorical()
    fit = autosym.fit(model, data, kind, epochs=1, burn_in=0, every=1, step=step)
    assert not [name for name, value in model.state_dict().items() if torch.equal(value, before[name])]
    assert len(fit.prior.names) == len(before) == 16
    assert not [name for name, value in fit.prior.precision().items() if value == 1]
    if likelihood == "gaussian":
        sigma = math.exp(float(fit.likelihood.log_variance.detach()) / 2)
        assert sigma != pytest.approx(0.7, abs=1e-3)
        assert fit.history[0]["sigma_noise"] == pytest.approx(sigma)
        assert math.exp(float(kind.log_variance.detach()) / 2) == pytest.approx(0.7), "the one given is left as it was"


@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
def test_map_leaves_precisions_and_noise_alone(likelihood):
    model, data = small(), images(likelihood)
    kind = Gaussian(0.7) if likelihood == "gaussian" else likelihood
    precision = {site: 3.0 + i for i, site in enumerate(laplace.at(model, data, likelihood).names)}
    fit = autosym.fit(model, data, kind, prior_precision=precision, epochs=2, step="none")
    assert fit.prior.precision() == pytest.approx(precision, rel=1e-12)
    if likelihood == "gaussian":
        assert float(fit.likelihood.log_variance.detach()) == pytest.approx(2 * math.log(0.7))
    assert [set(line) for line in fit.history] == [{"epoch", "loss", "seconds"}] * 2


def test_frozen_parameters_stay():
    model, data = small(), images()
    model.hidden.requires_grad_(False)
    before = model.hidden.linear.weight.detach().clone()
    fit = autosym.fit(model, data, epochs=2, burn_in=0, every=1)
    assert torch.equal(model.hidden.linear.weight, before)
    assert not any(name.startswith("hidden") for name in fit.prior.names)


# ---- repeatable


def one_run(seed, step="mackay"):
    torch.manual_seed(5)
    model, data = small(), images()
    fit = autosym.fit(model, data, seed=seed, epochs=4, batch_size=8, burn_in=1, every=1, step=step)
    lines = [{key: value for key, value in line.items() if key != "seconds"} for line in fit.history]
    return torch.cat([p.detach().flatten() for p in model.parameters()]), fit.prior.precision(), lines


@pytest.mark.parametrize("step", ["mackay", "gradient", "none"])
def test_a_seed_fixes_the_run_bit_for_bit(step):
    weights, precision, lines = one_run(3, step)
    torch.manual_seed(77)
    again = one_run(3, step)
    assert torch.equal(weights, again[0])
    assert (precision, lines) == again[1:]


def test_another_seed_is_another_run():
    weights, precision, lines = one_run(3)
    other = one_run(4)
    assert not torch.equal(weights, other[0])
    assert precision != other[1]
    assert lines != other[2]


# ---- data


DATA = {
    "tensors": lambda x, y: (x, y),
    "tensor dataset": TensorDataset,
    "dataset": Samples,
    "loader": lambda x, y: DataLoader(TensorDataset(x, y), 24),
    "shuffled loader": lambda x, y: DataLoader(TensorDataset(x, y), 24, shuffle=True),
    "list of batches": lambda x, y: [(x, y)],
}


@pytest.mark.parametrize("kind", DATA)
def test_any_data_give_the_same_fit(kind):
    """Of the whole data in one batch the order does not matter."""
    (x, y), start = draw("categorical", 24), mlp(5, 4, 3)
    fits = []
    for data in ((x, y), DATA[kind](x, y)):
        model = copy.deepcopy(start)
        fits.append(autosym.fit(model, data, epochs=6, batch_size=24, lr=0.05, burn_in=1, every=1, sampled=False))
        assert fits[-1].history[-1]["loss"] < fits[-1].history[0]["loss"] - 0.05
        assert fits[-1].evidence.samples == 24
    for ours, theirs in zip(fits[0].model.parameters(), fits[1].model.parameters(), strict=True):
        assert_close(ours, theirs, rtol=1e-8, atol=1e-8)
    assert fits[1].prior.precision() == pytest.approx(fits[0].prior.precision(), rel=1e-8)
    assert [line["loss"] for line in fits[1].history] == pytest.approx([line["loss"] for line in fits[0].history])


def test_batches_are_shuffled_and_all_are_seen():
    """Batches of 8 and of 4 are those of the weights: the evidence takes all 20 at once."""
    (x, y), model, seen = draw("categorical", 20), mlp(5, 4, 3), []
    x[:, 0] = torch.arange(20)
    model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][:, 0].int().tolist()))
    autosym.fit(model, (x, y), epochs=2, batch_size=8, step="none")
    *at_the_start, a, b, c, d, e, f = (batch for batch in seen if len(batch) in (8, 4))
    assert at_the_start == [a, b, c], "the loss of the given model is that of the first batches"
    assert [len(batch) for batch in (a, b, c)] == [8, 8, 4]
    assert sorted(a + b + c) == sorted(d + e + f) == list(range(20))
    assert a + b + c != d + e + f
    assert a + b + c != list(range(20))


def test_the_loss_is_the_mean_over_samples():
    (x, y), model = draw("categorical", 20), mlp(5, 4, 3)
    before = float(F.cross_entropy(model(x), y).detach())
    fit = autosym.fit(model, (x, y), epochs=1, batch_size=8, lr=1e-12, step="none")
    assert fit.history[0]["loss"] == pytest.approx(before, rel=1e-6)


@pytest.mark.parametrize("step", ["mackay", "none"])
def test_evidence_is_taken_on_its_own_data_where_they_are_given(step):
    """As where the training data are augmented."""
    model, (x, y) = mlp(5, 4, 3), draw("categorical", 20)
    augmented = (x + 0.3 * torch.randn_like(x), y)
    fit = autosym.fit(model, augmented, evidence_data=(x, y), epochs=2, burn_in=0, every=1, step=step)
    exact, other = (autosym.log_evidence(model, d, prior_precision=fit.prior.precision()) for d in ((x, y), augmented))
    assert float(fit.evidence.log_evidence) == pytest.approx(exact, abs=1e-9)
    assert abs(exact - other) > 1e-3


def test_a_loader_that_drops_samples_may_train_where_the_evidence_has_all():
    x, y = draw("categorical", 20)
    loader = DataLoader(TensorDataset(x, y), 8, drop_last=True, shuffle=True)
    fit = autosym.fit(mlp(5, 4, 3), loader, evidence_data=(x, y), epochs=2, burn_in=0, every=1)
    assert fit.evidence.samples == 20


def test_the_subset_is_used(monkeypatch):
    seen, real = [], laplace.kfac
    monkeypatch.setattr(laplace, "kfac", lambda *a, **k: seen.append((k.get("subset"), k.get("seed"))) or real(*a, **k))
    autosym.fit(mlp(5, 4, 3), draw("categorical", 20), epochs=2, burn_in=0, every=1, subset=7, seed=10)
    assert [call for call in seen if call[0]] == [(7, 11), (7, 12)], "with other draws at every step"


# ---- history


@pytest.mark.parametrize(
    ("burn_in", "every", "expected"),
    [(0, 1, [1, 2, 3, 4, 5, 6]), (0, 2, [2, 4, 6]), (2, 1, [3, 4, 5, 6]), (1, 2, [3, 5]), (3, 2, [5]), (5, 1, [6])],
)
def test_evidence_steps_follow_burn_in_and_frequency(burn_in, every, expected):
    fit = autosym.fit(mlp(5, 4, 3), draw("categorical", 12), epochs=6, burn_in=burn_in, every=every, settle=0.0)
    assert [line["epoch"] for line in fit.history] == list(range(1, 7))
    assert [line["epoch"] for line in fit.history if "log_evidence" in line] == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, range(14, 81, 4)),
        ({"epochs": 50}, range(7, 41, 2)),
        ({"epochs": 10}, range(2, 9)),
        ({"settle": 0.5, "every": 2}, range(12, 51, 2)),
        ({"settle": 0.5, "burn_in": 0, "every": 1}, range(1, 51)),
        ({"settle": 0.9, "burn_in": 40}, [44]),
        ({"step": "none"}, []),
    ],
    ids=["default", "shorter", "short", "half", "half, every epoch", "at least one", "map"],
)
def test_precisions_settle_at_the_end(options, expected):
    assert list(Schedule(**options).evidence_epochs()) == list(expected)


def test_a_short_run_has_an_evidence_step():
    fit = autosym.fit(mlp(5, 4, 3), draw("categorical", 12), epochs=1)
    assert "log_evidence" in fit.history[0]


def test_a_line_says_what_the_step_did():
    fit = autosym.fit(small(), images("gaussian"), "gaussian", epochs=2, burn_in=0, every=1)
    keys = {"epoch", "loss", "log_evidence", "log_likelihood", "occam", "precision", "effective_parameters", "free_share"}
    keys |= {"sigma_noise", "seconds", "steps", "little"}
    for line in fit.history:
        assert set(line) == keys
        assert line["log_evidence"] == pytest.approx(line["log_likelihood"] + line["occam"])
        assert set(line["free_share"]) == {"blocks.0", "blocks.1"}
        assert tuple(line["precision"]) == tuple(line["effective_parameters"]) == fit.prior.names
    assert fit.history[-1]["precision"] == pytest.approx(fit.prior.precision())
    assert fit.history[0]["seconds"] <= fit.history[1]["seconds"]


def test_history_is_written_as_json_lines_and_logged(tmp_path):
    logged = []
    path = tmp_path / "deep" / "history.jsonl"
    data = draw("categorical", 12)
    fit = autosym.fit(mlp(5, 4, 3), data, epochs=3, burn_in=1, every=1, history=path, log=logged.append)
    assert [json.loads(line) for line in path.read_text().splitlines()] == fit.history
    assert logged == fit.history
    assert len(logged) == 3


def test_history_is_strict_json_where_a_share_is_not_known(tmp_path):
    """NaN is no JSON; of a frozen path the evidence says nothing."""
    model, path = small(), tmp_path / "history.jsonl"
    model.blocks[0]["f-fc"].requires_grad_(False)
    fit = autosym.fit(model, images(), epochs=2, burn_in=0, every=1, history=path, progress=True)

    def refuse(constant):
        raise ValueError(f"{constant} is no JSON")

    lines = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert lines == fit.history
    assert 0 < lines[-1]["free_share"]["blocks.1"] < 1


def test_history_is_on_disk_while_the_run_goes_on(tmp_path):
    path, counts = tmp_path / "history.jsonl", []
    log = lambda line: counts.append(len(path.read_text().splitlines()))  # noqa: E731
    autosym.fit(mlp(5, 4, 3), draw("categorical", 12), epochs=3, history=path, log=log)
    assert counts == [1, 2, 3]


def test_progress_shows_loss_evidence_and_shares(capsys):
    pytest.importorskip("rich")
    autosym.fit(small(), images(), epochs=2, burn_in=0, every=1, progress=True)
    out, err = capsys.readouterr()
    assert out == "", "results alone go to stdout"
    shown = " ".join(err.split())
    assert "2/2" in shown
    for word in ("loss", "evidence"):
        assert word in shown
    assert "\x1b" not in err, "lines, not a bar that moves, where there is no terminal"
    autosym.fit(small(), images(), epochs=1, step="none")
    assert capsys.readouterr() == ("", "")


def test_progress_is_a_bar_on_a_terminal(capsys, monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("FORCE_COLOR", "1")
    autosym.fit(small(), images(), epochs=2, burn_in=0, every=1, progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "\x1b" in err
    assert "2/2" in err
    autosym.fit(small(), images(), epochs=2, burn_in=0, every=1, progress="one of several")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("one of several: expects ")
    assert [line.split("  ")[0] for line in lines[1:]] == ["one of several: epoch 1/2", "one of several: epoch 2/2"]


def test_a_schedule_may_be_given_and_changed():
    schedule = Schedule(epochs=3, step="none")
    fit = autosym.fit(mlp(5, 4, 3), draw("categorical", 12), schedule=schedule, lr=0.03)
    assert fit.schedule == Schedule(epochs=3, step="none", lr=0.03)
    assert schedule.lr == Schedule().lr
    assert len(fit.history) == 3


def test_the_rate_is_larger_in_a_short_run():
    rates = {steps: Schedule().for_steps(steps).lr for steps in (0, 100, 2000, 4000, 8000, 10**6)}
    assert rates == pytest.approx({0: 0.1, 100: 0.1, 2000: 0.1, 4000: 0.05 * 2**0.5, 8000: 0.05, 10**6: 0.05})
    for fixed in (Schedule(lr=0.03), Schedule.paper(10)):
        assert fixed.for_steps(10) is fixed
    for plain in (Schedule(optimiser="sgd"), Schedule(relative=False)):
        assert plain.for_steps(10).lr == 0.05


LR_OF_2400 = 0.05 * (8000 / 2400) ** 0.5


@pytest.mark.parametrize(("batch_size", "of_loader", "lr"), [(1, None, LR_OF_2400), (1, 12, 0.1), (12, 1, LR_OF_2400)])
def test_a_fit_takes_the_rate_of_its_number_of_steps(batch_size, of_loader, lr):
    """Of 12 samples and 200 epochs, in batches of fit or of the loader."""
    data = draw("categorical", 12)
    if of_loader:
        data = DataLoader(TensorDataset(*data), of_loader)
    fit = autosym.fit(mlp(5, 4, 3), data, epochs=200, batch_size=batch_size, step="none")
    assert fit.schedule.lr == pytest.approx(lr)


def test_the_published_schedule_by_its_name():
    fit = autosym.fit(mlp(5, 4, 3), draw("categorical", 12), schedule="paper", epochs=7, lr=0.03)
    assert fit.schedule == Schedule.paper(7, lr=0.03)
    assert (fit.schedule.optimiser, fit.schedule.step, fit.schedule.sampled, fit.schedule.batch_size) == (
        "sgd",
        "gradient",
        False,
        128,
    )
    assert [line["epoch"] for line in fit.history if "log_evidence" in line] == [5]
    assert list(Schedule.paper(1000).evidence_epochs())[:3] == [15, 20, 25]
    with pytest.raises(ValueError, match="schedule 'papers' is not known"):
        autosym.fit(mlp(5, 4, 3), draw("categorical", 12), schedule="papers")


@pytest.mark.parametrize("before", [False, True])
def test_a_deterministic_run_leaves_the_settings_as_they_were(before):
    settings, seen = (torch.are_deterministic_algorithms_enabled, lambda: torch.backends.cudnn.benchmark), []
    torch.use_deterministic_algorithms(before)
    try:
        kept = [setting() for setting in settings]
        log = lambda line: seen.append([setting() for setting in settings])  # noqa: E731
        autosym.fit(mlp(5, 4, 3), draw("categorical", 12), epochs=1, step="none", deterministic=True, log=log)
        assert seen == [[True, False]]
        assert [setting() for setting in settings] == kept
        autosym.fit(mlp(5, 4, 3), draw("categorical", 12), epochs=1, step="none", log=log)
        assert seen[1] == kept
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_deterministic_run_leaves_warnings_in_place_of_errors():
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        autosym.fit(mlp(5, 4, 3), draw("categorical", 12), epochs=1, step="none", deterministic=True)
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_precisions_start_no_higher_than_the_cap():
    """With steps too small to see. MAP obeys the precision it is given."""
    data, still = draw("categorical", 12), {"epochs": 2, "start_cap": 2.0, "trust": 1e-9}
    for given, step, expected in ((1e4, "mackay", 2.0), (0.3, "mackay", 0.3), (1e4, "none", 1e4)):
        fit = autosym.fit(mlp(5, 4, 3), data, prior_precision=given, step=step, **still)
        assert list(fit.prior.precision().values()) == pytest.approx([expected] * 4, rel=1e-6)


def test_a_fit_is_shown_in_a_line():
    fit = autosym.fit(mlp(5, 4, 3), draw("categorical", 12), epochs=2)
    value = float(fit.evidence.log_evidence)
    assert repr(fit) == f"<Fit of Sequential: log evidence {value:.1f} nats over 12 samples (categorical), 2 epochs>"


def test_a_fit_finds_out_only_once_what_is_known_of_its_model(monkeypatch):
    """Who owns which parameter, and that gradients are what paths say: before the first step, not in every evidence step."""
    from autosym.curvature import kronecker, verification
    from autosym.evidence import laplace

    counts = Counter()

    def counted(name, real):
        def call(*arguments, **options):
            counts[name] += 1
            return real(*arguments, **options)

        return call

    for module in (kronecker, verification, laplace):
        for name in ("sites", "verify"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, counted(name, getattr(module, name)))
    autosym.fit(mlp(5, 4, 3), draw("categorical", 30), epochs=3, burn_in=0, every=1)
    assert counts == {"sites": 1, "verify": 1}
