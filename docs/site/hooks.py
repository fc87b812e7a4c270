"""The README is the site's first page; links to files outside of `docs` become names; a style for narrow screens."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
STYLE = """
/* Names in tables stay whole, and pictures legible: both scroll. */
.md-typeset table code { word-break: normal; }
@media screen and (max-width: 44.9375em) {
  .md-typeset p:has(> img) { overflow-x: auto; }
  .md-typeset p > img { max-width: none; width: 680px; }
}
"""


def on_files(files: Any, config: Any) -> Any:
    """Adds `index.md` and the style."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "index.md", content=text.replace("](docs/", "](")))
    files.append(File.generated(config, "extra.css", content=STYLE))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Rewrites what leads out of the site."""
    markdown = markdown.replace("](../README.md", "](index.md")
    return re.sub(r"\[([^\]]*)\]\(\.\./(?!\w+\.md|examples)[^)]*\)", r"\1", markdown)
