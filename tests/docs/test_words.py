"""Documentation and errors use the words of their field; pages have short sentences."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ODD = re.compile(
    r"\b(what|alone|beside|by itself|by themselves|travels?|(?:is|are) sent|(?:is|are|be) refused|refuses|alike|"
    r"the same bits|nothing like it|(?:another|otherwise) than|is said|be it|which it was passed|of the most that|"
    r"that of others|as it stands|asked for|one process)\b",
    flags=re.IGNORECASE,
)
"""Words with a usual one in their place: a noun, only, compared with, automatically, raises an error, bitwise equal."""
LONGEST = 25
"""Words of a sentence."""
TABLE = ROOT / "docs" / "coverage.md"
"""A table of behaviours, which no other page repeats."""
PAGES = [ROOT / "README.md", *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page != TABLE)]
EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.py"))


def _prose(text: str) -> str:
    """Markdown without code, targets of links and tables that a script has written."""
    text = re.sub(r"<!-- written by.*?<!-- end -->", "", text, flags=re.DOTALL)
    text = re.sub(r"```.*?```|<!--.*?-->", "\n\n", text, flags=re.DOTALL)
    text = re.sub(r"`[^`]*`", "code", text)
    return re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)


def _sentences(text: str) -> list[str]:
    """Sentences of paragraphs, of items of lists and of cells of tables."""
    blocks = re.split(r"\n\s*\n|\n(?=\s*[-|#] ?)|\|", _prose(text))
    return [sentence for block in blocks for sentence in re.split(r"(?<=[.!?:;])\s", " ".join(block.split()))]


def _comments(file: Path) -> str:
    text = file.read_text(encoding="utf-8")
    return "\n\n".join([ast.get_docstring(ast.parse(text)) or "", *re.findall(r"# (.*)", text)])


@pytest.mark.parametrize("file", [*PAGES, *EXAMPLES], ids=lambda file: str(file.relative_to(ROOT)))
def test_a_page_has_short_sentences_in_usual_words(file: Path) -> None:
    text = file.read_text(encoding="utf-8") if file.suffix == ".md" else _comments(file)
    assert ODD.findall(_prose(text)) == []
    long = [one for one in _sentences(text) if len(re.findall(r"[\w'-]+", one)) > LONGEST]
    assert long == []


def test_error_texts_have_usual_words() -> None:
    found = []
    for file in sorted((ROOT / "fsdp_compile").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and node.exc is not None:
                texts = [one.value for one in ast.walk(node.exc) if isinstance(one, ast.Constant)]
                text = " ".join(text for text in texts if isinstance(text, str) and " " in text)  # no keys
                found += [f"{file.relative_to(ROOT)}:{node.lineno}: {word}" for word in ODD.findall(text)]
    assert found == []
