"""A network whose layers are chains of groups, from fit to report."""

import pytest
import torch
from torch import nn

import autosym
from autosym.nn import nets
from autosym.report import findings, words

CHAIN = "gconv:d4+turn:d4+turn:c4"


def bars(samples):
    """Lines across noise: which way do they run? Half turns and mirrors leave the answer, quarter turns do not."""
    noise, y = 0.2 * torch.randn(samples, 1, 8, 8), torch.arange(samples) % 2
    lines = torch.eye(8)[torch.randint(8, (samples,))][:, None, None].expand(-1, -1, 8, -1)
    return noise + torch.where(y[:, None, None, None] == 1, lines, lines.mT), y


@pytest.fixture(scope="module")
def learned():
    torch.manual_seed(0)
    data = bars(160)
    net = nets.build(CHAIN, (1, 8, 8), 2, 2, channels=(1, 1), strides=(2, 4), hidden=4)
    return data, autosym.fit(net, data, epochs=8, seed=0, batch_size=20)


def test_each_step_has_its_share_in_the_table_and_in_words(learned):
    _, fit = learned
    table = fit.symmetry()
    shares = {(path.layer, path.path): path.share for path in table}
    d4, c4 = (table.broken_share(group) for group in ("d4", "c4"))
    for layer in ("blocks.0", "blocks.1"):
        assert c4[layer] == pytest.approx(shares[layer, "turn:c4"])
        assert d4[layer] == pytest.approx(shares[layer, "turn:d4"] + shares[layer, "turn:c4"])
    whole = table.broken()
    assert list(whole) == ["free", "d4", "c4"]
    assert f"of all effective parameters: 0.0% free, {whole['d4']:.1%} break d4, {whole['c4']:.1%} break c4" in str(table)
    found = findings.decided(findings.contents(fit, learned[0]))
    for layer in found.layers:
        assert [(step.group, step.share) for step in layer.steps] == [
            ("d4", pytest.approx(d4[layer.name])),
            ("c4", pytest.approx(c4[layer.name])),
        ]
    assert "not to d4" in words.headline(found)
    assert all("break d4" in words.predicate([layer]) for layer in found.layers)
    assert "convolutions" not in words.headline(found)


def test_each_step_is_priced_by_itself_and_a_chain_hardens_to_plain_convolutions(learned):
    data, fit = learned
    simpler = autosym.simplify(fit, data, nats=1e6)  # so that everything goes
    rows = simpler.model.simplification.paths
    assert {(row.layer, row.path) for row in rows} == {(f"blocks.{i}", f"turn:{g}") for i in (0, 1) for g in ("d4", "c4")}
    assert all(row.left_out for row in rows)
    assert simpler.symmetry().broken() == {"free": 0.0, "d4": 0.0, "c4": 0.0}
    hard = autosym.harden(simpler, data)
    assert sum(isinstance(module, nn.Conv2d) for module in hard.modules()) == 2
    assert not any(isinstance(module, autosym.linear.Path) for module in hard.modules())
    torch.testing.assert_close(hard(data[0]), simpler.model(data[0]), rtol=1e-4, atol=1e-4)
    before, after = (autosym.equivariance_error(net, "d4", data[0]).output()["d4"] for net in (fit.model, hard))
    assert after < 1e-4 < before


def test_the_report_says_what_each_layer_breaks(learned, tmp_path):
    data, fit = learned
    fit.report(tmp_path / "report.html", data=data)
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    found = findings.decided(findings.contents(fit, data))
    assert all(words.predicate([layer]) in text for layer in found.layers)
    assert all(f"break {group}" in text for group in ("d4", "c4"))
