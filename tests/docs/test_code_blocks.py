"""The Python blocks of all pages: the names that they import exist, and calls take the arguments that they give.

Those of README and guide are run in `test_examples.py`, and so are the scripts of `docs/examples/`.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import fsdp_compile
from fsdp_compile import FSDPOptions

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
_OPTIONS = {field.name for field in fields(FSDPOptions)}


def _blocks(page: Path) -> list[str]:
    """With `...` for further arguments left out where Python takes none."""
    return [re.sub(r", \.\.\.\)", ")", block) for block in _BLOCK.findall(page.read_text(encoding="utf-8"))]


class _Page:
    """What the names of a page stand for, as far as they are imported or public."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {name: getattr(fsdp_compile, name) for name in fsdp_compile.__all__}

    def wrong(self, block: str) -> Iterator[str]:
        """What a block has that does not exist."""
        nodes = list(ast.walk(ast.parse(block)))
        for node in nodes:
            yield from self._import(node)
        for node in nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "fsdp_compile":
                if not hasattr(fsdp_compile, node.attr):
                    yield f"fsdp_compile.{node.attr}"
            elif isinstance(node, ast.Call):
                yield from self._wrong_arguments(node)

    def _import(self, node: ast.AST) -> Iterator[str]:
        """Imports as a node does, if it is an import of what is installed."""
        if isinstance(node, ast.Import):
            for alias in filter(lambda alias: _is_installed(alias.name), node.names):
                module, (first, *_) = importlib.import_module(alias.name), alias.name.split(".")
                self.names[alias.asname or first] = module if alias.asname else importlib.import_module(first)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and _is_installed(node.module):
            module = importlib.import_module(node.module)
            for alias in node.names:
                self.names[alias.asname or alias.name] = getattr(module, alias.name, None)
                if not hasattr(module, alias.name):
                    yield f"{node.module}.{alias.name}"

    def _wrong_arguments(self, call: ast.Call) -> Iterator[str]:
        given = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
        options = given.get("options")
        if isinstance(options, ast.Dict):
            names = {key.value for key in options.keys if isinstance(key, ast.Constant)}
            yield from (f"option {name!r}" for name in names - _OPTIONS)
        function = self._value(call.func)
        if function is None or not getattr(function, "__module__", "").startswith("fsdp_compile"):
            return
        positional = [None] * sum(not isinstance(each, ast.Starred) for each in call.args)
        try:
            inspect.signature(function).bind_partial(*positional, **dict.fromkeys(given))
        except TypeError as error:
            yield f"{ast.unparse(call)}: {error}"

    def _value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Name):
            return self.names.get(node.id)
        if isinstance(node, ast.Attribute):
            return getattr(self._value(node.value), node.attr, None)
        return None


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module.partition(".")[0]) is not None


@pytest.mark.parametrize("path", [page for page in PAGES if _blocks(page)], ids=lambda page: page.name)
def test_names_and_arguments_in_blocks_exist(path: Path) -> None:
    page = _Page()
    assert [wrong for block in _blocks(path) for wrong in page.wrong(block)] == []


def test_what_does_not_exist_is_found() -> None:
    page = _Page()
    block = 'from fsdp_compile import gone\nfully_shard(model, meesh=1)\ntorch.compile(model, options={"no": 1})'
    found = list(page.wrong(block))
    assert len(found) == 3
    assert "fsdp_compile.gone" in found[0]
