"""A graph and what rules ask about it, computed once for all rules: limits, collectives, owners of memory."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from functools import cached_property
from operator import getitem
from typing import Any

import torch
from torch import fx

from fsdp_compile._torch.distributed import collectives
from fsdp_compile._torch.dynamo import is_saved_for_backward
from fsdp_compile.cost.communicate import Kind
from fsdp_compile.ir.graph import DECLARING, Phase, Record, Role, StepGraph, record_of, require, role_of
from fsdp_compile.layout.flat_layout import ReduceLayout
from fsdp_compile.ops.comm_hook import HOOK_REDUCE, HOOK_REDUCE_COALESCED, HOOK_SCATTER, HOOK_SCATTER_COALESCED


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What the caller of `check` promised; `None` leaves a number unchecked."""

    prefetch: int | None = None  # buckets that may be in flight ahead of the one that is needed next
    alone: bool = False  # a bucket is gathered once all are freed that are freed before it is needed
    unsharded_bytes: int | None = None  # of gathered parameters that may be live at any node
    joined_bytes: int | None = None  # of full parameters, or full gradients, in a collective that several units share
    reduce_layout: ReduceLayout = ReduceLayout.ALIGNED  # which alone promises that messages of reductions are aligned


WAIT = collectives.wait_tensor.default


KINDS: dict[Any, Kind] = {
    collectives.all_gather_into_tensor.default: Kind.GATHER,
    collectives.all_gather_into_tensor_coalesced.default: Kind.GATHER,
    collectives.reduce_scatter_tensor.default: Kind.REDUCE,
    collectives.reduce_scatter_tensor_coalesced.default: Kind.REDUCE,
    collectives.all_reduce.default: Kind.REPLICATE,
    collectives.all_reduce_coalesced.default: Kind.REPLICATE,
}
HOOKS: dict[Any, Kind] = {
    HOOK_SCATTER: Kind.REDUCE,
    HOOK_SCATTER_COALESCED: Kind.REDUCE,
    HOOK_REDUCE: Kind.REPLICATE,
    HOOK_REDUCE_COALESCED: Kind.REPLICATE,
}
"""Communication hooks of the user's, which take the place of a collective."""
KINDS |= HOOKS
KIND_OF_ROLE = {Role.GATHER: Kind.GATHER, Role.REDUCE: Kind.REDUCE, Role.REPLICATE: Kind.REPLICATE}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective; a grouped one carries several messages."""

    start: fx.Node
    kind: Kind

    @property
    def is_grouped(self) -> bool:
        """Whether it returns a list, one result per message."""
        return isinstance(self.start.args[0], list | tuple)

    @cached_property
    def sent(self) -> tuple[fx.Node, ...]:
        """The messages that go in."""
        first = self.start.args[0]
        return tuple(first) if isinstance(first, list | tuple) else (first,)  # type: ignore[arg-type, return-value]

    @property
    def group(self) -> Any:
        """Name of the process group, or key of the hook: the last argument of each of these operators."""
        return self.start.args[-1]

    @property
    def size(self) -> Any:
        """Number of ranks; `None` for an all-reduce, which does not say."""
        return None if self.kind is Kind.REPLICATE else self.start.args[-2]

    @property
    def reduction(self) -> Any:
        """How values are combined, such as "avg"; "hook" for the user's way, `None` for an all-gather."""
        if self.start.target in HOOKS:
            return "hook"
        return None if self.kind is Kind.GATHER else self.start.args[1]

    @cached_property
    def unfinished(self) -> tuple[tuple[fx.Node, ...], ...]:
        """For each message, the nodes of its result before it is waited for."""
        if not self.is_grouped:
            return ((self.start,),)
        items: list[list[fx.Node]] = [[] for _ in self.sent]
        for user in self.start.users:
            if user.target is getitem and user.args[1] in range(len(items)):
                items[user.args[1]].append(user)  # type: ignore[index]
        return tuple(tuple(found) for found in items)

    @cached_property
    def waits(self) -> tuple[tuple[fx.Node, ...], ...]:
        """For each message, the nodes that wait for it."""
        return tuple(tuple(u for n in nodes for u in n.users if u.target is WAIT) for nodes in self.unfinished)

    @property
    def all_waits(self) -> tuple[fx.Node, ...]:
        """The waits for all messages."""
        return tuple(wait for waits in self.waits for wait in waits)


def collectives_of(nodes: Iterable[fx.Node]) -> list[Collective]:
    """The collectives among nodes, by record."""
    found = []
    for node in nodes:
        role = role_of(node)
        kind = KIND_OF_ROLE.get(role) if role is not None else None
        # The rule `typed` reports operators that do not fit their role.
        if kind is not None and KINDS.get(node.target) is kind:
            found.append(Collective(node, kind))
    return found


NOTHING: frozenset[fx.Node] = frozenset()


class Facts:
    """A graph, which must not change, and what follows from it, each computed at most once."""

    def __init__(self, step: StepGraph, limits: Limits) -> None:
        self.step = step
        self.limits = limits

    @cached_property
    def nodes(self) -> list[fx.Node]:
        """All nodes in graph order."""
        return list(self.step.graph.nodes)

    @cached_property
    def order(self) -> dict[fx.Node, int]:
        """Position of each node."""
        return {node: position for position, node in enumerate(self.nodes)}

    @cached_property
    def ours(self) -> list[tuple[fx.Node, Record]]:
        """Nodes with a record, in graph order, and their records."""
        return [(node, record) for node in self.nodes if (record := record_of(node)) is not None]

    def of_role(self, *roles: Role) -> list[fx.Node]:
        """Nodes of some roles, role after role, each in graph order."""
        return [node for role in roles for node in self._by_role.get(role, ())]

    @cached_property
    def _by_role(self) -> dict[Role, list[fx.Node]]:
        found: dict[Role, list[fx.Node]] = {}
        for node, record in self.ours:
            found.setdefault(record.role, []).append(node)
        return found

    @cached_property
    def collectives(self) -> list[Collective]:
        """Our collectives in graph order."""
        return collectives_of(self.nodes)

    def of_kind(self, kind: Kind) -> list[Collective]:
        """Our collectives of one kind in graph order."""
        return [c for c in self.collectives if c.kind is kind]

    @cached_property
    def named(self) -> frozenset[fx.Node]:
        """All-gathers that the user started early, to which no other rule about order or number applies."""
        return frozenset(self.named_by)

    @cached_property
    def named_by(self) -> dict[fx.Node, Collective]:
        """For each all-gather that a list of the user's names, that of the first unit to name it."""
        phase = f"{self.step.phase.value}_prefetch"
        lists = {record.unit: getattr(record.specs[0], phase) for _, record in self.ours if record.role in DECLARING}
        if not any(lists.values()):
            return {}
        # A list names a unit: its gather counts only if it is needed later than that of the list's owner.
        waited = [gather for gather in self.of_kind(Kind.GATHER) if gather.all_waits]
        by_need = sorted(waited, key=lambda gather: max(self.order[wait] for wait in gather.all_waits))
        found: dict[fx.Node, Collective] = {}
        for place, by in enumerate(by_need):
            units = set(require(by.start).units)
            # Several models of one graph may have units of the same name: theirs are numbered.
            names = {name + unit[len(unit.partition("#")[0]) :] for unit in units for name in lists.get(unit, ())}
            for gather in by_need[place + 1 :]:
                if names - units and (names - units).intersection(require(gather.start).units):
                    found.setdefault(gather.start, by)
        return found

    @cached_property
    def outputs(self) -> list[Any]:
        """What the graph returns, one entry per result; some are not nodes."""
        returned = self.step.output.args[0]
        return list(returned) if isinstance(returned, list | tuple) else [returned]

    @cached_property
    def saved(self) -> list[fx.Node]:
        """Values that the forward graph saves for backward."""
        if self.step.phase is Phase.BACKWARD:
            return []
        described = zip(self.outputs, self.step.output.meta.get("desc") or (), strict=False)
        return [node for node, note in described if isinstance(node, fx.Node) and is_saved_for_backward(note)]

    @cached_property
    def memory(self) -> dict[fx.Node, frozenset[fx.Node]]:
        """For each node whose result is in gathered memory, the gathers that allocated it."""
        gathers = self.of_kind(Kind.GATHER)
        return self.sharing({wait: frozenset([gather.start]) for gather in gathers for wait in gather.all_waits})

    def sharing(self, owners: Mapping[fx.Node, frozenset[fx.Node]]) -> dict[fx.Node, frozenset[fx.Node]]:
        """For each node whose result shares the memory of nodes with owners, these owners."""
        found = dict(owners)
        for node in self.nodes if found else ():
            shared = NOTHING.union(*(found.get(source, NOTHING) for source in memory_sources(node)))
            if shared:
                found[node] = found.get(node, NOTHING) | shared
        return found

    @cached_property
    def reshards(self) -> dict[fx.Node, list[fx.Node]]:
        """For each all-gather, the markers that free it, in graph order."""
        found: dict[fx.Node, list[fx.Node]] = {}
        for marker in self.of_role(Role.RESHARD):
            gathers = {gather: None for message in marker.all_input_nodes for gather in self.memory.get(message, ())}
            for gather in gathers:
                found.setdefault(gather, []).append(marker)
        return found


def memory_sources(node: fx.Node) -> list[fx.Node]:
    """Inputs of a node whose memory its result (or a part of it) shares, by the operator's schema."""
    if node.target is getitem:
        return [n for n in node.all_input_nodes[:1] if memory_sources(n)]  # of a split, say
    if node.op != "call_function":
        return []
    sources = (node.args[i] for i in _shared_arguments(node.target) if i < len(node.args))
    return [source for source in sources if isinstance(source, fx.Node)]


@functools.cache
def _shared_arguments(operator: Any) -> tuple[int, ...]:
    """Positions of the arguments whose memory an operator's results share."""
    schema = getattr(operator, "_schema", None)
    if schema is None:
        return ()
    returned: set[str] = set()
    for info in (result.alias_info for result in schema.returns):
        if info is not None:
            returned |= info.before_set or {"*"}  # the schema of a list of views names no alias set
    infos = [argument.alias_info for argument in schema.arguments]
    return tuple(
        i for i, info in enumerate(infos) if info is not None and returned & (info.before_set | info.after_set)
    )


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Shape of a node's result, empty for a result that is no tensor."""
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def dtype_of(node: fx.Node) -> torch.dtype | None:
    """Dtype of a node's result."""
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None


def size_bytes(node: fx.Node) -> int:
    """Bytes of a node's result, without overlaps."""
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


def is_models(node: fx.Node) -> bool:
    """Whether a node computes something for the user's model, not for us."""
    return node.op == "call_function" and role_of(node) is None
