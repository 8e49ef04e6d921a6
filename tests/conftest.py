from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

torch.set_warn_always(True)  # not only once: which test comes first is chance


@pytest.fixture(autouse=True)
def seed():
    """Every test starts from the same random numbers, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture
def tiny(monkeypatch):
    """Every run of the experiment with small networks, in this process, one after the other."""
    from autosym.papers import quadrant_digits

    small = {name: replace(run, width=2, test=1600, epochs=2) for name, run in quadrant_digits.RUNS.items()}
    monkeypatch.setattr(quadrant_digits, "RUNS", small)
    execute = cache(quadrant_digits.execute)
    monkeypatch.setattr(quadrant_digits, "execute_all", lambda runs, jobs: map(execute, runs))


@pytest.fixture
def forked(monkeypatch):
    """Processes that runs are given to are forks of one that has imported torch already."""
    from autosym.runtime import workers as library
    from workers import FORKED

    monkeypatch.setattr(library, "get_context", lambda _: FORKED)


@pytest.fixture
def npz(tmp_path):
    """Images of bars, as a file."""
    from commands import bars

    images, labels = bars()
    np.savez(tmp_path / "bars.npz", images=images, labels=labels)
    return tmp_path / "bars.npz"


@pytest.fixture(scope="module")
def fitted():
    """A small fit and its data."""
    import autosym
    from models import images, small

    torch.manual_seed(0)
    data = images()
    return autosym.fit(small(), data, epochs=6, burn_in=0, every=1, seed=3), data


@pytest.fixture(scope="session")
def trained():
    """A network that explains its data: relax or copy it, as all tests share it."""
    from trained_before import trained_network

    return trained_network()
