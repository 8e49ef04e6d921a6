"""A minute of the soak (``benchmarks/soak.py``): nothing drifts, nothing grows; and both would be seen."""

import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).parent.parent / "benchmarks" / "soak.py"
spec = importlib.util.spec_from_file_location("soak", PATH)
soak = importlib.util.module_from_spec(spec)
spec.loader.exec_module(soak)


@pytest.mark.slow
@pytest.mark.fault(22)
def test_a_minute_of_kills_and_resumes_neither_drifts_nor_grows():
    seen = soak.soak(minutes=1)
    assert seen.drifts == []
    assert seen.kills >= 1
    assert seen.resumed >= 1
    assert seen.growth() <= soak.GROWTH, [round(m / 2**20) for m in seen.memory]


def test_growth_and_drift_would_be_seen():
    mib = 2**20
    steady, leaking = ([(start + step * i) * mib for i in range(40)] for start, step in ((300, 0), (300, 4)))
    assert soak.Soak(memory=steady).growth() == 0
    assert soak.Soak(memory=[10 * mib, *steady]).growth() == 0, "a warm-up is none"
    assert soak.Soak(memory=leaking).growth() > soak.GROWTH
    seen = soak.Soak()
    seen.same("a number", {"evidence": 1.0}, {"evidence": 1.0})
    assert not seen.drifts
    seen.same("a number", {"evidence": 1.0}, {"evidence": 1.0 + 1e-15})
    assert len(seen.drifts) == 1
