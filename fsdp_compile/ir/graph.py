"""The graph that passes receive, and the record that every node of ours carries in `node.meta["fsdp"]`.

The record is written when a node is inserted, and passes and rules recognise nodes by it alone: never by a name, never
by the shape of a pattern.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator

from torch import fx

from fsdp_compile._torch.dynamo import LazyGraphModule
from fsdp_compile.layout.spec import UnshardSpec

KEY = "fsdp"


class Phase(enum.Enum):
    """Which graph of a training step a node is in."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Stage(enum.Enum):
    """How far a graph has come: some rules apply only at the end, and each pass has the stage that it leaves."""

    INSERTED = "after-insert"  # one collective per parameter
    BUCKETED = "after-bucket"  # one collective per bucket, and not yet where each is freed
    FINAL = "final"  # what is lowered


class Role(enum.Enum):
    """What a node is for."""

    # Graph inputs
    FLAT = "flat"  # a flat parameter
    GRAD_ACCUMULATOR = "grad_accumulator"  # the leaf that gradients go to which are not summed over all ranks
    UNREDUCED_GRAD = "unreduced_grad"  # full gradients that wait for their reduction
    PARTIAL_GRAD = "partial_grad"  # reduced gradients that wait for their sum over replicas
    UNSHARDED_PARAM = "unsharded_param"  # a full parameter that is still unsharded since an earlier call
    SAVED_PARAM = "saved_param"  # of backward: a full parameter that forward saved because it fits (`Reshard.AUTO`)

    # From flat parameters to full ones
    SHARD = "shard"  # this rank's part of a message, on its way into an all-gather
    OFFLOAD_IN = "offload_in"  # starts to copy this rank's part of a message from the host to the device
    OFFLOAD_IN_WAIT = "offload_in_wait"  # completes that copy
    GATHER = "gather"  # starts an all-gather
    GATHER_ITEM = "gather_item"  # one message of a grouped all-gather that is still running
    GATHER_WAIT = "gather_wait"  # completes an all-gather, or one message of a grouped one
    COPY_OUT = "copy_out"  # a step from a gathered message to a full parameter
    FULL = "full"  # a full parameter, as readers see it
    POST_FORWARD_SHARD = (
        "post_forward_shard"  # this rank's part of one, saved for backward, or a step to it; or an input
    )
    RESHARD = "reshard"  # frees gathered messages

    # From full gradients to those of flat parameters
    GRADIENT = "gradient"  # a step from a full gradient to a message
    LOOK_UP = "look_up"  # looks up rows of a parameter that stays sharded
    AVERAGE_ROWS = "average_rows"  # averages the gradients of such rows over all ranks
    ADD_UNREDUCED = "add_unreduced"  # adds unreduced gradients to new ones, before they are reduced
    REDUCE = "reduce"  # starts a reduce-scatter
    REDUCE_ITEM = "reduce_item"  # one message of a grouped reduce-scatter that is still running
    REDUCE_WAIT = "reduce_wait"  # completes a reduce-scatter, or one message of a grouped one
    ADD_PARTIAL = "add_partial"  # adds accumulated reduce-scattered gradients to new ones, before the all-reduce
    REPLICATE = "replicate"  # starts an all-reduce over replicas
    REPLICATE_ITEM = "replicate_item"  # one message of a grouped all-reduce that is still running
    REPLICATE_WAIT = "replicate_wait"  # completes an all-reduce over replicas, or one message of a grouped one
    SHARD_GRADIENT = "shard_gradient"  # a step from a reduced message to the flat parameter's gradient
    OFFLOAD_OUT = "offload_out"  # starts to copy a flat parameter's gradient from the device to the host
    OFFLOAD_OUT_WAIT = "offload_out_wait"  # makes the device, not the host, wait for that copy
    UPDATE = "update"  # updates a flat parameter with its gradient; whatever reads the flat parameter comes before

    # Graph outputs
    FLAT_GRADIENT = "flat_gradient"  # the gradient of a flat parameter
    PARTIAL_GRADIENT = "partial_gradient"  # the gradient of a flat parameter before its sum over replicas
    UNREDUCED_GRADIENT = "unreduced_gradient"  # full gradients of a flat parameter's parameters, not reduced


INPUTS = frozenset(
    {Role.FLAT, Role.GRAD_ACCUMULATOR, Role.UNREDUCED_GRAD, Role.PARTIAL_GRAD, Role.UNSHARDED_PARAM, Role.SAVED_PARAM}
)
"""Roles of graph inputs; their records are the same in both graphs, if both have them."""
DECLARING = frozenset({Role.FLAT, Role.POST_FORWARD_SHARD})
"""Roles of graph inputs that say where parameters lie, and need no other input for that."""
SENT = (Role.SHARD, Role.OFFLOAD_IN, Role.OFFLOAD_IN_WAIT)
"""Roles of the nodes between a flat parameter and its all-gather."""
MADE = (Role.GRADIENT, Role.AVERAGE_ROWS)
"""Roles of the nodes whose records tell which parameters get gradients."""
STARTS = (Role.GATHER, Role.REDUCE, Role.REPLICATE)
"""Roles of the nodes that start a collective."""
ITEMS = (Role.GATHER_ITEM, Role.REDUCE_ITEM, Role.REPLICATE_ITEM)
"""Roles of one message of a grouped collective that is still running."""
WAITS = (Role.GATHER_WAIT, Role.REDUCE_WAIT, Role.REPLICATE_WAIT)
"""Roles of the nodes that complete a collective, or one message of it."""
EXCHANGES = (Role.LOOK_UP, Role.AVERAGE_ROWS)
"""Roles of nodes that communicate and compute at once: what comes after them waits for them."""
GRADIENTS = (Role.FLAT_GRADIENT, Role.PARTIAL_GRADIENT, Role.UNREDUCED_GRADIENT)
"""Roles of a flat parameter's gradient, summed over all ranks, over the shard group, over none."""


@dataclasses.dataclass(frozen=True)
class Record:
    """What a node is for, and for which parameters."""

    role: Role
    unit: str  # name of the unit; of the first one, if the node serves several
    parameters: tuple[str, ...]
    specs: tuple[UnshardSpec, ...]  # the reads of `parameters`, in the same order
    phase: Phase
    owners: tuple[str, ...] = ()  # the unit of each parameter, if they are of several units; else empty

    @property
    def units(self) -> tuple[str, ...]:
        """The units that the node serves, each once."""
        return tuple(dict.fromkeys(self.owners)) or (self.unit,)

    @property
    def claims(self) -> tuple[tuple[str, str], ...]:
        """Unit and name of each parameter: names alone are not unique where several models meet in a graph."""
        return tuple(zip(self.owners or (self.unit,) * len(self.parameters), self.parameters, strict=True))

    def of_one(self, spec: UnshardSpec, role: Role, phase: Phase) -> Record:
        """The record of a node that serves one parameter of this flat parameter, or the one of which it is a part."""
        name = self.parameters[[held.offset for held in self.specs].index(spec.offset)]
        return Record(role, self.unit, (name,), (spec,), phase)


def record_of(node: fx.Node) -> Record | None:
    """The node's record, or `None` if the node is the model's own."""
    return node.meta.get(KEY)


def role_of(node: fx.Node) -> Role | None:
    """The node's role, or `None` if the node is the model's own."""
    record: Record | None = node.meta.get(KEY)  # not `record_of`: passes ask this millions of times
    return None if record is None else record.role


def require(node: fx.Node) -> Record:
    """The record of a node that must have one."""
    return node.meta[KEY]


@dataclasses.dataclass
class StepGraph:
    """The forward or the backward graph of one compiled region."""

    gm: fx.GraphModule
    phase: Phase
    beside_bytes: int = 0  # of a backward, bytes of inputs of its forward that it does not take, and that are in memory

    @property
    def graph(self) -> fx.Graph:
        """The FX graph."""
        return self.gm.graph

    def nodes(self, *roles: Role) -> Iterator[fx.Node]:
        """Nodes of the given roles in graph order."""
        return (node for node in self.graph.nodes if role_of(node) in roles)

    def order(self) -> dict[fx.Node, int]:
        """Position of each node; valid until the next edit."""
        return {node: index for index, node in enumerate(self.graph.nodes)}

    def copy(self) -> StepGraph:
        """The same graph with new nodes; records, fake values and the module's code are shared."""
        copied = fx.Graph()
        returned = copied.graph_copy(self.graph, {})
        copied.output(returned).meta.update(self.output.meta)
        return StepGraph(LazyGraphModule(self.gm, copied), self.phase, self.beside_bytes)

    @property
    def output(self) -> fx.Node:
        """The output node."""
        return self.graph.output_node()
