"""Files of runs that were written before paths said what they keep."""

import json

import pytest

from autosym.evidence.shares import Symmetry, from_dicts
from autosym.evidence.verdicts import is_constant
from autosym.report import run_files
from learned import network, path


def written_before(tmp_path, *paths):
    """The paths of a file without what is new, as it is read now."""
    rows = [{k: v for k, v in row.items() if k not in ("keeps", "learned_omega")} for row in Symmetry(paths).as_dicts()]
    (tmp_path / "result.json").write_text(json.dumps({"symmetry": rows}))
    return from_dicts(run_files.load(tmp_path / "result.json")["symmetry"])


@pytest.mark.parametrize(
    ("name", "group", "kept"),
    [
        ("gconv:c4", "c4", True),
        ("gconv:d4", "c4", True),
        ("gconv:c4", "d4", False),
        ("gconv:c2", "c4", False),
        ("conv", "c4", False),
        ("s-conv", "c4", False),
        ("pool", "c4", True),
        ("c4", "d4", True),
        ("gconv:own", "own", True),
        ("gconv:own", "c4", False),
    ],
)
def test_what_paths_of_older_files_keep_is_known_by_their_names(tmp_path, name, group, kept):
    (found,) = written_before(tmp_path, path(name))
    assert (group in found.keeps) == kept
    assert found.keeps.equivariant == (name in ("conv", "s-conv") or name.startswith("gconv:"))
    assert found.keeps.invariant == (name == "pool")
    assert found.keeps.group == (name.removeprefix("gconv:") if name.startswith("gconv:") else "")
    (free,) = written_before(tmp_path, path(name, symmetric=False))
    assert group not in free.keeps


def test_older_files_are_read_as_the_same_paths(tmp_path):
    paths = (*network(0.0, 0.9, None), *(path(name, "l3") for name in ("s-conv", "gconv:c4", "gconv:d4", "pool", "own")))
    again = written_before(tmp_path, *paths)
    assert str(again) == str(paths), "as text, where what is not a number is the same"


def test_learned_lengthscales_of_older_files_are_known_by_their_precision(tmp_path):
    sparse = path("s-fc", symmetric=False, omega={"u_1": 1e-3})
    (fixed,) = written_before(tmp_path, sparse)
    assert not is_constant(fixed)
    sparse.precision["u_1.omega"] = 9.0
    (learned,) = written_before(tmp_path, sparse)
    assert is_constant(learned)


def test_what_newer_files_say_is_not_guessed_from_names(tmp_path):
    rows = Symmetry((path("conv"),)).as_dicts()
    (tmp_path / "result.json").write_text(json.dumps({"symmetry": [rows[0] | {"path": "gconv:c4"}]}))
    (found,) = from_dicts(run_files.load(tmp_path / "result.json")["symmetry"])
    assert found.keeps == path("conv").keeps
