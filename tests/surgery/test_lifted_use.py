"""Lifted networks as users handle them: copied, stored, moved to another type or device, trained, and the whole way to plain layers."""

import copy
import io
import math
import pickle

import pytest
import torch

import autosym
from autosym.evidence import verdicts
from autosym.evidence.shares import PathShare
from autosym.linear import circular, grids
from autosym.linear.groups import GROUPS
from autosym.linear.path import Kept, Path
from autosym.nn.layers import Relaxed
from autosym.report import findings, words
from autosym.surgery import chains
from liftable import LIFTABLE, built, noisy

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
LABELS = torch.arange(4) % 3


def lifted_forms(name, group, paths="where"):
    """The given model, images, and what lift, relax and harden make of it."""
    model, x = built(name, torch.float32)
    lifted = noisy(autosym.lift(model, x, group))
    relaxed = noisy(autosym.relax(lifted, x, paths))
    return model, x, {"lifted": lifted, "relaxed": relaxed, "hardened": autosym.harden(relaxed, (x, LABELS), tolerance=0)}


def stored(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("group", ["c4", "translations"])
@pytest.mark.parametrize("name", ["tutorial", "resnet", "excited", "separable", "grouped"])
def test_every_form_is_copied_stored_and_converted(name, group):
    model, x, forms = lifted_forms(name, group)
    for form in forms.values():
        with torch.no_grad():
            y = form(x)
            for again in (copy.deepcopy(form), pickle.loads(pickle.dumps(form)), stored(form)):
                torch.testing.assert_close(again(x), y, rtol=0, atol=0)
            torch.testing.assert_close(form(x[:1]), y[:1], rtol=1e-4, atol=1e-5)
            double = copy.deepcopy(form).to(torch.float64)
            torch.testing.assert_close(double(x.double()).float(), y, rtol=1e-3, atol=1e-4)
    again = autosym.lift(model, x, group)
    for form in (again, autosym.relax(again, x, "where")):
        kind = "relaxed" if hasattr(form, "relaxation") else "lifted"
        form.load_state_dict(forms[kind].state_dict())
        torch.testing.assert_close(form(x), forms[kind](x), rtol=0, atol=0)


@pytest.mark.parametrize("form", ["lifted", "relaxed", "hardened"])
def test_a_step_in_training_mode_moves_statistics_and_keeps_the_group(form):
    _, x, forms = lifted_forms("resnet", "c4")
    model = forms[form].train()
    before = {name: buffer.clone() for name, buffer in model.named_buffers() if name.endswith("running_mean")}
    model(x).square().mean().backward()
    assert before
    assert all(not torch.equal(model.get_buffer(name), old) for name, old in before.items())
    model.eval()
    if form == "lifted":
        autosym.assert_equivariant(model, "c4", x, 1e-4)


# ---- devices


def on_meta(model):
    """The model on a device where mixing with tensors of the CPU is an error, as on a GPU."""
    moved = copy.deepcopy(model).to("meta")
    seen: dict[Path, tuple] = {}
    for module in moved.modules():
        assert not any(isinstance(value, torch.Tensor) for value in vars(module).values()), "a tensor that .to() does not move"
        if isinstance(module, Path):
            module.register_forward_hook(lambda module, args, y: seen.__setitem__(module, (args[0], y)))
    return moved, seen


@pytest.mark.parametrize("group", ["c4", "translations"])
@pytest.mark.parametrize("name", ["tutorial", "resnet", "separable", "grouped"])
def test_no_tensor_stays_behind_when_a_network_moves(name, group, monkeypatch):
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: False)  # which knows no device of this name
    _, x, forms = lifted_forms(name, group)
    for form in forms.values():
        moved, seen = on_meta(form)
        y = moved(x.to("meta"))
        y.sum().backward()
        with torch.no_grad():
            found = [t for path, (a, b) in seen.items() for t in (path.columns(a), path.rows(b), path.gram(a))]
        assert {t.device.type for t in (y, *found)} == {"meta"}
        assert seen or form is not forms["relaxed"]


@pytest.mark.parametrize("group", ["c4", "translations"])
@pytest.mark.parametrize("name", ["tutorial", "resnet", "separable"])
def test_networks_are_made_on_the_device_of_the_given_one(name, group):
    """Whatever the default device: a tensor that is made there by mistake has no values."""
    model, x = built(name)
    with torch.device("meta"):
        lifted = autosym.lift(model, x, group)
        relaxed = autosym.relax(lifted, x, "where", fold=True)
        plain = autosym.harden(relaxed, (x, LABELS))
        error = autosym.equivariance_error(lifted, "c4", x).output()["c4"]
    assert {p.device.type for form in (lifted, relaxed, plain) for p in form.parameters()} == {"cpu"}
    torch.testing.assert_close(plain(x), lifted(x), rtol=0, atol=1e-11)
    assert (error < 1e-11) == (group == "c4")


def test_positions_that_are_first_met_in_inference_mode_serve_training_on_any_device():
    cpu = torch.device("cpu")
    with torch.inference_mode(), torch.device("meta"):
        kept = [grids._grids(22, 26, 2, cpu), grids._starts(22, 26, 2, cpu, (1, 1), 1)]
        kept += [circular._around((22, 26), (1, 1), cpu), circular._lags((22, 26), (3, 3), cpu)]
    assert not any(positions.is_inference() or positions.is_meta for positions in kept)


@gpu
@pytest.mark.parametrize("group", ["c4", "d4", "translations"])
@pytest.mark.parametrize("name", LIFTABLE)
def test_lifted_networks_on_a_gpu(name, group):
    """Lift, relax, one evidence and harden on the device give what they give on the CPU."""
    if (name, group) == ("odd", "translations"):
        pytest.skip("no polyphase grids of stride 2 on 15x15")
    model, x = built(name)
    x = x[..., :8, :8] if (name, group) == ("subclasses", "translations") else x  # as 9x9 has no such grids either
    torch.manual_seed(3)
    lifted = noisy(autosym.lift(model.cuda(), x.cuda(), group))
    autosym.assert_equivariant(lifted, group, x.cuda(), 1e-10)
    relaxed = autosym.relax(lifted, x.cuda(), "where", fold=name != "dense")
    data = x.cuda(), LABELS.cuda()
    found = float(autosym.log_evidence(relaxed, data))
    plain = autosym.harden(relaxed, data)
    assert {t.device.type for form in (lifted, relaxed, plain) for t in form.state_dict().values()} == {"cuda"}
    torch.testing.assert_close(plain(x.cuda()), lifted(x.cuda()), rtol=0, atol=1e-10)
    here = copy.deepcopy(relaxed).cpu()
    assert float(autosym.log_evidence(here, (x, LABELS))) == pytest.approx(found, rel=1e-6)


@gpu
@pytest.mark.filterwarnings("ignore:.*evidence.*")
def test_a_lifted_network_is_trained_on_a_gpu_as_a_recorded_step():
    """A step that cannot be recorded as a CUDA graph warns, which is an error here."""
    model, x = built("resnet", torch.float32)
    data = torch.randn(48, *x.shape[1:]).cuda(), (torch.arange(48) % 3).cuda()
    lifted = autosym.lift(model.cuda(), x.cuda(), "c4", padding="circular")
    fit = autosym.fit(autosym.relax(lifted, x.cuda(), "where"), data, epochs=6, batch_size=8)
    assert next(fit.model.parameters()).is_cuda


# ---- the whole way


def lines(samples, side, channels):
    """Lines across noise: which way do they run? Half turns and mirrors leave the answer, quarter turns do not."""
    noise, y = 0.2 * torch.randn(samples, channels, side, side), torch.arange(samples) % 2
    across = torch.eye(side)[torch.randint(side, (samples,))][:, None, None].expand(-1, -1, side, -1)
    return noise + torch.where(y[:, None, None, None] == 1, across, across.mT), y


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*evidence.*")
@pytest.mark.parametrize(
    ("name", "group", "match"),
    [("tutorial", "c4", "channels"), ("resnet", "c2", "parameters"), ("separable", "flip-vertical", "channels")],
)
def test_from_a_plain_network_to_a_plain_network(name, group, match):
    torch.manual_seed(0)
    make, shape = LIFTABLE[name]
    x, y = lines(60, shape[1], shape[0])
    lifted = autosym.lift(make().eval(), x[:4], group, match, padding="circular")
    first = autosym.fit(lifted, (x, y), epochs=2, seed=0)
    autosym.assert_equivariant(first.model, group, x[:8], 1e-4)
    assert set(first.symmetry().broken_share(group).values()) == {0.0}
    relaxed = autosym.relax(first.model, x[:4], "where")
    fit = autosym.fit(relaxed, (x, y), epochs=2, seed=0)
    table = fit.symmetry()
    steps = {path.path for path in table if path.path.startswith("turn:")}
    assert steps == {f"turn:{step.name}" for step, _ in chains.chain(GROUPS[group])}
    (head,) = (path.layer for path in table if path.path == "pool")
    for layer in dict.fromkeys(path.layer for path in table):
        told = {path.path: table._kind(path) for path in table if path.layer == layer}
        assert {step: told[step] for step in steps} == {step: f"breaks {step.removeprefix('turn:')}" for step in steps}
    simple = autosym.simplify(fit, (x, y), curvature="kronecker")
    priced = {row.path for row in simple.model.simplification.paths if row.layer == head}
    assert priced == {path.path for path in table if path.layer == head and not math.isnan(path.share)} - {"pool"}
    assert words.headline(findings.decided(findings.contents(fit, (x, y))))
    plain = autosym.harden(simple, (x, y))
    assert not any(isinstance(module, (Relaxed, Path)) for module in plain.modules())
    exported = torch.export.export(plain, (x[:4],), dynamic_shapes=({0: torch.export.Dim("batch")},)).module()
    torch.testing.assert_close(exported(x[:7]), plain(x[:7]), rtol=1e-4, atol=1e-5)


def test_words_call_a_head_invariant():
    def share(name, part, kept):
        return PathShare("head", name, True, {}, 10, 10 * part, part, {}, kept)

    pool, c2 = Kept(invariant=True, groups=("c4", "c2"), every=True), Kept(invariant=True, groups=("c2",))
    for shares, said in (
        ((1.0, 0.0, 0.0), "became invariant to translations and c4"),
        ((0.5, 0.5, 0.0), "became invariant to translations and c2, not to c4 (50 % break c4)"),
        ((0.5, 0.0, 0.5), "is invariant to translations, not to c4 or c2 (50 % break c4, 50 % break c2)"),
    ):
        rows = [
            share(*row) for row in zip(("pool", "turn:c4", "turn:c2"), shares, (pool, c2, Kept(invariant=True)), strict=True)
        ]
        assert words.predicate(verdicts.layers(rows)) == said
