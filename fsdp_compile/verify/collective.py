"""Our collectives in a graph: the messages, group and waits of each."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable
from functools import cached_property
from operator import getitem
from typing import Any

from torch import fx

from fsdp_compile._torch.distributed import collectives
from fsdp_compile.ir.graph import Role, role_of
from fsdp_compile.ops.comm_hook import HOOK_REDUCE, HOOK_REDUCE_COALESCED, HOOK_SCATTER, HOOK_SCATTER_COALESCED

WAIT = collectives.wait_tensor.default


class Kind(enum.Enum):
    """What a collective does."""

    GATHER = "all-gather"
    REDUCE = "reduce-scatter"
    REPLICATE = "all-reduce"


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
