"""One compile of one Dynamo graph: the callbacks through which AOTAutograd and Inductor pass us their graphs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from fsdp_compile._torch.distributed import collectives
from fsdp_compile.capture.flat_inputs import name_inputs
from fsdp_compile.capture.functions import refuse_hidden_reads, refuse_places_in_storage
from fsdp_compile.cost.hardware import Hardware
from fsdp_compile.cost.memory import bytes_beside
from fsdp_compile.errors import BudgetTooSmallError, FSDPCompileError
from fsdp_compile.fsdp2.param_group import ParamGroup
from fsdp_compile.fsdp2.unit import Unit
from fsdp_compile.ir.graph import Phase, Record, StepGraph
from fsdp_compile.lower.compiled_step import Compiled, CompiledStep, read_again
from fsdp_compile.lower.graph_ends import take_head, take_tail
from fsdp_compile.lower.shared_plan import Compared, Follow, Lines, lines_of, read_in
from fsdp_compile.lower.unused_outputs import Sources, gradient_sources
from fsdp_compile.ops.effects import erase_markers
from fsdp_compile.options import FSDPOptions
from fsdp_compile.partition.cast_before_gather import cast_before_gather
from fsdp_compile.partition.partition import partition
from fsdp_compile.partition.recompute import blocks, with_fewest
from fsdp_compile.passes.update_in_backward import claim_gradients, release_gradients
from fsdp_compile.pipeline import without_collections
from fsdp_compile.progress import say, stage

_WAIT_FOR_ALL: Any = getattr(getattr(collectives, "wait_tensors", None), "default", "no such operator")
"""The program's wait for several messages, which torch traces since 2.15."""


def nothing(*_: object) -> None:
    """What callbacks do by default: nothing is kept unsharded, compared, shown or refused."""


@dataclasses.dataclass
class Region:
    """State of one compile.

    Attributes:
        flats: Records of Dynamo's inputs that are parameter groups, or belong to one.
        transform: Runs the passes on one graph; a second argument is the plan that it has to follow, if there is one.
        keep: Chooses what stays unsharded from forward to backward where that was left open.
        number: Of the region among those of its model, for what is said while it compiles.
        may_recompute: Whether blocks are recomputed in backward where a budget does not hold their activations.
        graphs_ahead: How many graphs of the model may gather while one of these runs: a number, or its `None` for what
            fits. Without it, as for a whole model, all collectives stay in their graph.
        settle: Called with what ranks compare of all graphs once these are transformed, and with what transforms them
            again by the plan of another rank.
        may_follow: Whether that may happen.
        show: Called with each transformed graph, for reports.
        refuse: Called with the error if there will be no such graphs.
        steps: The transformed graphs, forward first; empty until AOTAutograd has traced.
        recomputed: How many blocks they compute again.
        again: Parameter groups that are updated in backward, and that both graphs read.
        read: What the program reads, in its order.
        inserted: The collectives of each graph before it was planned.
        sources: Of its backward, if gradients are not all computed from the same outputs' gradients.
    """

    flats: Mapping[int, Record]
    transform: Callable[..., StepGraph]
    keep: Callable[[StepGraph, StepGraph], object] = nothing
    number: int = 0
    may_recompute: bool = False
    graphs_ahead: Callable[[Phase], int | None] | None = None
    settle: Callable[[Compared, Follow], None] = nothing
    may_follow: bool = False
    show: Callable[[StepGraph], None] = nothing
    refuse: Callable[[FSDPCompileError], None] = nothing
    steps: list[StepGraph] = dataclasses.field(default_factory=list)
    recomputed: int = 0
    again: frozenset[Hashable] = frozenset()
    read: Lines = ()
    inserted: dict[Phase, Lines] = dataclasses.field(default_factory=dict)
    sources: Sources | None = None
    _before: list[StepGraph] = dataclasses.field(default_factory=list)

    def partition(self, joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Splits the joint graph and transforms both halves."""
        with self._transforming(joint):
            self.steps = with_fewest(
                lambda recomputed: self._split(joint, inputs, recomputed, kwargs),
                lambda: len(blocks(joint.graph)) if self.may_recompute else 0,
            )
        self.again = read_again(*self.steps)
        claim_gradients(*self.steps)
        return self.steps[0].gm, self.steps[1].gm

    def blocks_again(self, joint: fx.GraphModule, attempted: int) -> int:  # noqa: ARG002
        """How many blocks backward computes again; a report may have another number than a budget leads to."""
        return attempted

    def _split(self, joint: fx.GraphModule, inputs: Any, recomputed: int, kwargs: Mapping[str, Any]) -> list[StepGraph]:
        if self.may_recompute:
            joint = StepGraph(joint, Phase.FORWARD).copy().gm  # another attempt may follow
        recomputed = self.blocks_again(joint, recomputed)
        if recomputed:
            say(f"region {self.number}: computing {recomputed} of {len(blocks(joint.graph))} blocks again in backward")
        self.recomputed = recomputed
        forward, backward = partition(joint, inputs, recomputed=recomputed, **kwargs)
        steps = StepGraph(forward, Phase.FORWARD), StepGraph(backward, Phase.BACKWARD)
        steps[1].beside_bytes = bytes_beside(*steps)
        self.sources = gradient_sources(steps[1])
        self.keep(*steps)
        return self._both(steps)

    @contextmanager
    def _transforming(self, gm: fx.GraphModule) -> Iterator[None]:
        """Reads a graph that AOTAutograd made, before the block transforms it, and compares the result with others."""
        try:
            with without_collections():
                refuse_hidden_reads(gm)
                refuse_places_in_storage(gm)
                _wait_one_by_one(gm.graph)
                name_inputs(gm.graph, self.flats)
                self.read = read_in(gm.graph)
                yield
                # Only when all are transformed: a rank whose second graph is refused must not have announced the first.
                self.settle(self._compared(), self._follow)
                for step in self.steps:
                    self.show(step)
        except FSDPCompileError as error:
            self.refuse(error)
            raise

    def _compared(self) -> Compared:
        return Compared.of(self.steps, self.read, self.inserted)

    def _both(self, halves: Sequence[StepGraph], plan: Lines = ()) -> list[StepGraph]:
        """Transforms forward and backward; if they exceed their budget, the error names the larger need."""
        if self.may_follow and not plan:
            self._before = [half.copy() for half in halves]
        steps: list[StepGraph] = []
        refused: list[BudgetTooSmallError] = []
        # Both are planned even if one is refused, so that the user learns in one run what both need.
        for half in halves:
            try:
                with stage(self._said("passes over", half.phase, len(halves))):
                    steps.append(self.transform(half, *([lines_of(half.phase, plan)] if plan else [])))
            except BudgetTooSmallError as error:
                refused.append(error)
        if refused:
            raise max(refused, key=lambda error: error.least_bytes)
        return steps

    def _follow(self, plan: Lines) -> Compared:
        """Transforms the graphs again, so that they follow a plan."""
        self.steps = self._both([half.copy() for half in self._before], plan)
        return self._compared()

    def inference(self, gm: fx.GraphModule) -> None:
        """Transforms a graph that has no backward and so was never partitioned."""
        with self._transforming(gm):
            cast_before_gather(gm.graph)
            self.steps = self._both([StepGraph(gm, Phase.FORWARD)])
        if self.steps[0].gm is not gm:
            gm.graph = self.steps[0].graph

    def _said(self, doing: str, phase: Phase, graphs: int) -> str:
        place = 1 if phase is Phase.FORWARD else 2
        return f"region {self.number}: {doing} the {phase.value} graph ({place} of {graphs})"

    def finish(self, gm: fx.GraphModule, phase: Phase, compile_graph: Callable[[Sequence[Any]], Compiled]) -> Compiled:
        """Compiles a transformed graph and adds what has to run around it."""
        step = StepGraph(gm, phase)
        if phase is Phase.BACKWARD:
            release_gradients(step)
        erase_markers(gm.graph)  # from then on it can be lowered
        head = tail = None
        messages: list[Any] = []
        if self.graphs_ahead is not None:
            ahead = self.graphs_ahead(phase)
            trains = phase is Phase.FORWARD and len(self.steps) == 2
            head, messages = take_head(step, ahead, has_backward=trains)
            tail = take_tail(step) if ahead != 0 and phase is Phase.BACKWARD else None
        around = CompiledStep.of(step, self.again, self.sources if phase is Phase.BACKWARD else None)
        around = dataclasses.replace(around, head=head, tail=tail)
        with stage(self._said("lowering", phase, len(self.steps))):
            return around.around(compile_graph(messages))


def _wait_one_by_one(graph: fx.Graph) -> None:
    """Writes the program's waits for several messages as waits for one each: whatever orders or checks knows one kind.

    %w = wait_tensors([%c[0], %c[1]]), %w[0], %w[1]   ->   wait_tensor(%c[0]), wait_tensor(%c[1])
    """
    for wait in graph.find_nodes(op="call_function", target=_WAIT_FOR_ALL):
        for item in list(wait.users):
            messages: Any = wait.args[0]
            with graph.inserting_before(wait):
                one = graph.call_function(collectives.wait_tensor.default, (messages[item.args[1]],))
            one.meta = dict(item.meta)
            item.replace_all_uses_with(one)
            graph.erase_node(item)
        graph.erase_node(wait)


@dataclasses.dataclass(eq=False)
class CompiledRegion:
    """The graphs of one compiled region as the passes left them, forward first, for `explain(compiled)`.

    Lowering consumes a graph, so each unit that it reads stores a copy of its nodes. Regions of a model are numbered in
    the order of their compiles. `hardware` is what it was planned for, if that was given.
    """

    number: int
    lower: str
    hardware: Hardware | None
    steps: list[StepGraph] = dataclasses.field(default_factory=list)


def register_region(groups: Sequence[ParamGroup], options: FSDPOptions) -> CompiledRegion:
    """Makes a region for the graphs of a compile; of several compiles of one region the last is kept.

    The units of the parameter groups that it reads store it.
    """
    units: list[Unit] = list(dict.fromkeys(group.unit for group in groups))
    of_models = {unit for model in {unit.model for unit in units} for unit in model.units}
    earlier = [region.number for unit in of_models for region in unit.compiled_regions.values()]
    region = CompiledRegion(max(earlier, default=-1) + 1, options.lower, options.planned_for)
    key = tuple(map(id, groups))
    for unit in units:
        if torch.is_grad_enabled() or key not in unit.compiled_regions:  # evaluation does not replace training
            unit.compiled_regions[key] = region
    return region


def regions_of(units: Iterable[Unit]) -> list[CompiledRegion]:
    """Regions that read any of `units`, each once, in the order in which they were compiled."""
    found = {region for unit in units for region in unit.compiled_regions.values() if region.steps}
    return sorted(found, key=lambda region: region.number)
