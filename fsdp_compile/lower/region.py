"""One compile of one Dynamo graph: the callbacks through which AOTAutograd and Inductor pass us their graphs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import fx

from fsdp_compile.capture.functions import refuse_hidden_reads
from fsdp_compile.capture.inputs import name_inputs
from fsdp_compile.errors import BudgetTooSmallError, FSDPCompileError
from fsdp_compile.ir.graph import Phase, Record, StepGraph
from fsdp_compile.lower.agreement import digests
from fsdp_compile.lower.gradient_outputs import grad_outputs, note_grad_outputs
from fsdp_compile.lower.progress import stage
from fsdp_compile.lower.wrappers import (
    Compiled,
    FlatKey,
    check_inputs,
    count_reads,
    flat_inputs,
    host_copies_from,
    note_order,
    read_again,
    refuse_batched_gradients,
    runs_optimizers,
    wait_for_host_copies,
    without_autograd,
)
from fsdp_compile.ops.effects import erase_markers
from fsdp_compile.partition.cast_before_gather import cast_before_gather
from fsdp_compile.partition.gather_messages import expand_gather_messages
from fsdp_compile.partition.partition import partition

Transform = Callable[[StepGraph], StepGraph]
Keep = Callable[[StepGraph, StepGraph], None]


def keep_nothing(forward: StepGraph, backward: StepGraph) -> None:
    """Leaves forward and backward as the partition made them."""


def _announce_nothing(step: StepGraph) -> None:
    """For graphs that no other rank compiles."""


def _refuse_silently(error: FSDPCompileError) -> None:
    """For errors that concern no other rank."""


@dataclasses.dataclass
class Region:
    """State of one compile.

    Attributes:
        flats: Records of Dynamo's inputs that are parameter groups, or belong to one.
        transform: Runs the passes on one graph.
        announce: Called with each graph once all of a compile are transformed: ranks compare them.
        refuse: Called with the error if there will be no such graphs.
        keep: Chooses what stays unsharded from forward to backward where that was left open.
        number: Of the region among those of its model, for what is said while it compiles.
        shares_code: Whether segments of graphs that are alike are lowered once.
        steps: The transformed graphs, forward first; empty until AOTAutograd has traced.
        again: Parameter groups that are updated in backward, and that backward reads as forward does.
        digests: What stands for the collectives of each transformed graph, by process group.
    """

    flats: Mapping[int, Record]
    transform: Transform
    keep: Keep = keep_nothing
    number: int = 0
    shares_code: bool = False
    announce: Callable[[StepGraph], None] = _announce_nothing
    refuse: Callable[[FSDPCompileError], None] = _refuse_silently
    steps: list[StepGraph] = dataclasses.field(default_factory=list)
    again: frozenset[FlatKey] = frozenset()
    digests: dict[Phase, dict[str, int]] = dataclasses.field(default_factory=dict)

    def partition(self, joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Splits the joint graph and transforms both halves."""
        with self._telling_of_refusals():
            refuse_hidden_reads(joint)
            name_inputs(joint.graph, self.flats)
            forward, backward = partition(joint, inputs, **kwargs)
            steps = StepGraph(forward, Phase.FORWARD), StepGraph(backward, Phase.BACKWARD)
            self.keep(*steps)
            self.steps = self._both(steps)
        self.again = read_again(*self.steps)
        return forward, backward

    @contextmanager
    def _telling_of_refusals(self) -> Iterator[None]:
        try:
            yield
        except FSDPCompileError as error:
            self.refuse(error)
            raise

    def _both(self, halves: Sequence[StepGraph]) -> list[StepGraph]:
        """Transforms forward and backward; if they exceed their budget, the error names the larger need."""
        steps: list[StepGraph] = []
        refused: list[BudgetTooSmallError] = []
        # Both are planned even if one is refused, so that the user learns in one run what both need.
        for half in halves:
            try:
                with stage(self._said("passes over", half.phase, len(halves))):
                    steps.append(self.transform(half))
            except BudgetTooSmallError as error:
                refused.append(error)
        if refused:
            raise max(refused, key=lambda error: error.least_bytes)
        return self._announced(steps)

    def _announced(self, steps: list[StepGraph]) -> list[StepGraph]:
        # Only when all are transformed: a rank whose second graph is refused must not have announced the first.
        for step in steps:
            self.announce(step)
            self.digests[step.phase] = digests(step)
        return steps

    def inference(self, gm: fx.GraphModule) -> None:
        """Transforms a graph that has no backward and so was never partitioned."""
        with self._telling_of_refusals():
            refuse_hidden_reads(gm)
            name_inputs(gm.graph, self.flats)
            cast_before_gather(gm.graph)
            expand_gather_messages(gm.graph)
            with stage(self._said("passes over", Phase.FORWARD, 1)):
                step = self.transform(StepGraph(gm, Phase.FORWARD))
            self.steps = self._announced([step])

    def _said(self, doing: str, phase: Phase, graphs: int) -> str:
        place = 1 if phase is Phase.FORWARD else 2
        return f"region {self.number}: {doing} the {phase.value} graph ({place} of {graphs})"

    def finish(self, gm: fx.GraphModule, phase: Phase, compile_graph: Callable[[], Compiled]) -> Compiled:
        """Compiles a transformed graph and adds what has to run around it."""
        step = StepGraph(gm, phase)
        noted = grad_outputs(step) if phase is Phase.BACKWARD else []
        inputs = flat_inputs(step) if phase is Phase.FORWARD else []
        copies_from = host_copies_from(step)
        updates = runs_optimizers(step)
        erase_markers(gm.graph)
        gm.recompile()
        with stage(self._said("lowering", phase, len(self.steps))):
            compiled = compile_graph()
        if not updates:
            compiled = without_autograd(compiled)
        if copies_from:
            compiled = wait_for_host_copies(compiled, copies_from)
        if noted:
            compiled = note_grad_outputs(compiled, noted)
        if self.again:
            compiled = count_reads(compiled, step, self.again)
        if noted:
            compiled = refuse_batched_gradients(compiled, step)
        compiled = note_order(compiled, step, self.digests.get(phase, {}))
        return check_inputs(compiled, inputs) if inputs else compiled
