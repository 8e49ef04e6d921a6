"""relax: the same function, and every layer accounted for."""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import autosym
from architectures import ARCHITECTURES, FROZEN, RELAXED, Functional, built, labels
from autosym.nn.layers import Relaxed
from autosym.surgery import relaxing
from autosym.surgery.free_paths import FREE


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


@pytest.mark.parametrize(("dtype", "same", "other"), [(torch.float32, 1e-6, 1e-3), (torch.float64, 1e-15, 1e-9)])
def test_functions_are_compared_as_their_precision_allows(dtype, same, other, monkeypatch):
    model, x = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(64, 2)).to(dtype), torch.randn(4, 1, 6, 6, dtype=dtype)
    real = relaxing._with
    monkeypatch.setattr(relaxing, "_with", lambda path, weight, *more, **how: real(path, (1 + change) * weight, *more, **how))
    change = same
    autosym.relax(model, x)
    change = other
    with pytest.raises(ValueError, match="computes another function"):
        autosym.relax(model, x)


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
        (
            nn.Conv2d(1, 4, 3, 4, 1, padding_mode="circular"),  # which 6 is no multiple of
            "symmetry approximate at the borders and between shifts of the stride 4",
        ),
    ],
)
def test_the_summary_says_where_the_symmetry_is_approximate(conv, note):
    model, x = nn.Sequential(conv, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)), torch.randn(2, 1, 6, 6)
    assert autosym.relax(model, x).relaxation.layers[0].note == note
    by_the_stride = torch.allclose(conv(x.roll(conv.stride, (2, 3))), conv(x).roll((1, 1), (2, 3)), atol=1e-5)
    assert by_the_stride == ("borders" not in note)


def test_the_pool_path_holds_the_invariant_part_of_a_dense_layer():
    model, x = built("lenet", torch.float64)
    layer = autosym.relax(model, x).fc1
    weight = model.fc1.weight.detach().reshape(12, 6, 4)
    mean = weight.mean(2, keepdim=True)
    assert_close(layer["pool"].linear.weight[0] / 2, 4 * mean[..., 0])
    assert_close(layer["rest"].weight[0] / 2, (weight - mean).flatten(1))
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


class Dense(nn.Module):
    """A dense layer on what ``flat`` makes of images, or of maps of a convolution."""

    def __init__(self, flat, convolved, positions=36):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1) if convolved else nn.Identity()
        self.flat, self.out = flat, nn.Linear((4 if convolved else 1) * positions, 3)

    def forward(self, x):
        return self.out(self.flat(self.conv(x)))


@pytest.mark.parametrize(("channels", "outcome"), [(4, "relaxed"), (6, "kept")])
def test_channels_last_are_known_if_no_other_axis_is_as_long(channels, outcome):
    model = nn.Sequential(nn.Conv2d(1, channels, 3, padding=1), Last(), nn.Linear(channels, 3), Mean())
    assert autosym.relax(model, torch.randn(2, 1, 6, 6)).relaxation.layers[-1].outcome == outcome


class Last(nn.Module):
    def forward(self, x):
        return x.permute(0, 2, 3, 1)


class Mean(nn.Module):
    def forward(self, x):
        return x.mean((1, 2))


@pytest.mark.parametrize(
    ("model", "note"),
    [
        (Dense(lambda x: x.view(len(x), -1), True), "invariant part and the rest"),
        (Dense(lambda x: x.mean((2, 3)), True, 1), "relax saw no maps flattened just before it"),
        (Dense(lambda x: x.flatten(1).relu(), True), "relax saw no maps flattened just before it"),
        (Dense(lambda x: x.flatten(2).flatten(1), True), "of flattened (4, 36), not known to be the maps of a convolution"),
        (Dense(lambda x: x.permute(0, 2, 3, 1).flatten(1), True), "of flattened (6, 6, 4), not known"),
        (Dense(lambda x: x.view(len(x), -1), False), "of flattened (1, 6, 6) has no symmetry to relax: no convolution comes"),
        (Dense(nn.Flatten(), False), "of flattened (1, 6, 6) has no symmetry to relax: no convolution comes before it"),
        (Dense(lambda x: x[:, 0, 0], False, 6), "relax saw no maps flattened just before it"),
    ],
)
def test_what_is_said_of_a_dense_layer_is_true(model, note):
    assert note in autosym.relax(model, torch.randn(2, 1, 6, 6)).relaxation.layers[-1].note


def test_a_dense_layer_that_is_shared_over_positions_is_not_said_to_have_no_symmetry():
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(15, 2))
    shared, head = autosym.relax(model, torch.randn(2, 5, 4)).relaxation.layers
    assert (
        shared.note == "acts on the last axis, the same at all 5 positions of the other axes: relax has no free path for that"
    )
    assert "of flattened (5, 3) has no symmetry to relax" in head.note


def test_a_network_without_convolutions_is_told_what_to_do_and_not_to_relax_again():
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 3))
    x = torch.randn(8, 1, 6, 6)
    relaxed = autosym.relax(model, x)
    for text in (str(relaxed.relaxation), str(autosym.fit(relaxed, (x, labels()), epochs=1).symmetry())):
        assert "with convolutions, or build one" in text
        assert "autosym.relax(model, example)" not in text
    assert "autosym.relax(model, example)" in str(autosym.fit(model, (x, labels()), epochs=1).symmetry()), "the control"
    whole = nn.Sequential(nn.Conv2d(1, 4, 6), nn.Flatten(), nn.Linear(4, 3))
    assert str(autosym.relax(whole, x).relaxation).endswith("No layer was relaxed, for the reasons given.")
    assert "No layer was relaxed" not in str(autosym.relax(*built("lenet")).relaxation)


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
        ({"keep": ["features.9"]}, "no such module, or not one to relax: features.9; its layers are features.0, features.3"),
        ({"paths": {"conv9": "fc"}}, "not one to relax: conv9"),
        ({"paths": {"features": "fc"}}, "not one to relax: features;"),
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
    assert notes["features.0"] == "frozen in the given model"
    assert ("features.3", "partly frozen in the given model") in [(n.layer, n.note) for n in record.layers]
    assert "took no part" in notes["spare"]


def test_a_map_of_one_position_and_one_that_is_too_large_are_kept(monkeypatch):
    model = nn.Sequential(nn.Conv2d(1, 4, 6), nn.Conv2d(4, 4, 1), nn.Flatten(), nn.Linear(4, 2))
    assert autosym.relax(model, torch.randn(2, 1, 6, 6)).relaxation.names("relaxed") == ()
    monkeypatch.setattr("autosym.surgery.relaxing.LARGEST_FACTORS", 100_000)
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
    """A subclass that is no convolution."""

    def forward(self, x):
        return super().forward(x).abs()


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


def test_the_relaxed_model_is_a_copy_that_can_be_copied():
    model, x = built("functional")
    relaxed = autosym.relax(model, x)
    assert relaxed.conv is relaxed.layers[0]  # under both of its names
    again = copy.deepcopy(relaxed)
    assert_close(again(x), relaxed(x))
    assert isinstance(again, Functional)
    assert again.relaxation == relaxed.relaxation
