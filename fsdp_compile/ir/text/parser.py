"""Reads the text that `printer.py` writes back to a graph.

Inputs get fake values of their declared types. Every other node's type is inferred from its operator and must be the
declared one, so text that is out of date is refused where it is wrong. No process group and no device is needed.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import fx

from fsdp_compile._torch.tensors import FakeTensorMode
from fsdp_compile.errors import ConfigError
from fsdp_compile.ir.edit import infer_value
from fsdp_compile.ir.graph import DECLARING, INPUTS, KEY, Phase, Record, Role, StepGraph
from fsdp_compile.ir.queries import TEXT_POSITION
from fsdp_compile.ir.text.lexer import Line, read_name, read_node_name, read_type, read_value
from fsdp_compile.ir.text.printer import spell_type
from fsdp_compile.ir.text.spelling import SymbolTable, read_operator, read_parameter
from fsdp_compile.layout import spec as read_specs
from fsdp_compile.layout.spec import UnshardSpec

_HEADER: Final = re.compile(r"graph (forward|backward) on (\w+)")
_SYMBOL: Final = re.compile(r"symbol (\w+) in \[(-?\d+|-oo), (\d+|oo)\]")
_OPERATOR: Final = re.compile(r"[A-Za-z_][\w.]*")
_KEY: Final = re.compile(r"(\w+)=")
_DECLARING: Final = {role.value for role in DECLARING}
_NO_RECORD: Final = "a record has a role, a unit and parameters"
_RECORD_EXAMPLE: Final = "role=gather, unit=layers.0, of=[.weight]"
_SLOT_EXAMPLE: Final = (
    "offset=0 extent=32 shape=6x5 dim=0 over=fsdp.shard.0/2 param=float32 reduce=float32 reshard=after_forward"
)
_UNBACKED: Final = re.compile(r"\bu\d+\b")


def parse_graph(text: str) -> StepGraph:
    """Builds the graph, with fake values and records, that a text of `format_graph` describes.

    Blank lines and lines that start with `#` are skipped, and blanks between words do not matter.

    Raises:
        ConfigError: If the text is not a graph, or a declared type is not the inferred one; names the line.
    """
    lines = [Line(n, raw) for n, raw in enumerate(text.splitlines(), 1) if raw.strip() and not raw.startswith("#")]
    header = lines[0].take(_HEADER) if lines else None
    if header is None:
        line = lines[0] if lines else Line(1, "")
        raise line.error("expected the header of a graph", instead="graph forward on cpu")
    lines[0].end()
    reader = _Reader(Phase(header[1]), header[2])
    body = _read_symbols(lines[1:], reader.symbols)
    for line, slots in _with_slots(body):
        reader.read(line, slots)
    if not reader.is_finished:
        raise (body or lines)[-1].error("the graph does not end", instead="return (%a, %b) in the last line")
    return StepGraph(fx.GraphModule(reader.root, reader.graph), reader.phase)


def _read_symbols(lines: list[Line], symbols: SymbolTable) -> list[Line]:
    """Declares the symbols that `lines` start with; returns the other lines."""
    for index, line in enumerate(lines):
        match = line.take(_SYMBOL)
        if match is None:
            return lines[index:]
        line.end()
        symbols.declare(match[1], match[2], match[3])
    return []


def _with_slots(lines: Iterable[Line]) -> list[tuple[Line, list[Line]]]:
    """Each line with the indented ones below it."""
    groups: list[tuple[Line, list[Line]]] = []
    for line in lines:
        if not line.text.startswith(" "):
            groups.append((line, []))
        elif groups:
            groups[-1][1].append(line)
        else:
            raise line.error("an indented line belongs below an input with role=flat")
    return groups


@dataclasses.dataclass
class _Call:
    """What stands between the brackets of a line."""

    args: list[Any] = dataclasses.field(default_factory=list)
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    slot: str | None = None
    role: str | None = None
    unit: str | None = None
    claims: list[tuple[str, str]] | None = None


class _Reader:
    """The graph so far, and the names that its lines may refer to."""

    def __init__(self, phase: Phase, device: str) -> None:
        self.phase = phase
        self.device = device
        self.symbols = SymbolTable()
        self.mode = FakeTensorMode(shape_env=self.symbols.env)
        self.root = torch.nn.Module()
        self.graph = fx.Graph()
        self.nodes: dict[str, fx.Node] = {}
        self.places: dict[tuple[str, str], UnshardSpec] = {}
        self.is_finished = False

    def read(self, line: Line, slots: list[Line]) -> None:
        """Adds the node of one line."""
        if self.is_finished:
            raise line.error("nothing may follow `return`")
        if line.takes("return "):
            self.graph.output(read_value(line, self.nodes, self.symbols.sizes))
            self.is_finished = True
            line.end()
            return
        name = read_node_name(line)
        if name in self.nodes:
            raise line.error(f"%{name} is made twice")
        line.expect("=")
        node = self._read_node(line, name, slots)
        node.meta["stack_trace"] = f'File "graph text", line {line.number}, in {self.phase.value}\n{line.text}'
        # fx renames nodes whose names are Python keywords or builtins.
        if node.name != name:
            raise line.error(f"%{name} cannot be the name of a node", instead=f"%{node.name}")
        self.nodes[name] = node

    def _read_node(self, line: Line, name: str, slots: list[Line]) -> fx.Node:
        head = line.take(_OPERATOR)
        if head is None:
            raise line.error("expected an operator", instead="aten.mm, all_gather, input, ...")
        try:
            target = head[0] if head[0] in ("input", "attribute") else read_operator(head[0])
        except ConfigError as error:
            line.position = head.start()
            raise line.error(error.what, instead=error.instead) from None
        line.expect("(")
        call = _Call()
        line.items(")", lambda: self._read_argument(line, call))
        line.expect(":")
        if slots and (head[0] != "input" or call.role not in _DECLARING):
            raise slots[0].error("an indented line belongs below an input with role=flat")
        if head[0] == "input":
            return self._read_input(line, name, call, slots)
        if head[0] == "attribute":
            return self._read_attribute(line, name, call)
        if call.slot is not None:
            position = TEXT_POSITION.get(target, len(call.args))
            call.args[position:position] = [self._slot_text(line, call, call.slot)]
        node = self.graph.create_node("call_function", target, tuple(call.args), call.kwargs, name=name)
        if call.role is not None:
            node.meta[KEY] = self._serving(line, call)
        self._infer(line, node, head[0])
        return node

    def _read_argument(self, line: Line, call: _Call) -> None:
        key = line.take(_KEY)
        match key[1] if key else None:
            case None:
                call.args.append(read_value(line, self.nodes, self.symbols.sizes))
            case "slot":
                call.slot = read_name(line)
            case "role":
                call.role = read_name(line)
            case "unit":
                call.unit = read_name(line)
            case "of":
                line.expect("[")
                names = line.items("]", lambda: read_name(line))
                if call.unit is None:
                    raise line.error(_NO_RECORD, instead=_RECORD_EXAMPLE)
                call.claims = [*(call.claims or ()), *((call.unit, read_parameter(name, call.unit)) for name in names)]
            case str(name):
                call.kwargs[name] = read_value(line, self.nodes, self.symbols.sizes)

    def _read_input(self, line: Line, name: str, call: _Call, slots: list[Line]) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = self._declared(line)
        if call.role is not None:
            is_beside = call.role in {role.value for role in INPUTS} - _DECLARING
            if is_beside:
                record = self._serving(line, call)
            else:
                if call.role not in _DECLARING or call.unit is None or not slots:
                    what = "an input of ours is a flat parameter of a unit, with a line for each parameter below it"
                    raise line.error(what, instead="input(role=flat, unit=layers.0)")
                record = self._record(line, call, call.unit, [self._read_slot(slot, call.unit) for slot in slots])
            # Inputs have the same record in both graphs, that of forward.
            node.meta[KEY] = dataclasses.replace(record, phase=Phase.FORWARD)
        return node

    def _read_slot(self, slot: Line, unit: str) -> tuple[str, UnshardSpec]:
        parameter = read_parameter(read_name(slot), unit)
        slot.expect(":")
        try:
            spec = read_specs.parse(slot.rest())
        except ValueError as error:
            raise slot.error(str(error), instead=_SLOT_EXAMPLE) from error
        if self.places.setdefault((unit, parameter), spec) != spec:
            raise slot.error(f"unit {unit} has another {parameter}", instead="names that tell units apart")
        return parameter, spec

    def _read_attribute(self, line: Line, name: str, call: _Call) -> fx.Node:
        (target,) = call.args or (None,)
        if not isinstance(target, str) or not target.isidentifier():
            raise line.error("expected the name of an attribute", instead="attribute('_tensor_constant0')")
        value = self._declared(line)
        self.root.register_buffer(target, value)
        node = self.graph.create_node("get_attr", target, name=name)
        node.meta["val"] = value
        return node

    def _slot_text(self, line: Line, call: _Call, slot: str) -> str:
        record = call.args[0].meta.get(KEY) if call.args and isinstance(call.args[0], fx.Node) else None
        unit = call.unit if record is None else record.unit
        if unit is None:
            raise line.error(
                "slot= needs a flat parameter as the first argument",
                instead="fsdp_compile.unshard(%flat, slot=.weight)",
            )
        return self._place(line, unit, read_parameter(slot, unit)).text

    def _serving(self, line: Line, call: _Call) -> Record:
        """The record of a node whose parameters are declared elsewhere."""
        if call.unit is None or call.claims is None:
            raise line.error(_NO_RECORD, instead=_RECORD_EXAMPLE)
        units = [unit for unit, _ in call.claims]
        places = [(name, self._place(line, unit, name)) for unit, name in call.claims]
        record = self._record(line, call, units[0] if units else call.unit, places)
        return dataclasses.replace(record, owners=tuple(units)) if len(set(units)) > 1 else record

    def _place(self, line: Line, unit: str, parameter: str) -> UnshardSpec:
        if (unit, parameter) not in self.places:
            known = ", ".join(name for owner, name in self.places if owner == unit)
            raise line.error(
                f"no flat parameter of unit {unit} holds {parameter}", instead=known or "declare it below an input"
            )
        return self.places[unit, parameter]

    def _record(self, line: Line, call: _Call, unit: str, places: list[tuple[str, UnshardSpec]]) -> Record:
        try:
            role = Role(call.role)
        except ValueError:
            raise line.error(f"there is no role {call.role}", instead=", ".join(r.value for r in Role)) from None
        return Record(role, unit, tuple(n for n, _ in places), tuple(spec for _, spec in places), self.phase)

    def _declared(self, line: Line) -> Any:
        with self.mode:
            value = read_type(line, self.device, self.symbols.sizes)
        line.end()
        return value

    def _infer(self, line: Line, node: fx.Node, operator: str) -> None:
        start, declared = line.position, line.rest()
        if _UNBACKED.search(declared):  # operators make up such symbols: there is nothing to infer
            line.position = start
            node.meta["val"] = self._declared(line)
            return
        try:
            node.meta["val"] = infer_value(node)
        except Exception as error:  # operators raise what they like
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise line.error(f"{operator} cannot take these arguments: {reason}") from error
        inferred = spell_type(node.meta["val"], self.device)
        if "".join(declared.split()) != "".join(inferred.split()):
            line.position = start + 1
            raise line.error(f"declared {declared}, but {operator} gives {inferred}", instead=inferred)
