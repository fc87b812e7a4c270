"""Pages: what they link to and name exists, the reference is whole, sentences are short and in usual words."""

from __future__ import annotations

import ast
import dataclasses
import re
import runpy
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import fsdp_compile
from fsdp_compile import FSDPOptions

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {str(path.relative_to(ROOT)): path for path in (ROOT / "README.md", *sorted(DOCS.rglob("*.md")))}
TEXTS = {page: path.read_text(encoding="utf-8") for page, path in PAGES.items()}
EXAMPLES = {str(path.relative_to(ROOT)): path for path in sorted((DOCS / "examples").glob("*.py"))}
CODE = re.compile(r"```.*?```", flags=re.DOTALL)
LINK = re.compile(r"(?<!`)\[[^\]]*\]\(([^)\s]+)\)")
PATH = re.compile(r"`((?:fsdp_compile|tests|benchmarks|docs|\.ci)/[\w./-]+)`")
TEST = re.compile(r"`(tests/[\w./]+\.py)::(\w+)")


def _anchors(page: Path) -> set[str]:
    """What GitHub makes of headings: lower case, no punctuation, hyphens for blanks."""
    headings = re.findall(r"^#+ (.*)$", CODE.sub("", page.read_text(encoding="utf-8")), flags=re.MULTILINE)
    shown = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in shown}


@pytest.mark.parametrize("page", PAGES)
def test_links_paths_and_tests_of_a_page_exist(page: str) -> None:
    text = TEXTS[page]
    missing = []
    for target in LINK.findall(CODE.sub("", text)):
        file, _, anchor = target.partition("#")
        if file.startswith(("https:", "http:")):
            continue
        found = (PAGES[page].parent / file).resolve() if file else PAGES[page]
        if not found.exists() or (anchor and anchor not in _anchors(found)):
            missing.append(target)
    missing += [path for path in PATH.findall(text) if "*" not in path and not (ROOT / path).exists()]
    for file, name in TEST.findall(text):
        if not (ROOT / file).exists() or f"def {name}(" not in (ROOT / file).read_text(encoding="utf-8"):
            missing.append(f"{file}::{name}")
    assert missing == []


def test_every_page_is_linked_from_another_one() -> None:
    linked = {
        (PAGES[page].parent / link.partition("#")[0]).resolve()
        for page, text in TEXTS.items()
        for link in LINK.findall(text)
    }
    assert [page for page, path in PAGES.items() if path not in linked and page != "README.md"] == []


def test_the_code_map_names_files_that_exist() -> None:
    """Paths in its tables are below the package unless they begin with another folder."""
    text = TEXTS["docs/contributing.md"].partition("## Code map")[2]
    named = [name for name in re.findall(r"`([\w/.]+(?:\.py|/))`", text) if "/" in name]
    assert len(named) > 80
    assert [name for name in named if not (ROOT / name).exists() and not (ROOT / "fsdp_compile" / name).exists()] == []


def test_the_reference_has_every_option_with_its_default_and_every_public_name_with_an_example() -> None:
    page = TEXTS["docs/reference.md"]
    rows = re.findall(r"^\| `(\w+)` \|.*\| `([^`]*)` \|$", page, flags=re.MULTILINE)
    options = FSDPOptions()
    names = [field.name for field in dataclasses.fields(options)]
    assert sorted(rows) == sorted((name, repr(getattr(options, name)).replace("'", '"')) for name in names)
    assert sorted(re.findall(r"^::: fsdp_compile\.(\w+)$", page, flags=re.MULTILINE)) == sorted(fsdp_compile.__all__)
    example = r"^::: fsdp_compile\.(\w+)\n\nExample: \[[^\]]*\]\(([^)#]*)[^)]*\)\.$"
    linked = re.findall(example, page, flags=re.MULTILINE)
    assert sorted(name for name, _ in linked) == sorted(fsdp_compile.__all__)
    texts = {target: (DOCS / target).read_text(encoding="utf-8") for _, target in linked}
    assert [name for name, target in linked if not re.search(rf"\b{name}\b", texts[target])] == []


def test_the_description_of_the_package_has_no_link_into_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package index cannot follow such a link."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["dynamic"] == ["readme"]
    interface = ModuleType("hatchling.metadata.plugin.interface")  # hatchling is there only while it is built
    interface.__dict__["MetadataHookInterface"] = object
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    hook = runpy.run_path(str(ROOT / project["tool"]["hatch"]["metadata"]["hooks"]["custom"]["path"]))["Readme"]
    metadata: dict[str, dict[str, str]] = {}
    hook.update(SimpleNamespace(root=ROOT), metadata)
    text = metadata["readme"]["text"]
    assert metadata["readme"]["content-type"] == "text/markdown"
    assert [link for link in re.findall(r"\]\(([^)]*)\)", text) if not link.startswith("https:")] == []
    assert "![" not in text
    assert "## Train your model" in text
    assert "| find a problem | debugging, faults," in text


ODD = re.compile(
    r"\b(what|alone|beside|by itself|by themselves|travels?|(?:is|are) sent|(?:is|are|be) refused|refuses|alike|"
    r"the same bits|nothing like it|(?:another|otherwise) than|is said|be it|which it was passed|of the most that|"
    r"that of others|as it stands|asked for|one process)\b",
    flags=re.IGNORECASE,
)
"""Words with a usual one in their place: a noun, only, compared with, automatically, raises an error, bitwise equal."""
LONGEST = 25
"""Words of a sentence."""


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


@pytest.mark.parametrize("page", [*(page for page in PAGES if page != "docs/coverage.md"), *EXAMPLES])
def test_a_page_has_short_sentences_in_usual_words(page: str) -> None:
    text = TEXTS[page] if page in TEXTS else _comments(EXAMPLES[page])
    assert ODD.findall(_prose(text)) == []
    assert [one for one in _sentences(text) if len(re.findall(r"[\w'-]+", one)) > LONGEST] == []


def test_error_texts_have_usual_words() -> None:
    found = []
    for file in sorted((ROOT / "fsdp_compile").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and node.exc is not None:
                texts = [one.value for one in ast.walk(node.exc) if isinstance(one, ast.Constant)]
                text = " ".join(text for text in texts if isinstance(text, str) and " " in text)  # no keys
                found += [f"{file.relative_to(ROOT)}:{node.lineno}: {word}" for word in ODD.findall(text)]
    assert found == []
