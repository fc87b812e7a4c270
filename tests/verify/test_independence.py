"""The judge shares no code with those it judges, and its rules are written down."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

import fsdp_compile.verify
from fsdp_compile.ir.graph import Stage
from fsdp_compile.verify.check import RULES

PACKAGE = Path(inspect.getfile(fsdp_compile.verify)).parent
FILES = sorted(PACKAGE.rglob("*.py"))
JUDGED = (
    "fsdp_compile.passes",
    "fsdp_compile.ir.queries",
    "fsdp_compile.ir.queries",
    "fsdp_compile.ir.edit",
    "fsdp_compile.layout.messages",
)
DOCUMENT = PACKAGE.parent.parent / "docs" / "invariants.md"


@pytest.mark.parametrize("path", FILES, ids=[str(p.relative_to(PACKAGE)) for p in FILES])
def test_no_file_of_the_verifier_imports_what_passes_decide_with(path: Path) -> None:
    imported = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            imported.append(node.module or "")
        elif isinstance(node, ast.Import):
            imported.extend(alias.name for alias in node.names)
    assert [name for name in imported if name.startswith(JUDGED)] == []


def test_rules_have_names_of_their_own_and_hold_at_the_end() -> None:
    names = [rule.name for rule in RULES]
    assert len(set(names)) == len(names)
    assert all(Stage.FINAL in rule.stages for rule in RULES)


@pytest.mark.parametrize("rule", [rule.name for rule in RULES])
def test_the_documentation_has_a_section_on_each_rule(rule: str) -> None:
    sentence = next(r.sentence for r in RULES if r.name == rule)
    text = " ".join(DOCUMENT.read_text().split())
    assert f"## {rule}" in text
    assert sentence in text.replace("`", "")


def test_the_documentation_has_no_section_on_a_rule_that_is_gone() -> None:
    sections = [line.removeprefix("## ") for line in DOCUMENT.read_text().splitlines() if line.startswith("## ")]
    assert [name for name in sections if "-" in name and name not in {r.name for r in RULES}] == []
