"""Refuses models whose forward asks whether a sharded module is of the very class that the user wrote.

    if type(layer) is nn.Linear:        a sharded layer is an FSDPLinear, so the other branch would be taken

`isinstance(layer, nn.Linear)` holds as before. Nothing is called when a program asks for a class, so the source of
what forwards call is read: methods of the same class and functions of the same file, one after the other.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import textwrap
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn

from fsdp_compile.errors import UnsupportedModelError
from fsdp_compile.modules.classes import original_class

_ASKS = {"type", "__class__"}


class _Function(NamedTuple):
    """A function that a forward is or calls, and the class whose method it is."""

    function: Any  # type checkers take a `types.FunctionType` for a method
    owner: type[nn.Module]


def refuse_class_comparisons(root: nn.Module) -> None:
    """Raises `UnsupportedModelError` if a forward in `root` asks whether a module with parameters is of its very class.

    Args:
        root: What is sharded, its classes being the user's or already ours.
    """
    classes = {original_class(part) for part in root.modules()}
    sharded = {original_class(part) for part in root.modules() if any(True for _ in part.parameters())}
    for each in _called(classes):
        for question, line in _questions(each.function):
            found = sorted(c.__name__ for c in sharded if _names(question, c, each))
            if found:
                raise UnsupportedModelError(
                    f"a forward asks whether the class of a module is {found[0]}; sharded modules have a subclass of "
                    f"it, FSDP{found[0]}, and the other branch would be taken",
                    where=f'File "{each.function.__code__.co_filename}", line {line}, in {each.function.__qualname__}',
                    instead=f"isinstance(module, {found[0]}), or names of your own in a table (module.kind = ...)",
                )


def _called(classes: Iterable[type[nn.Module]]) -> Iterator[_Function]:
    """The forwards of some classes outside of torch, and what they call by name."""
    forwards = [(inspect.getattr_static(owner, "forward", None), owner) for owner in classes]
    todo = [_Function(forward, owner) for forward, owner in forwards if isinstance(forward, types.FunctionType)]
    seen: set[_Function] = set()
    while todo:
        each = todo.pop()
        if each in seen or (each.function.__module__ or "").partition(".")[0] == "torch":
            continue
        seen.add(each)
        yield each
        for name in _names_in(each.function.__code__):
            called = inspect.getattr_static(each.owner, name, None)
            if not isinstance(called, types.FunctionType):
                called = each.function.__globals__.get(name)
                if getattr(called, "__module__", None) != each.function.__module__:
                    continue
            if isinstance(called, types.FunctionType):
                todo.append(_Function(called, each.owner))


def _names_in(code: types.CodeType) -> set[str]:
    """All names of globals and attributes in a function, and in those inside of it."""
    inside = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return set(code.co_names).union(*map(_names_in, inside))


def _questions(function: types.FunctionType) -> Iterator[tuple[ast.expr, int]]:
    """What compares the class of something, or looks it up, as far as the source is known; with the line of each."""
    code = function.__code__
    if not _ASKS & _names_in(code):
        return
    lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]
    try:
        tree = ast.parse(textwrap.dedent("".join(inspect.getblock(lines))))
    except (SyntaxError, IndentationError):  # a lambda in the middle of a line, say
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.expr) and any(map(_asks_class, _compared(node))):
            yield node, code.co_firstlineno + node.lineno - 1


def _compared(node: ast.expr) -> list[ast.expr]:
    """What a comparison compares, or a look-up looks up."""
    match node:
        case ast.Compare():
            return [node.left, *node.comparators]
        case ast.Subscript():
            return [node.slice]
        case ast.Call(func=ast.Attribute()):
            return node.args
    return []


def _asks_class(node: ast.AST) -> bool:
    """Whether it is `type(x)` or `x.__class__`, or the name of such."""
    if _asks_name(node):
        node = node.value  # type: ignore[attr-defined]
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "type" and len(node.args) == 1
    return isinstance(node, ast.Attribute) and node.attr == "__class__"


def _asks_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in ("__name__", "__qualname__")


def _names(question: ast.expr, wanted: type[nn.Module], each: _Function) -> bool:
    """Whether a question is about a class, or its name: one that it names, or that is in a table that it names."""
    parts = list(ast.walk(question))
    if any(map(_asks_name, parts)):
        return any(isinstance(part, ast.Constant) and part.value == wanted.__name__ for part in parts)
    values = [_value(part, each) for part in parts]
    tables = [value for value in values if isinstance(value, dict | list | tuple | set | frozenset)]
    return any(value is wanted for table in [values, *tables] for value in table)


def _value(node: ast.AST, each: _Function) -> Any:
    """What a dotted name stands for, if that is known: of a global, of the closure, or an attribute of the class."""
    if isinstance(node, ast.Name):
        return _closure(each.function).get(node.id, each.function.__globals__.get(node.id))
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        return inspect.getattr_static(each.owner, node.attr, None)
    if isinstance(node, ast.Attribute):
        owner = _value(node.value, each)
        return getattr(owner, node.attr, None) if isinstance(owner, types.ModuleType) else None
    return None


def _closure(function: types.FunctionType) -> Mapping[str, Any]:
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    return {name: cell.cell_contents for name, cell in cells.items() if cell != types.CellType()}
