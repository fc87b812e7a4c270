"""What `_torch` imports is used: there, or by another file. Its imports are exports, too, so ruff does not look."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import fsdp_compile

pytestmark = pytest.mark.core
FOLDER = Path(fsdp_compile.__file__).parent / "_torch"
ROOT = FOLDER.parents[1]


def _imported(tree: ast.Module) -> set[str]:
    nodes = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
    names = [alias for n in nodes if getattr(n, "module", "") != "__future__" for alias in n.names]
    return {(alias.asname or alias.name).split(".")[0] for alias in names}


def _used_elsewhere(stem: str) -> Iterator[str]:
    """Names that other files take from a module of the folder."""
    module = f"fsdp_compile._torch.{stem}"
    for path in (p for part in ("fsdp_compile", "tests", "benchmarks") for p in (ROOT / part).rglob("*.py")):
        text = path.read_text()
        if "_torch" not in text:
            continue
        tree = ast.parse(text)
        aliases = set()
        for imported in (n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)):
            if imported.module == module:
                yield from (alias.name for alias in imported.names)
            elif imported.module == "fsdp_compile._torch":
                aliases |= {alias.asname or alias.name for alias in imported.names if alias.name == stem}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
                yield node.attr


@pytest.mark.parametrize("path", sorted(FOLDER.glob("[a-z]*.py")), ids=lambda path: path.stem)
def test_every_import_is_used(path: Path) -> None:
    tree = ast.parse(path.read_text())
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} | {*_used_elsewhere(path.stem)}
    assert _imported(tree) - used == set()
