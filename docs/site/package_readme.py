"""The README as a package index shows it: links into the repository become names, and pictures go: both would fail."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


def without_local_links(text: str) -> str:
    """Markdown that links to addresses only."""
    text = re.sub(r"^ *!\[[^\]]*\]\((?!https:)[^)]*\)\n\n?", "", text, flags=re.MULTILINE)
    return re.sub(r"\[([^\]]*)\]\((?!https:)[^)]*\)", r"\1", text)


class Readme(MetadataHookInterface):
    """Hatchling calls it for each build."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Sets the description of the package."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": without_local_links(text)}
