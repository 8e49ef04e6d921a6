"""relax and harden with waves of position, from fit to report."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import autosym
from architectures import ARCHITECTURES, assert_plain, built, labels, relaxed, shaken
from autosym.linear.where import Where
from autosym.nn import nets
from autosym.nn.layers import Relaxed
from autosym.surgery import free_paths, merging
from autosym.surgery.merging import Modulation, Offset, Sum


def waves(model):
    return {name: part.waves for name, part in model.named_modules() if isinstance(part, Where)}


def test_how_many_waves_relax_takes_and_the_note_of_fewer():
    model, x = built("lenet")  # maps of 12x12 and 4x4
    assert waves(autosym.relax(model, x, "where")) == {"conv1.where.linear": 4, "conv2.where.linear": 4}
    found = autosym.relax(model, x, "where:20")
    assert waves(found) == {"conv1.where:20.linear": 20, "conv2.where:20.linear": 15}
    notes = {note.layer: note.note for note in found.relaxation.layers}
    assert "waves" not in notes["conv1"]
    assert notes["conv2"].endswith("15 waves for where:20: a cosine goes with its sine, and the map has no more")
    sequences, x = built("conv1d")
    assert set(waves(autosym.relax(sequences, x, "where")).values()) == {2}
    volumes, x = built("conv3d")
    assert waves(autosym.relax(volumes, x, "where")) == {"encoder.0.where.linear": 6, "encoder.3.where.linear": 5}


@pytest.mark.parametrize("wrong", ["where:", "where:0", "where:x", "where:4:2", "wher", "where:-1"])
def test_other_names_are_refused(wrong):
    model, x = built("lenet")
    with pytest.raises(
        ValueError, match="join different ones of f-fc, fc, s-fc, where by '\\+' \\(where:8 is where with 8 waves\\)"
    ):
        autosym.relax(model, x, wrong)


def test_one_wave_is_half_a_pair():
    model, x = built("lenet")
    with pytest.raises(ValueError, match="1 waves on a map of 12x12 would have a cosine without its sine: take 2"):
        autosym.relax(model, x, "where:1")


def test_growth_is_said():
    model, x = built("resnet")
    found = autosym.relax(model, x, "where")
    size, grown = (sum(p.numel() for p in m.parameters()) for m in (model, found))
    record = found.relaxation
    assert record.parameters == (size, grown)
    assert record.growth == pytest.approx(grown / size)
    factors = 0
    for module in found.modules():
        if isinstance(module, Relaxed):
            weights = [part.weight.shape for part in module.modules() if hasattr(part, "columns")]
            factors += sum(4 * k * (out**2 + width**2) for k, out, width in weights)
    assert record.factor_bytes == factors > 0
    assert f"parameters: {size:,} before, {grown:,} after ({grown / size:.1f} times)" in str(record)
    assert f"Kronecker factors of relaxed layers: {factors / 2**20:,.1f} MiB" in str(record)


def test_a_relaxed_network_takes_images_of_other_sizes():
    """Waves follow the size of the map: at the start the function is the same there too, and later it still runs."""
    for name in ("resnet", "grouped", "sequential"):
        model, x = built(name, torch.float64)
        found = autosym.relax(model, x, "where")
        for size in ((8, 8), (12, 10)):
            larger = torch.randn(2, x.shape[1], *size, dtype=torch.float64)
            assert_close(found(larger), model(larger), rtol=0, atol=1e-12)
            assert torch.isfinite(shaken(autosym.relax(model, x, "where"))(larger)).all()


def test_steps_start_in_the_size_that_matches_the_convolution():
    model, x = built("sequential")
    found = autosym.relax(model, x, "where")
    where, conv = found[0]["where"].linear, found[0]["conv"].linear
    assert where.start_size > 0
    assert not where.weight.any()
    with torch.no_grad():
        where.weight.normal_(0, where.start_size)
        assert float(where(x).std() / conv(x).std()) == pytest.approx(1.0, rel=0.3)


# ---- plain torch


def test_a_layer_becomes_one_convolution_and_its_waves():
    model, x = relaxed("sequential", "where")
    hard = autosym.harden(model, (x, labels()), tolerance=0.0)
    conv, modulation = hard[0]
    assert (type(conv), type(modulation)) == (nn.Conv2d, Modulation)
    assert (conv.out_channels, modulation.phi.shape) == (5 * 4, (5, 8, 8))
    assert conv.bias is not None  # it holds the bias of waves too
    assert (modulation.phi[0] == 1).all()
    assert not any(isinstance(module, (Offset, Sum)) for module in hard.modules())
    assert_close(hard(x), model(x))
    with pytest.raises(ValueError, match=r"hardened for maps of \(8, 8\), got \(9, 9\): resize the inputs"):
        hard(torch.randn(1, 1, 9, 9, dtype=torch.float64))


@pytest.mark.parametrize("dropped", [("conv", "weights"), ("where", "bias"), ("where", "weights")], ids=str)
def test_a_layer_without_one_part(dropped):
    model, _ = relaxed("sequential", "where")
    layer, inputs = model[0], torch.randn(3, 1, 8, 8, dtype=torch.float64)
    hard = merging.plain("layer", layer, [dropped], (1, 8, 8))
    part = layer[dropped[0]].get_submodule({"weights": "linear", "bias": "bias"}[dropped[1]])
    nn.init.zeros_(part.weight)
    assert_close(hard(inputs), layer(inputs))


def test_a_bias_that_no_wave_makes_stays():
    """However small: here that of a factored path, a millionth of the others."""
    model, x = relaxed("sequential", "where+f-fc")
    bias = model[0]["f-fc"].b_1.weight
    bias.data.mul_(1e-6)
    hard = merging.plain("layer", model[0], (), (1, 8, 8))
    assert_close(hard(x), model[0](x), rtol=1e-12, atol=1e-13)


def test_a_path_alone_hardens_without_data_by_the_size_it_was_made_for():
    path, x = Where(2, 4, (5, 6), 4, groups=2).double(), torch.randn(3, 2, 5, 6, dtype=torch.float64)
    hard = merging.plain("where", path)
    assert_close(hard(x), path(x))
    assert_plain(hard, set())


@pytest.mark.parametrize("name", ["resnet", "conv1d", "conv3d", "grouped"])
def test_hardened_waves_export(name):
    model, x = relaxed(name, "where", torch.float32)
    hard = autosym.harden(model, (x, labels()), tolerance=0.0)
    program = torch.export.export(hard, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    assert_close(program.module()(x[:3]), hard(x[:3]), rtol=1e-4, atol=1e-5)
    assert name in ARCHITECTURES


# ---- from fit to report


def halves(size, count=60):
    """A bar at a random height in noise: in which half is it? A convolution and a mean over positions cannot say."""
    y = torch.arange(count) % 2
    x = 0.1 * torch.randn(count, 1, size, size)
    x[torch.arange(count), 0, y * (size // 2) + torch.randint(size // 2, (count,)), 1:5] += 2
    return x, y


def test_fit_simplify_harden_and_report(tmp_path):
    torch.manual_seed(0)
    x, y = halves(6)
    net = nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)
    )
    model = autosym.relax(net, x[:4], "where")
    fit = autosym.fit(model, (x, y), epochs=30)
    found = fit.symmetry()
    assert {path.path for path in found} == {"conv", "where", "pool", "rest"}
    assert all(0 <= share <= 1 for share in found.free_share().values())
    simple = autosym.simplify(fit, (x, y))
    assert {path.path for path in simple.model.simplification.paths} == {"where", "rest"}
    for data in ((x, y), None):
        hard = autosym.harden(simple, data)
        assert_plain(hard, set())
        assert_close(hard(x).argmax(1), simple.model(x).argmax(1))
    fit.report(tmp_path / "report.html", data=(x, y))
    page = (tmp_path / "report.html").read_text()
    assert "where" in page
    assert "rest" in page


def test_waves_have_evidence_where_position_matters():
    torch.manual_seed(0)
    x, y = halves(8, 400)
    found = {}
    for name in ("conv", "where+conv"):
        torch.manual_seed(0)
        net = nets.build(name, (1, 8, 8), 2, 3, channels=(1, 2), strides=(2, 2), hidden=4)
        found[name] = autosym.fit(net, (x, y), epochs=30)
    assert found["where+conv"].symmetry().network_share() > 0.05
    assert found["where+conv"].evidence.log_evidence > found["conv"].evidence.log_evidence + 10


@pytest.mark.parametrize(
    ("most", "path"), [(3 * 1 * 2 * 36 + 4 * 3 * 2 * 36, "f-fc"), (3 * 1 * 2 * 36 + 4 * 3 * 2 * 36 - 1, "where")]
)
def test_the_default_is_waves_where_factored_paths_would_be_too_large(most, path, monkeypatch):
    """F-FC has C C' (P + P') weights beside a convolution."""
    monkeypatch.setattr(free_paths, "LARGE", most)
    net = nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 4, 3, padding=1), nn.Flatten(), nn.Linear(144, 2)
    )
    model = autosym.relax(net, torch.randn(2, 1, 6, 6))
    assert [tuple(model[i]) for i in (0, 2)] == [("conv", path)] * 2
    weights = sum(p.numel() for name, p in model.named_parameters() if "theta" in name)
    assert weights in (0, 3 * 1 * 2 * 36 + 4 * 3 * 2 * 36)


@pytest.mark.parametrize("paths", ["where+where:8", "where:2+where:4"])
def test_waves_stand_beside_a_convolution_once(paths):
    net = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.Flatten(), nn.Linear(108, 2))
    with pytest.raises(ValueError, match="join different ones"):
        autosym.relax(net, torch.randn(2, 1, 6, 6), paths)
