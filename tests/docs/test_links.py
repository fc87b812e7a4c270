"""Links, headings, paths and names of tests that the documentation mentions exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"(?<!`)\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"```.*?```", flags=re.DOTALL)
PATH = re.compile(r"`((?:fsdp_compile|tests|benchmarks|docs|\.ci)/[\w./-]+)`")
TEST = re.compile(r"`(tests/[\w./]+\.py)::(\w+)")


def _anchors(page: Path) -> set[str]:
    """What GitHub makes of headings: lower case, no punctuation, hyphens for blanks."""
    headings = re.findall(r"^#+ (.*)$", CODE.sub("", page.read_text(encoding="utf-8")), flags=re.MULTILINE)
    shown = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in shown}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_paths_and_tests_of_a_page_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    missing = []
    for target in LINK.findall(CODE.sub("", text)):
        file, _, anchor = target.partition("#")
        if file.startswith(("https:", "http:")):
            continue
        found = (page.parent / file).resolve() if file else page
        if not found.exists() or (anchor and anchor not in _anchors(found)):
            missing.append(target)
    missing += [path for path in PATH.findall(text) if "*" not in path and not (ROOT / path).exists()]
    for file, name in TEST.findall(text):
        if not (ROOT / file).exists() or f"def {name}(" not in (ROOT / file).read_text(encoding="utf-8"):
            missing.append(f"{file}::{name}")
    assert missing == []


def test_every_page_is_linked_from_another_one() -> None:
    linked = {
        (page.parent / link.partition("#")[0]).resolve() for page in PAGES for link in LINK.findall(page.read_text())
    }
    assert [page.name for page in PAGES[1:] if page not in linked] == []


def test_the_code_map_names_files_that_exist() -> None:
    """Paths in its tables are below the package unless they begin with another folder."""
    text = (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8").partition("## Code map")[2]
    named = [name for name in re.findall(r"`([\w/.]+(?:\.py|/))`", text) if "/" in name]
    assert len(named) > 80
    assert [name for name in named if not (ROOT / name).exists() and not (ROOT / "fsdp_compile" / name).exists()] == []
