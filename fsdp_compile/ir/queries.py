"""Read-only questions about a graph: modules, reads, aliases, writes.

AOTAutograd writes new values of inputs at the end of a graph:

    %scaled = mul(%g, %scale); %new = mul(%scale, 2); copy_(%scale, %new)

Behind its write, a node that reads the old value would read the new one (`kept_order`); so it is with an update in
backward.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from itertools import pairwise
from operator import attrgetter, getitem
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import fx

from fsdp_compile._torch.distributed import collectives
from fsdp_compile._torch.tensors import OpOverload
from fsdp_compile.ir.graph import Record, Role, record_of, require, role_of
from fsdp_compile.ops.embedding import AVERAGE_ROWS, LOOK_UP, REDUCE_ROWS
from fsdp_compile.ops.post_forward import SHARD_POST_FORWARD, UNSHARD_POST_FORWARD
from fsdp_compile.ops.unshard import REDUCE_GRAD, UNSHARD

_ROOT = re.compile(r"^[LG]\['[^']*'\]")
_ITEM = re.compile(r"\._modules\['([^']*)'\]|\['?([^'\]]*)'?\]")


def module_of(node: fx.Node) -> str:
    """Path of the innermost module, such as "layers.0.mlp"; of our own nodes, the unit; empty if neither is known."""
    record = record_of(node)
    if record is not None:
        return record.unit
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    if not isinstance(stack, Mapping) or not stack:
        return ""
    innermost = list(stack.values())[-1]
    # An entry is (path, class) or the path alone, as Dynamo spells it: "L['self']._modules['layers']".
    path = innermost[0] if isinstance(innermost, tuple) else str(innermost)
    path = _ITEM.sub(lambda m: f".{m[1] or m[2]}", _ROOT.sub("", path))
    return path.removeprefix("._orig_mod").removeprefix(".")


def unit_of(path: str, units: frozenset[str]) -> str:
    """The innermost unit at or above a module, or the module's outermost name."""
    name = path
    while name:
        if name in units:
            return name
        name = name.rpartition(".")[0]
    return path.partition(".")[0]


READS = (UNSHARD, UNSHARD_POST_FORWARD)
"""Markers that give a full parameter."""
GRADIENTS_OF_READS = (REDUCE_GRAD, REDUCE_ROWS)
"""Markers that give a gradient of a flat parameter."""
TEXT_POSITION: Mapping[Any, int] = {
    UNSHARD: 1,
    REDUCE_GRAD: 2,
    SHARD_POST_FORWARD: 1,
    UNSHARD_POST_FORWARD: 1,
    LOOK_UP: 2,
    REDUCE_ROWS: 3,
    AVERAGE_ROWS: 2,
}
"""Where among the arguments of a marker the text of its spec is."""


def read_text(marker: fx.Node) -> str:
    """The text of the spec that a marker carries."""
    text = marker.args[TEXT_POSITION[marker.target]]
    assert isinstance(text, str)
    return text


def unsharded_value(marker: fx.Node) -> fx.Node | None:
    """The full parameter that a read takes instead of an all-gather."""
    return _node(marker, 2)


def added_gradients(marker: fx.Node) -> tuple[fx.Node | None, fx.Node | None]:
    """What a gradient's marker adds before the reduction, and before the sum over replicas."""
    return _node(marker, 3), _node(marker, 4)


def _node(marker: fx.Node, position: int) -> fx.Node | None:
    found = marker.args[position] if position < len(marker.args) else None
    return found if isinstance(found, fx.Node) else None


class InputsByFlat:
    """The inputs of one role by their flat parameter; valid as long as no input is added or erased."""

    def __init__(self, graph: fx.Graph, role: Role) -> None:
        self._found: dict[Hashable, fx.Node] = {}
        for node in graph.find_nodes(op="placeholder"):
            record = record_of(node)
            if record is not None and record.role is role:
                self._found.setdefault(flat_of(record), node)

    def of(self, flat: fx.Node) -> fx.Node | None:
        """The input that belongs to a flat parameter, or to an input with its layout, if the graph has one."""
        return self._found.get(flat_of(require(flat)))


def beside(flat: fx.Node, role: Role) -> fx.Node | None:
    """The input of `role` that belongs to one flat parameter, if the graph has one."""
    return InputsByFlat(flat.graph, role).of(flat)


def flat_of(record: Record) -> Hashable:
    """A key that the records of one flat parameter, and of inputs with its layout, share."""
    return record.unit, record.parameters


def first_of(nodes: Iterable[fx.Node], order: dict[fx.Node, int]) -> fx.Node:
    """The earliest of some nodes."""
    return min(nodes, key=order.__getitem__)


def last_of(nodes: Iterable[fx.Node], order: dict[fx.Node, int]) -> fx.Node:
    """The latest of some nodes."""
    return max(nodes, key=order.__getitem__)


def parameter_only(graph: fx.Graph) -> list[fx.Node]:
    """Reads of parameters, and everything that is computed from reads alone (casts, views, concatenations).

    Also what is computed from results of the program's own collectives over such values, not the collectives: they run
    once, where the program has them, and what backward needs of their results is saved.
    """
    found: dict[fx.Node, None] = {}
    for node in graph.nodes:
        values = node.meta.get("val")
        has_tensors = any(
            isinstance(v, torch.Tensor) for v in (values if isinstance(values, tuple | list) else [values])
        )
        if node.op != "call_function" or not has_tensors:
            continue
        inputs = tensor_inputs(node)
        derived = bool(inputs) and all(n in found for n in inputs)
        # These are computed twice, in forward and in backward.
        can_repeat = not node.is_impure() and is_known_to_repeat(node.target)
        if node.target in READS or (derived and (can_repeat or is_own_collective(node))):
            found[node] = None
    return [node for node in found if not is_own_collective(node)]


def tensor_inputs(node: fx.Node) -> list[fx.Node]:
    """The inputs of a node, without sizes: whether these are symbols depends on how often a graph was compiled."""
    return [source for source in node.all_input_nodes if not isinstance(source.meta.get("val"), torch.SymInt)]


def is_own_collective(node: fx.Node) -> bool:
    """Whether a node starts a collective of the program's own, or waits for one."""
    return getattr(node.target, "namespace", "") == "_c10d_functional" and record_of(node) is None


_KNOWN = ("aten", "prims", "_c10d_functional", "_dtensor", "fsdp_compile")
"""Namespaces of torch's operators and of this package's."""


def is_known_to_repeat(operator: Any) -> bool:
    """Whether an operator gives the same for the same inputs: none of others, which may draw random numbers untold."""
    if not isinstance(operator, OpOverload):
        return isinstance(operator, BuiltinFunctionType)  # an item of a result, or arithmetic of sizes
    return operator.namespace in _KNOWN and torch.Tag.nondeterministic_seeded not in operator.tags


def is_alias(node: fx.Node) -> bool:
    """Whether a node's result shares the memory of its first input, by the operator's schema."""
    if node.target is getitem:  # out of a list of views, as `chunk` makes
        return is_alias(node.all_input_nodes[0])
    return node.op == "call_function" and not all(returned_aliases(node.target))


@functools.cache  # a schema never changes, and graphs hold few operators many times
def returned_aliases(operator: Any) -> tuple[bool, ...]:
    """For each result of an operator that shares memory with an argument, whether the operator writes there."""
    results = getattr(getattr(operator, "_schema", None), "returns", ())
    return tuple(result.alias_info.is_write for result in results if result.alias_info is not None)


def aliases(roots: Iterable[fx.Node]) -> list[fx.Node]:
    """`roots` and everything downstream that shares their memory, in no particular order."""
    found = dict.fromkeys(roots)
    todo = list(found)
    while todo:
        for user in todo.pop().users:
            if user not in found and user.op == "call_function" and is_alias(user):
                found[user] = None
                todo.append(user)
    return list(found)


def readers(memory: Iterable[fx.Node]) -> list[fx.Node]:
    """Nodes that read or show the memory of some, and waits for the collectives that send it; no update in backward."""
    found = dict.fromkeys(n for held in aliases(memory) for n in (held, *held.users) if role_of(n) is not Role.UPDATE)
    return [node for node in (*found, *waits_behind(found)) if node.op != "output"]


def waits_behind(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Waits for the collectives that some nodes start, ours and the program's: until then these read their inputs."""
    starts = [node for node in nodes if getattr(node.target, "namespace", "") == "_c10d_functional"]
    started = [*starts, *(user for start in starts for user in start.users if user.target is getitem)]
    return [user for node in started for user in node.users if user.target is collectives.wait_tensor.default]


def upstream(node: fx.Node, *roles: Role) -> list[fx.Node]:
    """The nodes of `roles` that `node` depends on through such nodes, in an order in which they can be moved."""
    found: dict[fx.Node, None] = {}

    def visit(current: fx.Node) -> None:
        for source in current.all_input_nodes:
            if role_of(source) in roles and source not in found:
                visit(source)
                found[source] = None

    visit(node)
    return list(found)


def with_sources(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Some nodes, and everything that they are computed from."""
    found, todo = set[fx.Node](), list(nodes)
    while todo:
        node = todo.pop()
        todo += () if node in found else node.all_input_nodes
        found.add(node)
    return found


def functions_of(call: fx.Node) -> list[fx.Node]:
    """The nodes among a call's arguments that are functions."""
    return [n for n in call.all_input_nodes if n.op == "get_attr" and isinstance(attribute(n), fx.GraphModule)]


def attribute(node: fx.Node) -> Any:
    """The value of a `get_attr` node."""
    return attrgetter(str(node.target))(node.graph.owning_module)


def function_at(node: fx.Node) -> fx.GraphModule:
    """The function that a `get_attr` node gives."""
    value = attribute(node)
    assert isinstance(value, fx.GraphModule)
    return value


def is_write(node: fx.Node) -> bool:
    """Whether a node writes into an argument, by its operator's schema."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def has_effect(node: fx.Node) -> bool:
    """Whether a node of the program writes, sends, may draw random numbers or does anything else but compute."""
    if node.op != "call_function" or role_of(node) is not None or node.target is collectives.wait_tensor.default:
        return False
    return is_own_collective(node) or is_write(node) or not is_known_to_repeat(node.target) or node.is_impure()


def kept_order(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Pairs of nodes of which the first has to stay in front of the other, though it does not read it."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    yield from pairwise(filter(has_effect, order))
    for write in filter(is_write, order):
        for node in readers([_base(target) for target in _targets(write)]):
            if node is not write:
                yield (node, write) if order[node] < order[write] else (write, node)


def written(graph: fx.Graph) -> list[fx.Node]:
    """The nodes whose memory the program writes, by themselves or through views."""
    writes = (node for node in graph.nodes if is_write(node) and role_of(node) is None)
    return [_base(target) for node in writes for target in _targets(node)]


def tied_to_writes(graph: fx.Graph) -> frozenset[fx.Node]:
    """Nodes that read or show memory which the program writes: across the write, they would read another value."""
    return frozenset(node for held in aliases(written(graph)) for node in (held, *held.users))


def _targets(node: fx.Node) -> list[fx.Node]:
    """The tensors that a node writes."""
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    given = {**{a.name: value for a, value in zip(arguments, node.args, strict=False)}, **node.kwargs}
    written = [given.get(a.name) for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    each = [value for one in written for value in (one if isinstance(one, list | tuple) else [one])]
    return [value for value in each if isinstance(value, fx.Node)]


def _base(node: fx.Node) -> fx.Node:
    """The node whose memory a view shows."""
    while is_alias(node):
        node = node.all_input_nodes[0]
    return node
