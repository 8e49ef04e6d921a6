"""What a page says that its code prints, beside what it prints: the same lines, whatever their numbers."""

import contextlib
import io
import re

NUMBER = re.compile(r"(?<![\w.])[-+~]?\d[\d,.]*(?:e[-+]?\d+)?%?")  # not the 1 of conv1, or the 2 of theta_2
CHANGED = re.compile(r"nothing given up|# nats (?:given up|gained) in all")  # which of them, rounding decides


def cells(text):
    """The python blocks of a page, each with the block of output that follows it, or None."""
    found = re.finditer(r"^```python\n(.*?)^```\n(?:\n^```\n(.*?)^```$)?", text, re.S | re.M)
    return [(m[1], m[2]) for m in found]


def run(code, names):
    """What ``code`` prints."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(code, "page", "exec"), names)
    return said.getvalue()


def lines(text):
    """Lines without their numbers, widths of columns and cautions, which a page leaves out."""
    kept = [line for line in text.strip().splitlines() if line.strip() and not line.startswith("Caution: ")]
    bare = [re.sub(r"-{3,}", "---", " ".join(NUMBER.sub("#", line).split())) for line in kept]
    return [CHANGED.sub("changed", line) for line in bare]


def alike(shown, printed):
    """Whether both have the same lines; in ``shown`` a line ``...`` stands for any number of lines."""
    pattern = "".join(r"(?:.*\n)*" if line == "..." else re.escape(line) + r"\n" for line in lines(shown))
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in lines(printed))) is not None
