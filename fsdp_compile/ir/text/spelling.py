"""How graph text spells operators, dtypes, names and sizes, read in both directions.

Sizes that are not known when a graph is compiled are symbols, and expressions of them.
"""

from __future__ import annotations

import ast
import difflib
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from fsdp_compile._torch.distributed import collectives
from fsdp_compile.errors import ConfigError

DTYPES: Final[dict[torch.dtype, str]] = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "f8e4m3fn",
    torch.float8_e5m2: "f8e5m2",
    torch.complex128: "c128",
    torch.complex64: "c64",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint64: "u64",
    torch.uint32: "u32",
    torch.uint16: "u16",
    torch.uint8: "u8",
    torch.bool: "bool",
}
OPERATORS: Final[dict[Any, str]] = {
    operator.getitem: "getitem",
    collectives.all_gather_into_tensor.default: "all_gather",
    collectives.all_gather_into_tensor_coalesced.default: "all_gather_coalesced",
    collectives.reduce_scatter_tensor.default: "reduce_scatter",
    collectives.reduce_scatter_tensor_coalesced.default: "reduce_scatter_coalesced",
    collectives.all_reduce.default: "all_reduce",
    collectives.all_reduce_coalesced.default: "all_reduce_coalesced",
    collectives.wait_tensor.default: "wait",
}
"""Operators with a name of their own; all others go by their qualified name, `aten.mm` or `aten.slice.Tensor`."""
_FUNCTION_MODULES: Final = {"operator": operator, "math": math, "torch": torch}
"""Where the functions live that compute with sizes; of torch's, only `torch.sym_*`."""
_BARE_NAME: Final = re.compile(r"[\w.\-/]+|\(root\)")
WORDS: Final[dict[str, Any]] = {
    "None": None,
    "True": True,
    "False": False,
    "nan": float("nan"),
    **{text: dtype for dtype, text in DTYPES.items()},
    **{
        str(value).removeprefix("torch."): value
        for kind in (torch.memory_format, torch.layout, torch.dtype)
        for value in vars(torch).values()
        if isinstance(value, kind) and value not in DTYPES
    },
}


def spell_dtype(dtype: torch.dtype) -> str:
    """`bf16`; torch's own name where the table has none."""
    return DTYPES.get(dtype) or str(dtype).removeprefix("torch.")


def spell_word(value: object) -> str | None:
    """A constant that is written as one word (a dtype, device type, memory format or layout), else `None`."""
    if isinstance(value, torch.dtype):
        return spell_dtype(value)
    if isinstance(value, torch.device):
        # Without its index, which differs between ranks.
        return value.type
    if isinstance(value, (torch.memory_format, torch.layout)):
        return str(value).removeprefix("torch.")
    return None


def read_word(word: str) -> Any:
    """The constant that a word stands for.

    Raises:
        ValueError: If there is none.
    """
    if word in WORDS:
        return WORDS[word]
    try:
        return torch.device(word)
    except RuntimeError:
        raise ValueError(f"{word!r} is not a constant") from None


def spell_operator(target: Any) -> str:
    """`aten.mm`, `aten.slice.Tensor`, `all_gather`, `operator.mul`: how a node's target is written."""
    if target in OPERATORS:
        return OPERATORS[target]
    if isinstance(target, type(torch.ops.aten.mm.default)):
        return str(target).removesuffix(".default")
    if getattr(target, "namespace", None) == "higher_order":
        return f"higher_order.{target}"
    module = getattr(target, "__module__", type(target).__module__)
    return f"{'operator' if module == '_operator' else module}.{getattr(target, '__name__', type(target).__name__)}"


def read_operator(name: str) -> Callable[..., Any]:
    """The target that a name stands for.

    Raises:
        ConfigError: If there is no such operator; suggests a similar one.
    """
    for target, text in OPERATORS.items():
        if text == name:
            return target
    namespace, _, rest = name.partition(".")
    if namespace in ("operator", "math") or name.startswith("torch.sym_"):
        found = getattr(_FUNCTION_MODULES[namespace], rest, None)
        if callable(found):
            return found
    return _read_torch_operator(name, namespace, rest)


def _read_torch_operator(name: str, namespace: str, rest: str) -> Callable[..., Any]:
    base, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace, None), base, None) if base else None
    if packet is None:
        near = difflib.get_close_matches(name, OPERATORS.values(), n=1)
        instead = near[0] if near else "an operator of torch.ops such as aten.mm or aten.slice.Tensor"
        raise ConfigError(f"there is no operator {name}", instead=instead)
    if namespace == "higher_order":
        return packet
    if (overload or "default") not in packet.overloads():
        spelled = [f"{namespace}.{base}.{known}".removesuffix(".default") for known in packet.overloads()]
        raise ConfigError(f"{namespace}.{base} has no overload {overload or 'default'}", instead=" or ".join(spelled))
    return getattr(packet, overload or "default")


def spell_name(name: str) -> str:
    """The name of a unit or parameter, in quotes if it has characters that mean something else."""
    return name if _BARE_NAME.fullmatch(name) else repr(name)


def spell_parameter(name: str, unit: str) -> str:
    """A parameter's name below its unit: `.attention.weight` in unit `layers.0`."""
    return spell_name(name.removeprefix(unit) if name.startswith(unit + ".") else name)


def read_parameter(text: str, unit: str) -> str:
    """The fully qualified name that `spell_parameter` shortened."""
    return unit + text if text.startswith(".") else text


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
            known = size.node.shape_env.var_to_range.get(symbol)
            bounds = (0, "oo") if known is None else (known.lower, known.upper)
            ranges.setdefault(str(symbol), "[{}, {}]".format(*(str(b).replace("int_oo", "oo") for b in bounds)))
    return [f"{name} in {ranges[name]}" for name in sorted(ranges)]


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
            # Under the name that this torch has for it (a new one since 2.12).
            name_of_examples = "backed_var_to_val" if hasattr(self.env, "backed_var_to_val") else "var_to_val"
            getattr(self.env, name_of_examples)[symbol] = sympy.Integer(example)
        self.sizes[name] = self.env.create_symintnode(symbol, hint=example)  # type: ignore[assignment]


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
