"""All that runs around one compiled graph at every step, as plain data that can be stored beside its code."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from fsdp_compile._torch.context_parallel import balance_in_trace
from fsdp_compile.ir.graph import Phase, StepGraph
from fsdp_compile.lower.failed_collective import waits_of
from fsdp_compile.lower.gradient_outputs import GradOutput, grad_outputs, note_grad_outputs
from fsdp_compile.lower.profiled_calls import ProfiledCalls
from fsdp_compile.lower.unused_outputs import Sources, UnusedOutputs, note_unused
from fsdp_compile.lower.wrappers import (
    Compiled,
    FlatInput,
    FlatKey,
    Noted,
    check_inputs,
    count_reads,
    counted_reads,
    flat_inputs,
    host_copies_from,
    keep_balance,
    note_order,
    noted_order,
    one_by_one,
    runs_optimizers,
    tangents_of,
    units_of,
    wait_for_host_copies,
    without_autograd,
)


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """What runs around a compiled graph; positions are those of its inputs.

    Attributes:
        units: Whose parameter groups it reads, as errors name them.
        waits: What it waits for, as errors name it, by the names of its nodes, in its order.
        inputs: Of a forward: parameter groups that are checked where a compiled function enters it.
        noted: What ranks compare.
        grad_outputs: Of a backward: the gradients that it makes.
        counted: Parameter groups that are updated in backward, and that both graphs of the region read.
        tangents: Of a backward: the gradients of outputs.
        unused: Of a backward: how it finds outputs that no rank uses, if that makes a difference.
        host_copies_from: Type of the device from which it copies gradients to the host; empty if it copies none.
        has_updates: Whether it runs optimizers.
        profiled: Its calls that have ranges in a profile.
        balanced: Of a forward that was traced with context parallelism: whether for tokens that are balanced.
    """

    phase: Phase
    units: str
    waits: Mapping[str, str]
    inputs: tuple[FlatInput, ...]
    noted: tuple[Noted, ...]
    grad_outputs: tuple[GradOutput, ...]
    counted: tuple[int, ...]
    tangents: tuple[int, ...]
    host_copies_from: str
    has_updates: bool
    profiled: ProfiledCalls
    balanced: bool | None
    unused: UnusedOutputs | None = None

    @staticmethod
    def of(
        step: StepGraph,
        digests: Mapping[str, int],
        again: frozenset[FlatKey],
        sources: Sources | None = None,
    ) -> Surroundings:
        """What belongs around a transformed graph.

        Args:
            step: The graph, with its markers.
            digests: What stands for its collectives, by the alias of their process group.
            again: Parameter groups that `read_again` found in its region.
            sources: Of a backward whose gradients are not all computed from the same outputs' gradients.
        """
        is_forward = step.phase is Phase.FORWARD
        made = () if is_forward else tuple(grad_outputs(step))
        return Surroundings(
            phase=step.phase,
            units=units_of(step),
            waits=waits_of(step.graph),
            inputs=tuple(flat_inputs(step)) if is_forward else (),
            noted=tuple(noted_order(step, digests)),
            grad_outputs=made,
            counted=tuple(counted_reads(step, again)),
            tangents=() if is_forward else tuple(tangents_of(step)),
            host_copies_from=host_copies_from(step),
            has_updates=runs_optimizers(step),
            profiled=ProfiledCalls.of(step),
            balanced=balance_in_trace() if is_forward else None,
            unused=None if sources is None else UnusedOutputs.of(step, sources),
        )

    def around(self, compiled: Compiled) -> Compiled:
        """The compiled graph with all of it."""
        compiled = self.profiled.around(compiled)
        if not self.has_updates:
            compiled = without_autograd(compiled)
        if self.host_copies_from:
            compiled = wait_for_host_copies(compiled, self.host_copies_from)
        if self.grad_outputs:
            compiled = note_grad_outputs(compiled, self.grad_outputs)
        if self.unused is not None:
            compiled = note_unused(compiled, self.unused)
        if self.counted:
            compiled = count_reads(compiled, self.counted, self.phase)
        if self.balanced is not None:
            compiled = keep_balance(compiled, self.balanced)
        if self.noted:
            compiled = note_order(compiled, self.noted, self.phase, self.units, self.waits)
        if self.tangents:
            compiled = one_by_one(compiled, self.tangents, has_updates=self.has_updates)
        return check_inputs(compiled, self.inputs) if self.inputs else compiled
