"""Run the notebooks of this folder and write their outputs back into them: printed text, and pictures as PNG.

The code cells run in order, in one namespace, as Jupyter would run them; Jupyter itself is not needed. An error stops it, and the
notebook stays as it was.

    python examples/run_notebooks.py                    # all of them; a few minutes on two CPU cores
    python examples/run_notebooks.py which_symmetry     # one
"""

import argparse
import base64
import contextlib
import hashlib
import io
import json
import time
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parent
DPI = 80


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def fingerprint(notebook: dict[str, Any]) -> str:
    """Of the code alone. It is kept with the outputs, so that outputs of other code are noticed."""
    return hashlib.sha256("\0".join("".join(cell["source"]) for cell in code_cells(notebook)).encode()).hexdigest()[:16]


def run(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The notebook with its outputs, and the names that its code has defined. Nothing is written."""
    import matplotlib

    matplotlib.use("Agg")
    notebook = json.loads(path.read_text())
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(code_cells(notebook), start=1):
        code = compile("".join(cell["source"]), f"{path.name}, code cell {number}", "exec")
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, names)
        text = printed.getvalue().splitlines(keepends=True)
        shown = [{"output_type": "stream", "name": "stdout", "text": text}] if text else []
        cell["outputs"] = shown + [_picture(image) for image in _pictures()]
        cell["execution_count"] = number
    notebook["metadata"]["outputs_of"] = fingerprint(notebook)
    return notebook, names


def _pictures() -> list[bytes]:
    """The open figures as PNG, in order; they are closed."""
    from matplotlib import pyplot as plt

    found = []
    for number in plt.get_fignums():
        plt.figure(number).savefig(content := io.BytesIO(), dpi=DPI, format="png", metadata={"Software": None})
        found.append(content.getvalue())
    plt.close("all")
    return found


def _picture(image: bytes) -> dict[str, Any]:
    data = {"image/png": base64.b64encode(image).decode(), "text/plain": ["<Figure>"]}
    return {"output_type": "display_data", "data": data, "metadata": {}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of notebooks, without .ipynb; all by default")
    names = parser.parse_args().names
    for path in [EXAMPLES / f"{name}.ipynb" for name in names] or sorted(EXAMPLES.glob("*.ipynb")):
        begun = time.process_time()
        notebook, _ = run(path)
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
        print(f"{path.name}: {time.process_time() - begun:.0f} s of CPU time")


if __name__ == "__main__":
    main()
