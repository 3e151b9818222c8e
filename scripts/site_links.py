"""For mkdocs: what lies outside docs/ is named, not linked."""

import re
from typing import Any


def on_page_markdown(markdown: str, **unused: Any) -> str:
    """Write `[text](../examples/weave.py)` as the text and the file's name."""
    return re.sub(r"\[([^\]]+)\]\(\.\./([^)]+)\)", r"\1 (`\2`)", markdown)
