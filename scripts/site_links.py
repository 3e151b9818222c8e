"""Hooks of mkdocs: add the notebook as a page, and replace links to files outside docs/ by their names."""

import json
import re
from pathlib import Path
from typing import Any


def on_files(files: Any, config: Any) -> Any:
    """Add the tutorial as a page, so that it is in the navigation and can be searched."""
    from mkdocs.structure.files import File

    notebook = Path(config["docs_dir"], "tutorial.ipynb").read_text(encoding="utf-8")
    files.append(File.generated(config, "tutorial.md", content=as_markdown(notebook)))
    return files


def as_markdown(notebook: str) -> str:
    """Write a notebook as a page.

    >>> text = {"cell_type": "markdown", "source": ["# Title"]}
    >>> print(as_markdown(json.dumps({"cells": [text, {"cell_type": "code", "source": ["1 + 1"]}]})))
    # Title
    <BLANKLINE>
    ```python
    1 + 1
    ```
    """
    parts = []
    for cell in json.loads(notebook)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
    return "\n\n".join(parts)


def on_page_markdown(markdown: str, page: Any, **unused: Any) -> str:
    """Write a link that leaves docs/, such as `[text](../examples/weave.py)`, as the text and the file's name."""
    linked = markdown.replace("(tutorial.ipynb)", "(tutorial.md)")
    outside = re.escape("../" * (page.file.src_uri.count("/") + 1))
    return re.sub(rf"\[([^\]]+)\]\({outside}([^)]+)\)", r"\1 (`\2`)", linked)
