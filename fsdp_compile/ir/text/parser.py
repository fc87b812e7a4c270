"""Reads the text that `printer.py` writes back to a graph.

Inputs get fake values of their declared types. Every other node's type is inferred from its operator and must be the
declared one, so text that is out of date is refused where it is wrong. No process group and no device is needed.

Arguments and sizes are read as expressions of Python, of which nothing is executed: `_evaluate` knows the few kinds
that graphs have.
"""

from __future__ import annotations

import ast
import difflib
import functools
import math
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from fsdp_compile._torch.tensors import FakeTensorMode
from fsdp_compile.errors import ConfigError
from fsdp_compile.ir.edit import infer_value
from fsdp_compile.ir.graph import DECLARING, INPUTS, KEY, Phase, Record, Role, StepGraph
from fsdp_compile.ir.queries import TEXT_POSITION
from fsdp_compile.ir.text.printer import DTYPES, OPERATORS, spell_type
from fsdp_compile.layout import spec as read_specs
from fsdp_compile.layout.spec import UnshardSpec

_STRING: Final = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""
_NAME: Final = rf"{_STRING}|\(root\)|[\w.\-/]+"
_HEADER: Final = re.compile(r"graph (forward|backward) on (\w+)\s*")
_SYMBOL: Final = re.compile(r"symbol (\w+) in \[(-?\d+|-oo), (\d+|oo)\]\s*")
_NODE: Final = re.compile(r"%([A-Za-z_]\w*)\s*=\s*([A-Za-z_][\w.]*)\s*\((.*)\)\s*:\s*(.*?)\s*")
_SLOT: Final = re.compile(rf"\s+({_NAME})\s*:\s*(.*?)\s*")
_NAMED: Final = re.compile(rf"({_STRING})|(?:^|,)\s*(slot|role|unit|of)\s*=\s*(\[(?:{_STRING}|[^\]'\"])*\]|{_NAME})")
"""A string, in which nothing is named, or something that is."""
_TENSOR: Final = re.compile(r"(\w+)\s*\[([^\]]*)\](?:\s*strides \[([^\]]*)\])?(?: on (\w+))?")
_NODE_OR_STRING: Final = re.compile(rf"({_STRING})|%([A-Za-z_]\w*)")
_UNSHOWN: Final = re.compile(r"<[^>]*>|\?")
_UNBACKED: Final = re.compile(r"\bu\d+\b")
_WORDS: Final[dict[str, Any]] = {
    "nan": math.nan,
    "inf": math.inf,
    **{text: dtype for dtype, text in DTYPES.items()},
    **{
        str(value).removeprefix("torch."): value
        for kind in (torch.memory_format, torch.layout, torch.dtype)
        for value in vars(torch).values()
        if isinstance(value, kind) and value not in DTYPES
    },
}
_CALLS: Final[dict[str, Callable[..., Any]]] = {
    "sym": lambda size: size,
    "Max": lambda *sizes: functools.reduce(torch.sym_max, sizes),
    "Min": lambda *sizes: functools.reduce(torch.sym_min, sizes),
    "Mod": operator.mod,
    "PythonMod": operator.mod,
}
_BINARY: Final[dict[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_NODES: Final = "node"
_VALUES: Final = "%node, 1, 2.5, 'text', bf16, cuda, contiguous_format, None, [...] or (...)"
_DECLARING: Final = {role.value for role in DECLARING}
_EXAMPLE: Final = 5040
"""Example sizes are multiples of this, so that the divisions which models make of a size come out even."""
_SLOT_EXAMPLE: Final = (
    "offset=0 extent=32 shape=6x5 dim=0 over=fsdp.shard.0/2 param=float32 reduce=float32 reshard=after_forward"
)


def parse_graph(text: str) -> StepGraph:
    """Builds the graph, with fake values and records, that a text of `format_graph` describes.

    Blank lines and lines that start with `#` are skipped, and blanks between words do not matter.

    Raises:
        ConfigError: If the text is not a graph, or a declared type is not the inferred one; names the line.
    """
    reader = _Reader()
    try:
        return reader.read(
            [(n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip() and not line.startswith("#")]
        )
    except ConfigError as error:
        number, line = reader.at
        raise ConfigError(f"line {number}: {error.what}", where=line.strip(), instead=error.instead) from error


class _Said:
    """What the arguments of a node say by name: the slot of a marker, or a record."""

    def __init__(self, arguments: str) -> None:
        said = [(key, found) for _, key, found in _NAMED.findall(arguments) if key]
        self.role = next((found for key, found in said if key == "role"), "")
        self.slot = next((_unquoted(found) for key, found in said if key == "slot"), "")
        self.units = [_unquoted(found) for key, found in said if key == "unit"]
        names = [re.findall(_NAME, found) for key, found in said if key == "of"]
        self.claims = [
            (unit, _full_name(name, unit)) for unit, each in zip(self.units, names, strict=False) for name in each
        ]


def _unquoted(name: str) -> str:
    return ast.literal_eval(name) if name[0] in "'\"" else name


def _full_name(text: str, unit: str) -> str:
    name = _unquoted(text)
    return unit + name if name.startswith(".") else name


class _Reader:
    """The graph so far, and the names that its lines may refer to.

    Attributes:
        at: Number and text of the line that is read.
        places: Where each parameter lies, by its unit and name.
        declared: The parameters of each input that says where they lie, by the number of its line.
    """

    def __init__(self) -> None:
        self.at = (1, "")
        self.phase, self.device = Phase.FORWARD, "cpu"
        self.env = ShapeEnv()
        self.symbols: dict[str, Any] = {}
        self.mode = FakeTensorMode(shape_env=self.env)
        self.root = torch.nn.Module()
        self.graph = fx.Graph()
        self.nodes: dict[str, fx.Node] = {}
        self.places: dict[tuple[str, str], UnshardSpec] = {}
        self.declared: dict[int, list[tuple[str, str]]] = {}

    def read(self, lines: Sequence[tuple[int, str]]) -> StepGraph:
        """Reads all lines, of which the first one is the header."""
        self.at = lines[0] if lines else self.at
        header, is_finished = _HEADER.fullmatch(self.at[1]), False
        if header is None:
            raise ConfigError("expected the header of a graph", instead="graph forward on cpu")
        self.phase, self.device = Phase(header[1]), header[2]
        self._read_places(lines[1:])
        for self.at in lines[1:]:
            line = self.at[1]
            if line.startswith(" "):
                continue
            if is_finished:
                raise ConfigError("nothing may follow `return`")
            if symbol := _SYMBOL.fullmatch(line):
                self._declare(symbol[1], symbol[2], symbol[3])
            elif line.startswith("return "):
                self.graph.output(self._value(line.removeprefix("return ")))
                is_finished = True
            else:
                self._read_node(*self.at)
        if not is_finished:
            raise ConfigError("the graph does not end", instead="return (%a, %b) in the last line")
        return StepGraph(fx.GraphModule(self.root, self.graph), self.phase)

    def _read_places(self, lines: Sequence[tuple[int, str]]) -> None:
        """Reads where parameters lie, as saved ones may be inputs in front of the flat parameters that say so."""
        claims, unit = None, ""
        for self.at in lines:
            number, line = self.at
            if not line.startswith(" "):
                node = _NODE.fullmatch(line)
                said = _Said(node[3] if node else "")
                declares = node is not None and node[2] == "input" and said.role in _DECLARING and said.units
                claims, unit = (self.declared.setdefault(number, []), said.units[0]) if declares else (None, "")
                continue
            if claims is None:
                raise ConfigError("an indented line belongs below an input with role=flat")
            match = _SLOT.fullmatch(line)
            if match is None:
                raise ConfigError("expected the place of a parameter", instead=f".weight: {_SLOT_EXAMPLE}")
            name = _full_name(match[1], unit)
            try:
                spec = read_specs.parse(match[2])
            except ValueError as error:
                raise ConfigError(str(error), instead=_SLOT_EXAMPLE) from error
            if self.places.setdefault((unit, name), spec) != spec:
                raise ConfigError(f"unit {unit} has another {name}", instead="names that tell units apart")
            claims.append((unit, name))

    def _read_node(self, number: int, line: str) -> None:
        match = _NODE.fullmatch(line)
        if match is None:
            raise ConfigError("expected a node", instead="%y = aten.mm(%x, %w) : f32[3, 5]")
        name, head, arguments, declared = match.groups()
        if name in self.nodes:
            raise ConfigError(f"%{name} is made twice")
        said = _Said(arguments)
        rest = _NAMED.sub(lambda found: found[1] or "", arguments).strip().removeprefix(",")
        match head:
            case "input":
                node = self.graph.placeholder(name)
            case "attribute":
                target = self._value(rest)
                if not (isinstance(target, str) and target.isidentifier()):
                    raise ConfigError("an attribute has a name", instead="attribute('_tensor_constant0')")
                node = self.graph.create_node("get_attr", target, name=name)
            case _:
                node = self._call(name, head, rest, said)
        node.meta["stack_trace"] = f'File "graph text", line {number}, in {self.phase.value}\n{line}'
        if said.role:
            node.meta[KEY] = self._record(said, self.declared.get(number, []), is_input=head == "input")
        if head in ("input", "attribute"):
            node.meta["val"] = self._typed(declared)
        else:
            self._infer(node, head, declared)
        if head == "attribute":
            self.root.register_buffer(str(node.target), node.meta["val"])
        # fx renames nodes whose names are Python keywords or builtins.
        if node.name != name:
            raise ConfigError(f"%{name} cannot be the name of a node", instead=f"%{node.name}")
        self.nodes[name] = node

    def _call(self, name: str, head: str, arguments: str, said: _Said) -> fx.Node:
        target = _read_operator(head)
        call = self._parsed(_with_nodes(f"f({arguments})"), arguments)
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
            raise ConfigError(f"expected the arguments of one call, not {arguments}", instead=_VALUES)
        args = [self._evaluate(argument) for argument in call.args]
        kwargs = {str(keyword.arg): self._evaluate(keyword.value) for keyword in call.keywords}
        if said.slot:
            flat = args[0].meta.get(KEY) if args and isinstance(args[0], fx.Node) else None
            unit = flat.unit if flat is not None else next(iter(said.units), None)
            if unit is None:
                raise ConfigError(
                    "slot= needs a flat parameter as the first argument",
                    instead="fsdp_compile.unshard(%flat, slot=.weight)",
                )
            args.insert(TEXT_POSITION.get(target, len(args)), self._place(unit, _full_name(said.slot, unit)).text)
        return self.graph.create_node("call_function", target, tuple(args), kwargs, name=name)

    def _record(self, said: _Said, declared: list[tuple[str, str]], *, is_input: bool) -> Record:
        """The record of a node, with the parameters that the lines below it have declared."""
        if said.role not in {role.value for role in Role}:
            raise ConfigError(f"there is no role {said.role}", instead=", ".join(role.value for role in Role))
        declares = is_input and said.role not in {role.value for role in INPUTS} - _DECLARING
        if declares and not declared:
            what = "an input of ours is a flat parameter of a unit, with a line for each parameter below it"
            raise ConfigError(what, instead="input(role=flat, unit=layers.0)")
        if not declares and not said.claims:
            raise ConfigError(
                "a record has a role, a unit and parameters", instead="role=gather, unit=layers.0, of=[.weight]"
            )
        claims = declared if declares else said.claims
        units, names = [unit for unit, _ in claims], tuple(name for _, name in claims)
        specs = tuple(self._place(unit, name) for unit, name in claims)
        # Inputs that both graphs may have have the same record in both, that of forward.
        phase = Phase.FORWARD if is_input and said.role != Role.SAVED_PARAM.value else self.phase
        owners = tuple(units) if len(set(units)) > 1 else ()
        return Record(Role(said.role), units[0], names, specs, phase, owners)

    def _place(self, unit: str, name: str) -> UnshardSpec:
        if (unit, name) not in self.places:
            known = ", ".join(other for owner, other in self.places if owner == unit)
            raise ConfigError(
                f"no flat parameter of unit {unit} holds {name}", instead=known or "declare it below an input"
            )
        return self.places[unit, name]

    def _infer(self, node: fx.Node, head: str, declared: str) -> None:
        if _UNBACKED.search(declared):  # operators make up such symbols: there is nothing to infer
            node.meta["val"] = self._typed(declared)
            return
        try:
            node.meta["val"] = infer_value(node)
        except Exception as error:  # operators raise what they like
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ConfigError(f"{head} cannot take these arguments: {reason}") from error
        inferred = spell_type(node.meta["val"], self.device)
        if "".join(declared.split()) != "".join(inferred.split()):
            raise ConfigError(f"declared {declared}, but {head} gives {inferred}", instead=inferred)

    def _typed(self, text: str) -> Any:
        """A fake value of a declared type."""
        if text == "none":
            return None
        if text[:1] in ("[", "("):
            items = [self._typed(item) for item in _items(text[1:-1])]
            return items if text[0] == "[" else tuple(items)
        if literal := re.fullmatch(r"(?:int|float|bool|str)\((.*)\)", text):
            return ast.literal_eval(literal[1])
        if text.startswith("sym("):
            return self._size(text)
        match = _TENSOR.fullmatch(text)
        dtype = _WORDS.get(match[1]) if match else None
        if match is None or not isinstance(dtype, torch.dtype):
            _refuse_unshown(text)
            raise ConfigError(
                f"expected a type, not {text}",
                instead="f32[4, 8], f32[4, 8] strides [1, 4], sym(s0), [f32[8], f32[8]] or none",
            )
        shape, device = self._size(f"[{match[2]}]"), match[4] or self.device
        with self.mode:
            if match[3] is None:
                return torch.empty(shape, dtype=dtype, device=device)
            strides = self._size(f"[{match[3]}]")
            if len(strides) != len(shape):
                raise ConfigError(f"{len(shape)} sizes have {len(strides)} strides")
            return torch.empty_strided(shape, strides, dtype=dtype, device=device)

    def _value(self, text: str) -> Any:
        return self._evaluate(self._parsed(_with_nodes(text), text))

    def _size(self, text: str) -> Any:
        """Sizes, in which `%` is a remainder."""
        return self._evaluate(self._parsed(text, text))

    def _parsed(self, source: str, shown: str) -> Any:
        """An expression as Python reads it."""
        try:
            return ast.parse(source.strip(), mode="eval").body
        except SyntaxError:
            _refuse_unshown(shown)
            raise ConfigError(f"expected values, not {shown}", instead=_VALUES) from None

    def _evaluate(self, tree: ast.expr) -> Any:  # noqa: PLR0911  one line per kind
        match tree:
            case ast.Constant(value=value):
                return value
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if owner == _NODES:
                if name not in self.nodes:
                    raise ConfigError(f"%{name} is used before it is made")
                return self.nodes[name]
            case ast.List(elts=items):
                return [self._evaluate(item) for item in items]
            case ast.Tuple(elts=items):
                return tuple(self._evaluate(item) for item in items)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._evaluate(operand)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
                return self._computed(_BINARY[type(op)], [left, right])
            case ast.Call(func=ast.Name(id=name), args=items) if name in _CALLS:
                return self._computed(_CALLS[name], items)
            case ast.Name(id=name):
                return self._word(name)
        raise ConfigError(f"expected a value, not {ast.unparse(tree)!r}", instead=_VALUES)

    def _computed(self, function: Callable[..., Any], operands: Sequence[ast.expr]) -> Any:
        """A size that is computed from others."""
        try:
            return function(*map(self._evaluate, operands))
        except (TypeError, ArithmeticError) as error:
            raise ConfigError(f"sizes cannot be computed so: {error}", instead=_VALUES) from error

    def _word(self, name: str) -> Any:
        if name in self.symbols or name in _WORDS:
            return self.symbols.get(name, _WORDS.get(name))
        try:
            return torch.device(name)
        except RuntimeError:
            raise ConfigError(
                f"{name} is no constant, nor a symbol that the header declares", instead=_VALUES
            ) from None

    def _declare(self, name: str, lower: str, upper: str) -> None:
        """Makes a symbol with a range from an integer or "-oo" to one or "oo"."""
        bounds = [{"oo": int_oo, "-oo": -int_oo}.get(text) or sympy.Integer(int(text)) for text in (lower, upper)]
        is_unbacked = name.startswith("u")  # a size that depends on data, such as the number of selected rows
        symbol = sympy.Symbol(name, integer=True, positive=None if is_unbacked else True)
        self.env.var_to_range[symbol] = ValueRanges(*bounds)
        self.env.var_to_sources[symbol] = []
        example = None
        if not is_unbacked:
            example = _EXAMPLE * (len(self.symbols) + 1)
            example = example if lower == "-oo" else max(example, int(lower))
            example = example if upper == "oo" else min(example, int(upper))
            # Under the name that this torch has for it (a new one since 2.12).
            name_of_examples = "backed_var_to_val" if hasattr(self.env, "backed_var_to_val") else "var_to_val"
            getattr(self.env, name_of_examples)[symbol] = sympy.Integer(example)
        self.symbols[name] = self.env.create_symintnode(symbol, hint=example)


def _with_nodes(text: str) -> str:
    """Python's source of values: each `%name` is an attribute of a name that no word has."""
    return _NODE_OR_STRING.sub(lambda found: found[1] or f"{_NODES}.{found[2]}", text)


def _items(text: str) -> list[str]:
    """What commas separate outside of brackets."""
    items, depth = [""], 0
    for letter in text:
        depth += (letter in "[(") - (letter in "])")
        if letter == "," and depth == 0:
            items.append("")
        else:
            items[-1] += letter
    return [item.strip() for item in items if item.strip()]


def _refuse_unshown(text: str) -> None:
    if shown := _UNSHOWN.search(text):
        raise ConfigError(f"{shown[0]} stands for something that text cannot hold", instead="a graph without it")


def _read_operator(name: str) -> Callable[..., Any]:
    """The target that a name stands for."""
    for target, text in OPERATORS.items():
        if text == name:
            return target
    namespace, _, rest = name.partition(".")
    if namespace in ("operator", "math") or name.startswith("torch.sym_"):  # functions that compute with sizes
        found = getattr({"operator": operator, "math": math, "torch": torch}[namespace], rest, None)
        if callable(found):
            return found
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
