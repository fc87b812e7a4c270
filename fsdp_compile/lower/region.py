"""One compile of one Dynamo graph: the callbacks through which AOTAutograd and Inductor pass us their graphs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import fx

from fsdp_compile.capture.flat_inputs import name_inputs
from fsdp_compile.capture.functions import refuse_hidden_reads
from fsdp_compile.capture.own_waits import wait_one_by_one
from fsdp_compile.cost.memory import bytes_beside
from fsdp_compile.errors import BudgetTooSmallError, FSDPCompileError
from fsdp_compile.ir.graph import Phase, Record, StepGraph
from fsdp_compile.lower.compiled_regions import GraphText
from fsdp_compile.lower.compiled_step import Compiled, CompiledStep, read_again
from fsdp_compile.lower.progress import say, stage
from fsdp_compile.lower.shared_plan import Compared, Follow, Graphs, Lines, collectives_of, lines_of, read_in
from fsdp_compile.lower.unused_outputs import Sources, gradient_sources
from fsdp_compile.ops.effects import erase_markers
from fsdp_compile.partition.cast_before_gather import cast_before_gather
from fsdp_compile.partition.partition import partition
from fsdp_compile.partition.recompute import blocks, with_fewest
from fsdp_compile.passes.update_in_backward import claim_gradients, release_gradients
from fsdp_compile.pipeline import without_collections

Transform = Callable[..., StepGraph]
"""Runs the passes on a graph; a second argument, if any, are the collectives of the plan that it has to follow."""
Keep = Callable[[StepGraph, StepGraph], object]


def nothing(*_: object) -> None:
    """What callbacks do by default: nothing is kept unsharded, compared, shown or refused."""


@dataclasses.dataclass(frozen=True)
class GraphSummary:
    """What is known of a transformed graph without its nodes: it is stored beside the graph's code.

    Attributes:
        step: What runs before and after its code.
        compared: What ranks compare.
        graph: For reports.
    """

    step: CompiledStep
    compared: Compared
    graph: GraphText


@dataclasses.dataclass
class Region:
    """State of one compile.

    Attributes:
        flats: Records of Dynamo's inputs that are parameter groups, or belong to one.
        transform: Runs the passes on one graph.
        settle: Called with what ranks compare of all graphs once these are transformed, and with what transforms them
            again by the plan of another rank.
        may_follow: Whether that may happen.
        plan: The collectives of a plan that the graphs have to follow from the first; empty for their own.
        show: Called with each transformed graph, or its text where the compile was loaded, for reports.
        refuse: Called with the error if there will be no such graphs.
        keep: Chooses what stays unsharded from forward to backward where that was left open.
        number: Of the region among those of its model, for what is said while it compiles.
        may_recompute: Whether blocks are recomputed in backward where a budget does not hold their activations.
        shares_code: Whether segments of graphs that are alike are lowered once.
        key: All that its compile depends on besides Dynamo's graph, if the compile is stored: then ranks of a host wait
            for the one that compiles, and all compare when they have it.
        steps: The transformed graphs, forward first; empty until AOTAutograd has traced.
        recomputed: How many blocks they compute again.
        again: Parameter groups that are updated in backward, and that both graphs read.
        read: What the program reads, in its order.
        inserted: The collectives of each graph before it was planned.
        collectives: Those of each transformed graph.
        texts: The text of each transformed graph, if the compile is stored.
        loaded: Summaries of the graphs if the compile was loaded.
        sources: Of its backward, if gradients are not all computed from the same outputs' gradients.
    """

    flats: Mapping[int, Record]
    transform: Transform
    keep: Keep = nothing
    number: int = 0
    may_recompute: bool = False
    shares_code: bool = False
    key: str | None = None
    settle: Callable[[Graphs, Follow], None] = nothing
    may_follow: bool = False
    plan: Lines = ()
    show: Callable[[StepGraph | GraphText], None] = nothing
    refuse: Callable[[FSDPCompileError], None] = nothing
    steps: list[StepGraph] = dataclasses.field(default_factory=list)
    recomputed: int = 0
    again: frozenset[Hashable] = frozenset()
    read: Lines = ()
    inserted: dict[Phase, Lines] = dataclasses.field(default_factory=dict)
    collectives: dict[Phase, tuple[tuple[str, str], ...]] = dataclasses.field(default_factory=dict)
    texts: dict[Phase, GraphText] = dataclasses.field(default_factory=dict)
    loaded: list[GraphSummary] = dataclasses.field(default_factory=list)
    sources: Sources | None = None
    _before: list[StepGraph] = dataclasses.field(default_factory=list)

    @property
    def tells_unused_outputs(self) -> bool:
        """Whether backward has to know which outputs the loss does not use."""
        return self.sources is not None or any(each.step.unused is not None for each in self.loaded)

    def partition(self, joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Splits the joint graph and transforms both halves."""
        with self._telling_of_refusals(), without_collections():
            refuse_hidden_reads(joint)
            wait_one_by_one(joint.graph)
            name_inputs(joint.graph, self.flats)
            self.read = read_in(joint.graph)
            self.steps = with_fewest(
                lambda recomputed: self._split(joint, inputs, recomputed, kwargs),
                lambda: len(blocks(joint.graph)) if self.may_recompute else 0,
            )
            self._settle_now()
        self.again = read_again(*self.steps)
        claim_gradients(*self.steps)
        return self.steps[0].gm, self.steps[1].gm

    def _split(self, joint: fx.GraphModule, inputs: Any, recomputed: int, kwargs: Mapping[str, Any]) -> list[StepGraph]:
        if self.may_recompute:
            joint = StepGraph(joint, Phase.FORWARD).copy().gm  # another attempt may follow
        if recomputed:
            say(f"region {self.number}: computing {recomputed} of {len(blocks(joint.graph))} blocks again in backward")
        self.recomputed = recomputed
        forward, backward = partition(joint, inputs, recomputed=recomputed, **kwargs)
        steps = StepGraph(forward, Phase.FORWARD), StepGraph(backward, Phase.BACKWARD)
        steps[1].beside_bytes = bytes_beside(*steps)
        self.sources = gradient_sources(steps[1])
        self.keep(*steps)
        self._remember(steps)
        return self._both(steps, self.plan)

    def _remember(self, halves: Iterable[StepGraph]) -> None:
        if self.may_follow and self.key is None:
            self._before = [half.copy() for half in halves]

    @contextmanager
    def _telling_of_refusals(self) -> Iterator[None]:
        try:
            yield
        except FSDPCompileError as error:
            self.refuse(error)
            raise

    def _both(self, halves: Sequence[StepGraph], plan: Lines = ()) -> list[StepGraph]:
        """Transforms forward and backward; if they exceed their budget, the error names the larger need."""
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

    def _settle_now(self) -> None:
        # Only when all are transformed: a rank whose second graph is refused must not have announced the first.
        graphs = self._described()
        if self.key is None:
            self.settle(graphs, self._follow)
        else:
            self.texts = {step.phase: GraphText.of(step) for step in self.steps}
        for step in self.steps:
            self.show(step)

    def _follow(self, plan: Lines) -> Graphs:
        """Transforms the graphs again, so that they follow a plan."""
        self.steps = self._both([half.copy() for half in self._before], plan)
        return self._described()

    def _described(self) -> Graphs:
        self.collectives = {step.phase: collectives_of(step) for step in self.steps}
        return self._compared()

    def _compared(self) -> dict[Phase, Compared]:
        # A pipeline that was told to stop early has inserted nothing, and has nothing to plan.
        read = {Phase.FORWARD: self.read}
        inserted = self.inserted
        return {p: Compared(read.get(p, ()), inserted.get(p, ()), it) for p, it in self.collectives.items()}

    def settle_stored(self, follow: Follow) -> None:
        """Compares a compile that is stored with those of other ranks, once it is compiled or loaded.

        Not before: a rank of this host may wait for this one to compile, and would not answer.
        """
        with self._telling_of_refusals():
            self.settle(self.stored(), follow)

    def stored(self) -> Graphs:
        """What ranks compare of a compile that is stored, now that it is compiled or loaded."""
        if self.steps:  # else what was loaded was not complete, and was compiled
            return self._compared()
        for summary in self.loaded:
            self.show(summary.graph)
        return {each.step.phase: each.compared for each in self.loaded}

    def inference(self, gm: fx.GraphModule) -> None:
        """Transforms a graph that has no backward and so was never partitioned."""
        with self._telling_of_refusals(), without_collections():
            refuse_hidden_reads(gm)
            wait_one_by_one(gm.graph)
            name_inputs(gm.graph, self.flats)
            self.read = read_in(gm.graph)
            cast_before_gather(gm.graph)
            step = StepGraph(gm, Phase.FORWARD)
            self._remember([step])
            self.steps = self._both([step], self.plan)
            self._settle_now()
            if self.steps[0].gm is not gm:
                gm.graph = self.steps[0].graph

    def _said(self, doing: str, phase: Phase, graphs: int) -> str:
        place = 1 if phase is Phase.FORWARD else 2
        return f"region {self.number}: {doing} the {phase.value} graph ({place} of {graphs})"

    def finish(self, gm: fx.GraphModule, phase: Phase, compile_graph: Callable[[], Compiled]) -> Compiled:
        """Compiles a transformed graph and adds what has to run around it."""
        step = self.compiled_step(gm, phase)
        with self.lowering(phase):
            compiled = compile_graph()
        return step.around(compiled)

    def compiled_step(self, gm: fx.GraphModule, phase: Phase) -> CompiledStep:
        """What runs around a transformed graph, whose markers are erased: from then on it can be lowered."""
        step = StepGraph(gm, phase)
        if phase is Phase.BACKWARD:
            release_gradients(step)
        found = CompiledStep.of(step, self.again, self.sources if phase is Phase.BACKWARD else None)
        erase_markers(gm.graph)
        return found

    def summary(self, step: CompiledStep) -> GraphSummary:
        """What is stored beside the code of a graph."""
        return GraphSummary(step, self._compared()[step.phase], self.texts[step.phase])

    def lowering(self, phase: Phase) -> AbstractContextManager[None]:
        """Says that a graph is being lowered."""
        return stage(self._said("lowering", phase, len(self.steps)))
