"""relax: the same function, every layer accounted for, trainable, and refusals that say what to do."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.testing import assert_close

import autosym
import oracles
from architectures import ARCHITECTURES, Functional, LeNet, Reused, built
from autosym.conversion import FREE
from autosym.evidence import laplace
from autosym.layers import Relaxed
from autosym.paths import Conv
from autosym.priors import Prior
from autosym.sites import sites
from models import EXACT, curvature, draw, exact_blocks, owned, randomised

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")

# By architecture, what is relaxed; everything else with parameters must be kept or frozen.
RELAXED = {
    "lenet": ("conv1", "conv2", "fc1"),
    "vgg": ("features.0", "features.3", "features.5", "classifier.0"),
    "resnet": ("stem.0", "layer1.conv1", "layer1.conv2", "layer2.conv1", "layer2.conv2", "layer2.downsample.0"),
    "u-net encoder": ("down1.0", "down2.0", "merge", "head"),
    "conv1d": ("encoder.0", "encoder.3", "out"),
    "grouped": ("depthwise", "pointwise", "grouped"),
    "mixer": ("patches",),
    "functional": ("conv", "layers.1", "out"),
    "sequential": ("0", "2"),
    "forms": ("0", "2", "4", "7"),
}
FROZEN = {
    "resnet": ("stem.1", "layer1.bn1", "layer1.bn2", "layer2.bn1", "layer2.bn2", "layer2.downsample.1"),
    "u-net encoder": ("down1.1", "down2.1", "up"),
    "conv1d": ("encoder.1",),
    "mixer": ("norm1", "norm2"),
    "functional": ("",),
}


def labels(count=8):
    return torch.arange(count) % 3


def parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


# ---- the same function


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("paths", [*FREE, "f-fc+fc"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_relaxed_model_computes_the_same_function(name, paths, dtype):
    model, x = built(name, dtype)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    relaxed = autosym.relax(model, x, paths)
    atol = 1e-6 if dtype == torch.float32 else 1e-12
    assert_close(relaxed(x), model(x), rtol=0, atol=atol)
    assert type(relaxed) is type(model)
    assert parameters(relaxed) > parameters(model)
    assert_close(model.state_dict(), before, rtol=0, atol=0)  # the user's own is left alone


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_layers_keep_their_names_and_every_one_is_listed(name):
    model, x = built(name)
    relaxed = autosym.relax(model, x)
    record = relaxed.relaxation
    assert record.names("relaxed") == RELAXED[name]
    assert record.names("frozen") == FROZEN.get(name, ())
    assert all(isinstance(relaxed.get_submodule(layer), Relaxed) for layer in RELAXED[name])
    with_parameters = {n for n, m in model.named_modules() if list(m.parameters(recurse=False))}
    assert {note.layer for note in record.layers} == with_parameters
    assert all(note.note for note in record.layers)
    assert all(note.layer in str(record) and note.note in str(record) for note in record.layers)
    frozen = {n for n, p in relaxed.named_parameters() if not p.requires_grad}
    assert {n.rpartition(".")[0] for n in frozen} == set(FROZEN.get(name, ()))
    keys = list(relaxed.state_dict())
    assert list(relaxed.train().state_dict()) == keys


@pytest.mark.parametrize("name", ["resnet", "conv1d"])
def test_folded_normalisation(name):
    model, x = built(name, torch.float64)
    relaxed = autosym.relax(model, x, fold=True)
    assert_close(relaxed(x), model(x), rtol=0, atol=1e-12)
    assert relaxed.relaxation.names("folded") == FROZEN[name]
    assert relaxed.relaxation.names("relaxed") == RELAXED[name]
    assert all(p.requires_grad for p in relaxed.parameters())
    assert not [m for m in relaxed.modules() if isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d))]


def test_normalisation_that_does_not_follow_a_layer_directly_is_not_folded():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 2)).eval()
    relaxed = autosym.relax(model, torch.randn(2, 1, 6, 6), fold=True)
    assert relaxed.relaxation.names("folded") == ()
    assert relaxed.relaxation.names("frozen") == ("2",)


class Peeking(nn.Module):
    """The output of a convolution is used before its normalisation too."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(8, 2)

    def forward(self, x):
        y = self.conv(x)
        return self.out(torch.cat([y.mean((2, 3)), self.norm(y).relu().mean((2, 3))], 1))


def test_folding_that_would_change_the_function_is_refused():
    model = Peeking()
    model(torch.randn(16, 1, 6, 6) + 2)
    x = torch.randn(4, 1, 6, 6)
    with pytest.raises(ValueError, match="computes another function: with fold=True"):
        autosym.relax(model.eval(), x, fold=True)
    assert_close(autosym.relax(model, x)(x), model(x))


@pytest.mark.parametrize(
    ("conv", "note"),
    [
        (nn.Conv2d(1, 4, 3, padding=1, padding_mode="circular"), "symmetry exact"),
        (nn.Conv2d(1, 4, 1), "symmetry exact"),
        (nn.Conv2d(1, 4, 1, padding=2), "symmetry approximate at the borders"),
        (nn.Conv2d(1, 4, 1, padding=2, padding_mode="circular"), "symmetry approximate at the borders"),
        (nn.Conv2d(1, 4, 3, padding=1), "symmetry approximate at the borders"),
        (nn.Conv2d(1, 4, 3), "symmetry approximate at the borders"),
        (nn.Conv2d(1, 4, 3, padding=2, padding_mode="circular"), "symmetry approximate at the borders"),
        (nn.Conv2d(1, 4, 3, 2, 1, padding_mode="circular"), "symmetry approximate between shifts of the stride 2"),
        (nn.Conv2d(1, 4, 3, (1, 3), 1), "symmetry approximate at the borders and between shifts of the stride 3"),
    ],
)
def test_the_summary_says_where_the_symmetry_is_approximate(conv, note):
    model = nn.Sequential(conv, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    assert autosym.relax(model, torch.randn(2, 1, 6, 6)).relaxation.layers[0].note == note


def test_the_pool_path_holds_the_invariant_part_of_a_dense_layer():
    model, x = built("lenet", torch.float64)
    layer = autosym.relax(model, x).fc1
    weight = model.fc1.weight.detach().reshape(12, 6, 4)
    mean = weight.mean(2, keepdim=True)
    assert_close(layer["pool"].linear.weight[0] / 2, 4 * mean[..., 0])
    assert_close(layer["fc"].weight[0] / 2, (weight - mean).flatten(1))
    assert_close(layer["pool"].bias.weight[0, :, 0] / 2, model.fc1.bias)


@pytest.mark.parametrize(
    ("change", "channels", "pooled"),
    [
        (lambda y: y, 6, True),
        (lambda y: y.permute(0, 2, 3, 1), 6, False),
        (lambda y: y.permute(0, 2, 3, 1).contiguous(), 6, False),
        (lambda y: y.transpose(1, 3), 6, False),
        (lambda y: y.mT.movedim(1, -1), 6, False),
        (lambda y: torch.einsum("bchw->bwch", y), 6, False),
        (lambda y: y.permute(0, 2, 3, 1), 4, False),
        (lambda y: y.transpose(2, 3), 4, True),
        (lambda y: y.to(memory_format=torch.channels_last).relu(), 6, True),
    ],
    ids=["as it is", "channels last", "copied", "transposed", "mT", "einsum", "other channels", "only positions", "in memory"],
)
def test_maps_whose_channels_are_not_known_get_no_pool(change, channels, pooled):
    """Six channels on maps of 6 x 6, which a shape does not tell apart; four it does."""

    class Changed(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.head = nn.Conv2d(1, channels, 3, padding=1), nn.Linear(channels * 36, 3)

        def forward(self, x):
            return self.head(change(self.conv(x)).flatten(1))

    record = autosym.relax(Changed(), torch.randn(2, 1, 6, 6)).relaxation
    assert record.names("relaxed") == (("conv", "head") if pooled else ("conv",))


def test_tokens_are_not_taken_for_maps():
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.out = nn.Linear(4, 6), nn.Linear(30, 2)

        def forward(self, x):
            return self.out(self.embed(x).flatten(1))

    record = autosym.relax(Tokens(), torch.randn(2, 5, 4)).relaxation
    assert record.names("kept") == ("embed", "out")


# ---- choosing layers


def test_paths_by_name_and_keep():
    model, x = built("vgg")
    record = autosym.relax(model, x, {"features.3": "fc", "features.5": "s-fc+f-fc"}).relaxation
    assert {n.layer: n.paths for n in record.layers if n.paths} == {
        "features.3": ("conv", "fc"),
        "features.5": ("conv", "s-fc", "f-fc"),
    }
    record = autosym.relax(model, x, keep=["features.0", "classifier"]).relaxation
    assert record.names("relaxed") == ("features.3", "features.5")
    assert record.names("kept") == ("features.0", "classifier.0", "classifier.3")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": ["features.9"]}, "no module, or none to relax, features.9: its layers are features.0, features.3"),
        ({"paths": {"conv9": "fc"}}, "none to relax, conv9"),
        ({"paths": {"features": "fc"}}, "none to relax, features:"),
        ({"paths": {"features.0": "fc"}, "keep": ["features"]}, "features.0 .Conv2d. cannot be relaxed: named in keep"),
        ({"paths": "conv"}, "features.0 .Conv2d. cannot have the paths 'conv'"),
        ({"paths": "fc+fc"}, "cannot have the paths 'fc.fc'"),
        ({"paths": {"classifier.0": "fc"}}, "classifier.0 .Linear. cannot have the paths 'fc'"),
        ({"paths": {"classifier.3": "pool"}}, "classifier.3 .Linear. cannot be relaxed: a dense map has no symmetry"),
    ],
)
def test_choices_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        autosym.relax(*built("vgg"), **options)


def test_layers_frozen_by_the_user_and_unused_ones_stay_so():
    model, x = built("vgg")
    model.features[0].requires_grad_(False)
    model.features[3].bias.requires_grad_(False)
    model.spare = nn.Conv2d(1, 1, 3)
    record = autosym.relax(model, x).relaxation
    notes = {n.layer: n.note for n in record.layers if n.outcome == "frozen"}
    assert notes["features.0"] == "frozen in the model given"
    assert ("features.3", "partly frozen in the model given") in [(n.layer, n.note) for n in record.layers]
    assert "took no part" in notes["spare"]


def test_a_map_of_one_position_and_one_that_is_too_large_are_kept(monkeypatch):
    model = nn.Sequential(nn.Conv2d(1, 4, 6), nn.Conv2d(4, 4, 1), nn.Flatten(), nn.Linear(4, 2))
    assert autosym.relax(model, torch.randn(2, 1, 6, 6)).relaxation.names("relaxed") == ()
    monkeypatch.setattr("autosym.conversion.LARGEST_FACTORS", 100_000)
    model, x = built("lenet")
    record = autosym.relax(model, x).relaxation
    assert record.names("relaxed") == ("conv2", "fc1")
    assert "GiB" in next(n.note for n in record.layers if n.layer == "conv1")


def test_a_layer_that_folds_samples_into_its_batch_is_frozen():
    class Frames(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.out = nn.Conv2d(1, 4, 3), nn.Linear(4, 2)

        def forward(self, x):
            return self.out(self.conv(x.flatten(0, 1)).mean((2, 3)).unflatten(0, (len(x), -1)).mean(1))

    record = autosym.relax(Frames(), torch.randn(2, 3, 1, 6, 6)).relaxation
    assert record.names("frozen") == ("conv",)
    assert record.names("kept") == ("out",)


class Attending(nn.Module):
    """Patches, a position embedding, a layer of attention."""

    def __init__(self):
        super().__init__()
        self.conv, self.position = nn.Conv2d(1, 8, 2, 2), nn.Parameter(torch.randn(9, 8))
        self.encoder, self.out = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        return self.out(self.encoder(self.conv(x).flatten(2).mT + self.position).mean(1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.rnn, self.out = nn.Conv2d(1, 8, (3, 6)), nn.LSTM(8, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x):
        return self.out(self.rnn(self.conv(x)[..., 0].mT)[0][:, -1])


class Own(nn.Conv2d):
    """A subclass, which may compute anything."""


@pytest.mark.parametrize(
    ("make", "frozen"),
    [
        (Attending, ("", "encoder.self_attn", "encoder.self_attn.out_proj", "encoder.norm1", "encoder.norm2")),
        (Recurrent, ("rnn",)),
        (lambda: nn.Sequential(Own(1, 4, 3), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(16, 3)), ("0",)),
    ],
    ids=["attention", "recurrent", "subclass"],
)
def test_layers_that_the_evidence_does_not_cover_are_frozen_and_the_rest_is_fitted(make, frozen):
    x = torch.randn(8, 1, 6, 6)
    model = make().eval()
    relaxed = autosym.relax(model, x)
    assert relaxed.relaxation.names("frozen") == frozen
    assert relaxed.relaxation.names("relaxed")
    assert_close(relaxed(x), model(x))
    before = {n: p.clone() for n, p in relaxed.named_parameters() if not p.requires_grad}
    assert autosym.fit(relaxed, (x, labels()), epochs=1).evidence.log_evidence.isfinite()
    assert all(torch.equal(relaxed.get_parameter(name), value) for name, value in before.items())


# ---- refusals


def refused(message, model, x, **options):
    with pytest.raises(ValueError, match=message):
        autosym.relax(model, x, **options)


def test_a_reused_layer_is_refused_or_kept_frozen():
    model, x = Reused(), torch.randn(2, 1, 6, 6)
    refused("again .Conv2d. is used 2 times", model, x)
    relaxed = autosym.relax(model, x, keep=["again"])
    assert relaxed.relaxation.names("frozen") == ("again",)
    autosym.fit(relaxed, (torch.randn(8, 1, 6, 6), labels()), epochs=1)


def test_train_mode_says_how_to_proceed():
    model, x = built("resnet")
    refused(r"BatchNorm2d.*model\.eval\(\)", model.train(), x)
    model, x = built("vgg")
    refused(r"Dropout.*model\.eval\(\)", model.train(), x)


def test_parametrised_tied_lazy_half_and_quantised_models():
    model, x = built("lenet")
    parametrizations.weight_norm(model.conv1)
    refused("conv1 .* is parametrised .*remove_parametrizations", model, x)
    model, x = built("lenet")
    parametrizations.spectral_norm(model.fc1)
    refused("fc1 .* is parametrised", model, x)
    model, x = built("lenet")
    with pytest.warns(FutureWarning, match="weight_norm"):
        nn.utils.weight_norm(model.conv2)
    refused("conv2 .Conv2d. is parametrised", model, x)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    refused("1.weight and 0.weight are the same parameter", model, torch.randn(2, 4))
    refused("1 .LazyLinear. has no weights yet", nn.Sequential(nn.Flatten(), nn.LazyLinear(2)), torch.randn(2, 4))
    model, x = built("lenet")
    refused("conv1.weight is torch.bfloat16.*float", model.bfloat16(), x)
    model = nn.Sequential(nn.Linear(2, 2), torch.ao.nn.quantized.Linear(2, 2))
    refused("1 .Linear. is quantised", model, torch.randn(2, 2))


def test_outputs_examples_and_models_that_do_not_suit():
    refused("must return .B, outputs.", nn.Conv2d(1, 2, 3), torch.randn(2, 1, 6, 6))
    refused("must return .B, outputs.", nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten()), torch.randn(1, 6, 6))
    refused("one tensor of floating point", LeNet(), torch.zeros(2, 1, 16, 16, dtype=torch.uint8))
    refused("example is empty", LeNet(), torch.zeros(0, 1, 16, 16))
    refused("one tensor of floating point", nn.Linear(4, 2), torch.zeros(4))
    refused("is example a batch, and not one sample", nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(0)), torch.randn(1, 6, 6))
    with pytest.raises(TypeError, match="the model is a int"):
        autosym.relax(3, torch.zeros(2, 3))
    with pytest.raises(TypeError, match="paths is None: name the free path"):
        autosym.relax(LeNet(), torch.zeros(2, 1, 16, 16), paths=None)
    refused("not finite", LeNet(), torch.full((2, 1, 16, 16), math.nan))
    refused("no parameters", nn.Flatten(), torch.randn(2, 3))
    refused("no layer is left to fit", nn.Sequential(nn.LayerNorm(4)), torch.randn(2, 4))
    model, x = built("lenet")
    refused("relax the plain model", autosym.relax(model, x), x)


def test_forward_that_reads_a_layer():
    class Reading(LeNet):
        def forward(self, x):
            return super().forward(x.to(self.conv1.weight.dtype))

    refused("cannot run .AttributeError.*keep", Reading(), torch.randn(2, 1, 16, 16))
    assert autosym.relax(Reading(), torch.randn(2, 1, 16, 16), keep="conv1").relaxation.names("kept") == ("conv1", "fc2")


def test_forward_that_calls_a_layer_by_a_name_that_is_not_seen():
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.out = nn.Conv2d(1, 4, 3), nn.Linear(4, 2)
            self.order = [self.conv]

        def forward(self, x):
            return self.out(self.order[0](x).mean((2, 3)))

    refused("conv was relaxed, but forward.. does not call it", Hidden(), torch.randn(2, 1, 6, 6))


def test_a_weight_that_is_used_outside_of_its_layer():
    class Twice(LeNet):
        def forward(self, x):
            return super().forward(x) + F.linear(torch.ones(len(x), 12), self.fc2.weight)

    refused("gradient of fc2.weight is not what", Twice(), torch.randn(2, 1, 16, 16))


# ---- curvature, evidence and training


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_curvature_and_evidence_are_finite_and_an_epoch_trains(name):
    model, x = built(name)
    relaxed = autosym.relax(model, x)
    at = laplace.at(relaxed, (x, labels()))
    assert torch.isfinite(at(Prior(at.names)).log_evidence)
    zero = {n: p for n, p in relaxed.named_parameters() if p.requires_grad and not p.any()}
    assert any("theta_1" in n for n in zero)
    fit = autosym.fit(relaxed, (x, labels()), epochs=1, batch_size=4, warmup=0.0)
    assert fit.evidence.log_evidence.isfinite()
    assert (relaxed(x) - model(x)).abs().max() > 1e-4
    assert all(p.abs().max() > 0 for n, p in zero.items() if "theta_1" in n)
    assert {p.layer for p in fit.symmetry()} == set(RELAXED[name])


def relaxed_net(seed=0):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    x = torch.randn(48, 1, 6, 6)
    return autosym.relax(net, x[:4]), (x, (x[:, 0, 0, 0] > 0).long())


@pytest.mark.parametrize("step", ["mackay", "gradient"])
def test_precisions_are_held_through_burn_in(step):
    model, data = relaxed_net()
    seen = []
    fit = autosym.fit(model, data, epochs=6, burn_in=4, every=1, settle=0.0, step=step, log=seen.append, batch_size=12)
    assert [line["epoch"] for line in seen if "precision" in line] == [5, 6]
    assert fit.prior.precision()["0.f-fc.theta_1"] != 1.0
    model, data = relaxed_net()
    fit = autosym.fit(model, data, epochs=4, step="none", batch_size=12)  # the same epochs, without an evidence step
    assert set(fit.prior.precision().values()) == {1.0}


def test_a_closed_form_step_leaves_a_factor_that_is_still_zero_alone():
    model, data = relaxed_net()
    at = laplace.at(model, data)
    prior = Prior(at.names)
    at.mackay(prior)
    moved = {name for name, delta in prior.precision().items() if delta != 1.0}
    assert {n for n in at.names if n.startswith("0.f-fc.")}.isdisjoint(moved)  # theta_2 has no gamma yet, theta_1 no weights
    assert "0.conv.linear" in moved


@pytest.mark.parametrize("scale", [1.0, 0.01])
@pytest.mark.parametrize(("paths", "factor"), [("f-fc", "theta_1"), ("fc", "linear"), ("s-fc", "u_1")])
def test_a_factor_that_starts_at_zero_steps_in_the_size_that_matches_the_convolution(paths, factor, scale):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    model[0].weight.data.mul_(scale)
    x = torch.randn(8, 3, 6, 6)
    relaxed = autosym.relax(model, x, paths)
    path = relaxed[0][paths]
    weight, size = path.get_submodule(factor).weight, path.get_submodule(factor).start_size
    fit = autosym.fit(relaxed, (x, labels()), epochs=1, step="none", lr=0.01, warmup=0.0, prior_precision=1e-6)
    assert float(weight.detach().abs().median()) == pytest.approx(0.01 * size, rel=0.05)  # Adam's first step is the rate
    with torch.no_grad():
        weight.normal_(0, size)
        for bias in ("b_1", "b_2", "bias"):
            if hasattr(path, bias):
                path.get_submodule(bias).weight.zero_()
        free, symmetric = path(x), 2 * F.conv2d(x, model[0].weight)
    assert float(free.std() / symmetric.std()) == pytest.approx(1.0, rel=0.25)
    assert fit.model is relaxed


# ---- Conv1d in the evidence


FORMS = [
    {},
    {"stride": 2, "padding": 1},
    {"dilation": 2, "padding": "same"},
    {"groups": 2},
    {"padding": 2, "padding_mode": "circular"},
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_plain_conv1d_is_read_as_a_convolution_of_one_row(form):
    torch.manual_seed(0)
    line = nn.Sequential(nn.Conv1d(4, 6, 3, **form), nn.Tanh(), nn.Flatten(), nn.LazyLinear(3))
    line(torch.randn(1, 4, 9))
    line = randomised(line)
    x, y = draw("categorical", 5, (4, 9))
    found = curvature(line, (x, y))
    (site,) = [s for s in sites(line) if s.name == "0.weight"]
    path = site.path(x, line[0](x))
    assert isinstance(path, Conv)
    own = Conv(*_arguments(path), sequences=True).double()
    own.weight.data = line[0].weight.detach().reshape(own.weight.shape)
    assert_close(own(x) + line[0].bias[:, None], line[0](x), **EXACT)
    roots = _cotangents(line, x)
    A, G = oracles.expand_factors(path, x[:, :, None], roots[:, :, :, None])
    assert_close(found.factors["0.weight"].A, A, **EXACT)
    assert_close(found.factors["0.weight"].G, G, **EXACT)


def _arguments(path):
    out = path.weight.shape[0] * path.weight.shape[1]
    return path.in_channels, out, path.kernel_size, path.stride, path.padding, path.dilation, path.groups, path.padding_mode


def _cotangents(model, x):
    """Of the output of the first layer, for every column of the output Hessian's root: (N, columns, C', L')."""
    h = model[0](x).detach().requires_grad_()
    f = model[1:](h)
    p = f.softmax(-1)
    root = torch.diag_embed(p.sqrt()) - p[:, :, None] * p.sqrt()[:, None, :]
    return torch.stack([torch.autograd.grad(f, h, root[..., c], retain_graph=True)[0] for c in range(f.shape[1])], 1).detach()


@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
def test_a_conv1d_of_one_position_is_exact(likelihood):
    model = randomised(nn.Sequential(nn.Conv1d(2, 4, 5), nn.Tanh(), nn.Flatten(), nn.Linear(4, 3)))
    x, y = draw(likelihood, 1, (2, 5))
    found = curvature(model, (x, y), likelihood)
    for path, parameter in owned(model):
        exact = exact_blocks(model, parameter, x, y, likelihood, 1)
        assert_close(oracles.kron_blocks(found, path), exact, **EXACT)


def test_the_relaxed_model_is_a_copy_that_can_be_copied():
    model, x = built("functional")
    relaxed = autosym.relax(model, x)
    assert relaxed.conv is relaxed.layers[0]  # under both of its names
    again = copy.deepcopy(relaxed)
    assert_close(again(x), relaxed(x))
    assert isinstance(again, Functional)
    assert again.relaxation == relaxed.relaxation
