"""Tables as plain text: what records of this library print as."""

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]], align: str) -> str:
    """Rows in columns, a line under the first; ``align`` has "<" or ">" for each column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{c:{a}{w}}" for c, a, w in zip(row, align, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])
