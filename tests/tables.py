"""The published tables: their runs, and what their results say."""

import numpy as np

from autosym.papers import table1, table2, table3

TABLES = {"table1": table1, "table2": table2, "table3": table3}
RUNS = {name: run for table in TABLES.values() for name, run in table.RUNS.items()}


def recomputed(path, expected):
    """The accuracy of the labels that lie beside a result."""
    predicted = np.load(path.with_suffix(".npy"), allow_pickle=False)
    assert predicted.dtype == np.uint8
    assert predicted.shape == (len(expected),)
    return 100 * float((predicted == expected.numpy()).mean())
