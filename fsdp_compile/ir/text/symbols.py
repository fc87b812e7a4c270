"""Sizes that are not known when a graph is compiled: symbols, and expressions of them."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

Size = int | torch.SymInt
_EXAMPLE = 5040
"""Example sizes are multiples of this, so that the divisions which models make of a size come out even."""
_BINARY: Final[dict[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_CALLS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "Max": torch.sym_max,
    "Min": torch.sym_min,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
}


def spell_size(size: Size) -> str:
    """A number, or the expression of a symbolic size."""
    return str(size.node.expr) if isinstance(size, torch.SymInt) else str(size)


def spell_symbols(sizes: Iterable[torch.SymInt]) -> list[str]:
    """One line per symbol among `sizes`, sorted by name: `s33 in [2, oo]`."""
    # Ranges alone: example sizes ("hints") may differ between ranks.
    ranges: dict[str, str] = {}
    for size in sizes:
        for symbol in size.node.expr.free_symbols:
            if str(symbol) not in ranges:
                ranges[str(symbol)] = _spell_range(size.node.shape_env, symbol)
    return [f"{name} in {ranges[name]}" for name in sorted(ranges)]


def _spell_range(env: ShapeEnv, symbol: sympy.Symbol) -> str:
    known = env.var_to_range.get(symbol)
    if known is None:
        return "[0, oo]"
    lower, upper = (str(bound).replace("int_oo", "oo") for bound in (known.lower, known.upper))
    return f"[{lower}, {upper}]"


def is_unbacked(name: str) -> bool:
    """Whether a symbol stands for a size that depends on data, such as the number of selected rows."""
    return name.startswith("u")


class SymbolTable:
    """Symbols that were declared by name, in a shape environment of their own."""

    def __init__(self) -> None:
        self.env = ShapeEnv()
        self.sizes: dict[str, torch.SymInt] = {}

    def declare(self, name: str, lower: str, upper: str) -> None:
        """Makes a symbol with a range.

        Args:
            name: "s33", or "u0" for a size that depends on data.
            lower: The smallest size, an integer or "-oo".
            upper: The largest size, an integer or "oo".
        """
        bounds = ValueRanges(_read_bound(lower), _read_bound(upper))
        symbol = sympy.Symbol(name, integer=True, positive=None if is_unbacked(name) else True)
        self.env.var_to_range[symbol] = bounds
        self.env.var_to_sources[symbol] = []
        example = None
        if not is_unbacked(name):
            example = _EXAMPLE * (len(self.sizes) + 1)
            example = example if lower == "-oo" else max(example, int(lower))
            example = example if upper == "oo" else min(example, int(upper))
            _examples(self.env)[symbol] = sympy.Integer(example)
        self.sizes[name] = self.env.create_symintnode(symbol, hint=example)  # type: ignore[assignment]


def _examples(env: ShapeEnv) -> dict[sympy.Symbol, sympy.Integer]:
    """Symbol to example size, under the name that this torch has for it (a new one since 2.12)."""
    return env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val


def _read_bound(text: str) -> sympy.Expr:
    infinities = {"oo": int_oo, "-oo": -int_oo}
    return infinities[text] if text in infinities else sympy.Integer(int(text))


def read_sizes(text: str, symbols: Mapping[str, torch.SymInt]) -> list[Size]:
    """Evaluates a list of sizes, "s33, 2*s33 + 1, 8".

    Raises:
        ValueError: If it is not a list of expressions, or names an unknown symbol or function.
    """
    try:
        tree = ast.parse(f"[{text}]", mode="eval").body
    except SyntaxError:
        raise ValueError(f"{text!r} is not a list of sizes") from None
    assert isinstance(tree, ast.List)
    return [_evaluate(element, symbols) for element in tree.elts]


def _evaluate(tree: ast.expr, symbols: Mapping[str, torch.SymInt]) -> Any:
    match tree:
        case ast.Constant(value=int() as number):
            return number
        case ast.Name(id=name) if name in symbols:
            return symbols[name]
        case ast.Name(id=name):
            raise ValueError(f"{name} is not a symbol that the header declares")
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand, symbols)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _BINARY[type(op)](_evaluate(left, symbols), _evaluate(right, symbols))
        case ast.Call(func=ast.Name(id=name), args=[left, right]) if name in _CALLS:
            return _CALLS[name](_evaluate(left, symbols), _evaluate(right, symbols))
    raise ValueError(f"{ast.unparse(tree)!r} is not a size")
