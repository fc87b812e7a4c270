"""The README is the site's first page; links to files outside of `docs` become names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]


def on_files(files: Any, config: Any) -> Any:
    """Adds `index.md`."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "index.md", content=text.replace("](docs/", "](")))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Rewrites what leads out of the site."""
    markdown = markdown.replace("](../README.md", "](index.md")
    return re.sub(r"\[([^\]]*)\]\(\.\./(?!\w+\.md|examples)[^)]*\)", r"\1", markdown)
