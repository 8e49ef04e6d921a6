"""A hook of mkdocs (``mkdocs.yml``): every notebook of this folder becomes a page of the site, with its outputs and pictures.

``examples/NAME.ipynb`` becomes ``notebooks/NAME.md``. Nothing is run: outputs are those that ``run_notebooks.py`` wrote. A picture is
described by the comment that its cell begins with. Links to ``../docs/`` and to
other notebooks become links within the site, as do links of pages to ``../examples/NAME.ipynb``, which a host of git shows.
"""

import base64
import html
import json
import re
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parent


def page(name: str) -> tuple[str, dict[str, bytes]]:
    """The notebook ``name`` as Markdown, and its pictures by file name."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in json.loads((EXAMPLES / f"{name}.ipynb").read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(re.sub(r"\]\((\w+)\.ipynb\)", r"](\1.md)", source).replace("](../docs/", "](../"))
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            if output["output_type"] == "stream":
                parts.append(f'<pre class="output">{html.escape("".join(output["text"]).rstrip())}</pre>')
            else:
                file = f"{name}-{len(pictures) + 1}.png"
                pictures[file] = base64.b64decode(output["data"]["image/png"])
                parts.append(f"![{description(source)}]({file})")
    parts.append(f"*The notebook itself: `examples/{name}.ipynb`.*")
    return "\n\n".join(parts) + "\n", pictures


def description(source: str) -> str:
    """The comment that a cell begins with."""
    lines = source.splitlines()
    comment = next((i for i, line in enumerate(lines) if not line.startswith("# ")), len(lines))
    return " ".join(line.removeprefix("# ") for line in lines[:comment])


def on_files(files: Any, config: Any) -> Any:
    """Add the pages and their pictures to the files of the site."""
    from mkdocs.structure.files import File

    for path in sorted(EXAMPLES.glob("*.ipynb")):
        text, pictures = page(path.stem)
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))
        for name, picture in pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=picture))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links of a page of ``docs/`` to notebooks become links to their pages."""
    return re.sub(r"\]\(\.\./examples/(\w+)\.ipynb\)", r"](notebooks/\1.md)", markdown)


def on_serve(server: Any, config: Any, builder: Any) -> Any:
    """``mkdocs serve`` builds again when a notebook changes."""
    server.watch(str(EXAMPLES))
    return server
