"""What runs before and after a compiled graph in each step: one object, which looks its parameter groups up once.

`entered` is around both graphs of a region.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeAlias

import torch

from fsdp_compile._torch.autograd import (
    backward_in_progress,
    below_autograd,
    leave_unused_undefined,
    outside_of_selective_checkpointing,
)
from fsdp_compile._torch.tensors import is_batched, join_batch, note_gathered, split_batch
from fsdp_compile.capture.flat_inputs import PENDING
from fsdp_compile.comm.failures import refuse_lost_ranks
from fsdp_compile.errors import UnsupportedModelError
from fsdp_compile.fsdp2 import edge
from fsdp_compile.fsdp2.buffers import CastBuffer
from fsdp_compile.fsdp2.param_group import ParamGroup
from fsdp_compile.fsdp2.pipeline import Head, Tail, gathering, reduced
from fsdp_compile.fsdp2.unit import Unit
from fsdp_compile.ir.graph import MADE, Phase, Record, Role, StepGraph, require, role_of
from fsdp_compile.ir.queries import beside, flat_of
from fsdp_compile.layout.spec import GradPlacement, Update
from fsdp_compile.lower.communicating_calls import CommunicatingCall, communicating_call, failed_wait, ranges
from fsdp_compile.lower.unused_outputs import Sources, UnusedOutputs, tangents_of

Compiled = Callable[[list[Any]], Any]
Groups: TypeAlias = Mapping[int, ParamGroup]
"""The parameter groups of one run of a graph, by the positions of their flat tensors."""


@dataclasses.dataclass(frozen=True)
class GradOutput:
    """The gradients of one flat parameter that a backward graph makes.

    Attributes:
        flat: Position of the flat parameter among the inputs.
        offsets: Slots that get gradients.
        grad_placement: How far they are reduced.
        pending: Positions of earlier gradients that are added to them, by how far those are reduced.
        update: Where the gradients go: out of the graph, or into an update inside of it.
    """

    flat: int
    offsets: tuple[int, ...]
    grad_placement: GradPlacement
    pending: tuple[tuple[GradPlacement, int], ...]
    update: Update


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """What a compiled graph needs to know of FSDP; positions are those of its inputs.

    Attributes:
        flats: Positions of the flat tensors, and the titles of their units in the graph.
        calls: Those that communicate.
        counted: Flat tensors that are updated in backward, and that both graphs of the region read.
        tangents: Of a backward: positions of the gradients of outputs.
        unused: Of a backward: how it finds outputs that no rank uses, if that makes a difference.
        host_copies_from: Type of the device from which it copies gradients to the host; empty if it copies none.
        has_updates: Whether it runs optimizers, which may need autograd.
        head: The all-gathers that were taken out of its beginning, if any.
        tail: What was taken out of its end, if anything.
    """

    phase: Phase
    flats: Mapping[int, str]
    calls: tuple[CommunicatingCall, ...]
    counted: tuple[int, ...]
    grads: tuple[GradOutput, ...]
    tangents: tuple[int, ...]
    unused: UnusedOutputs | None
    host_copies_from: str
    has_updates: bool
    head: Head | None = None
    tail: Tail | None = None

    @staticmethod
    def of(step: StepGraph, again: Collection[Hashable] = (), sources: Sources | None = None) -> CompiledStep:
        """Reads a transformed graph: with what `read_again` found in its region, and, of a backward, its `sources`."""
        is_forward, flats = step.phase is Phase.FORWARD, _flats_of(step)
        return CompiledStep(
            phase=step.phase,
            flats={i: record.unit for i, record in flats.items()},
            calls=tuple(call for node in step.graph.nodes if (call := communicating_call(node)) is not None),
            counted=tuple(i for i, record in flats.items() if flat_of(record) in again),
            grads=() if is_forward else tuple(_grad_outputs(step)),
            tangents=() if is_forward else tuple(tangents_of(step)),
            unused=None if sources is None else UnusedOutputs.of(step, sources),
            host_copies_from=next((require(node).specs[0].compute for node in step.nodes(Role.OFFLOAD_OUT)), ""),
            has_updates=any(True for _ in step.nodes(Role.UPDATE)),
        )

    def around(self, compiled: Compiled) -> Compiled:
        """What runs in the place of the compiled graph."""

        def run(args: list[Any]) -> Any:
            batched = [i for i in self.tangents if isinstance(args[i], torch.Tensor) and is_batched(args[i])]
            if batched:
                return self._one_by_one(functools.partial(run_once, tail_waits=True), args, batched)
            return run_once(args)

        def run_once(args: list[Any], *, tail_waits: bool = False) -> Any:
            groups, produced = self.before(args)
            names = {self.flats[at]: group.unit.title for at, group in groups.items()}
            # Derivatives of collectives are written in Python, and would run at each call to no purpose.
            with nullcontext() if self.has_updates else below_autograd():
                try:
                    if self.head is not None:
                        with outside_of_selective_checkpointing():  # it repeats other gathers than forward had
                            args += gathering(self.head, groups, args)
                    with ranges(self.calls, names):
                        outputs = compiled(args)
                    if self.tail is not None:
                        with outside_of_selective_checkpointing():
                            outputs = reduced(self.tail, groups, outputs, now=tail_waits)
                except RuntimeError as error:
                    units = ", ".join(dict.fromkeys(names.get(title, title) for title in self.flats.values()))
                    doing = f"in a compiled {self.phase.value} of unit {units}"
                    waited = failed_wait(error, self.calls)
                    refuse_lost_ranks(error, doing if waited is None else f"waiting for {waited} {doing}")
                    raise
            self.after(groups, produced)
            return outputs

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def before(self, args: list[Any]) -> tuple[Groups, list[Collection[int]]]:
        """Puts pending gradients, and zeros for outputs that are not used, in the place of what stands for them.

        Also returns the offsets of the parameters of each of `grads` that get gradients.
        """
        groups = {at: group for at in self.flats if (group := ParamGroup.of(args[at])) is not None}
        self._begin({group.unit for group in groups.values()})
        for updates in (groups[at].updates for at in self.counted if at in groups):
            if self.phase is Phase.FORWARD:
                updates.begin_forward()
            else:
                updates.begin_backward()
        if any(each.update is Update.IN_BACKWARD and each.flat not in groups for each in self.grads):
            raise UnsupportedModelError(
                "backward was given a copy of the parameters that it is to update: hooks on saved tensors replaced "
                "them",
                where="torch.autograd.graph.saved_tensors_hooks() or save_on_cpu(), step_in_backward()",
                instead="hooks that return the very tensors that do not require grad or are leaves, or "
                "optimizer.step() without step_in_backward()",
            )
        waiting = {each.flat: self._take(args, each, groups.get(each.flat)) for each in self.grads}
        unused: Mapping[int, Collection[int]] = {}
        if self.unused is not None:
            ranks = {
                each.flat: _ranks_that_reduce(groups[each.flat], each.grad_placement)
                for each in self.grads
                if each.flat in groups and each.flat in self.unused.sources
            }
            unused = self.unused.find(args, ranks, waiting)
        produced: list[Collection[int]] = []
        for each in self.grads:
            produced.append(offsets := set(each.offsets).difference(unused.get(each.flat, ())))
            if each.update is Update.IN_BACKWARD:
                group = groups[each.flat]
                group.updates.chosen = edge.accumulated(group, each.grad_placement) & offsets
        return groups, produced

    def _begin(self, units: Collection[Unit]) -> None:
        """Tells units that a forward uses them, or models that a backward runs, whose end they have to know."""
        if self.phase is Phase.FORWARD:
            for unit in units:
                unit.begin_graph()
        else:
            for model in {unit.model for unit in units}:
                model.at_end_of_backward(backward_in_progress(), reduces=False)

    def _take(self, args: list[Any], each: GradOutput, group: ParamGroup | None) -> Collection[int]:
        """Takes pending gradients; returns the offsets of the parameters that have any."""
        waiting, accumulated = set[int](), set[int]()
        ends = each.grad_placement is not GradPlacement.UNREDUCED
        if group is not None and ends and (group.unit.model.pending or group.ends_backward):
            accumulated = edge.accumulated(group, each.grad_placement).intersection(each.offsets)
        for placement, at in each.pending:
            if group is not None and accumulated:
                waiting |= group.pending.offsets(placement) & accumulated
                args[at] = group.pending.take(placement, accumulated)
            else:
                args[at] = torch.zeros(args[at].shape, dtype=args[at].dtype, device=args[at].device)
        if group is not None and accumulated:
            group.unit.model.at_end_of_backward(backward_in_progress(), reduces=True)
        return waiting

    def after(self, groups: Groups, produced: Sequence[Collection[int]]) -> None:
        """Tells the edges which parameters have gradients."""
        if self.host_copies_from not in ("", "cpu"):
            # It waits for each copy, now that all are queued.
            torch.get_device_module(self.host_copies_from).current_stream().synchronize()
        for each, offsets in zip(self.grads, produced, strict=True):
            group = groups.get(each.flat)
            if group is not None and each.update is Update.AFTER_BACKWARD:
                edge.mark_produced(group, offsets)

    def _one_by_one(self, run: Compiled, args: list[Any], batched: Sequence[int]) -> list[Any]:
        """Runs a backward for a batch of gradients one by one, since collectives take no batch."""
        batches = [split_batch(args[i]) for i in batched]
        if self.has_updates or not all(batches):
            raise UnsupportedModelError(
                "several gradients go through a compiled backward at once, whose collectives take one at a time",
                where="is_grads_batched=True, " + ("step_in_backward()" if self.has_updates else "a batch of batches"),
                instead="one call for each gradient, or torch.func.jacrev() of the compiled model",
            )
        results = []
        for gradients in zip(*batches, strict=True):
            # Compiled code may write into what it reads last; flat tensors are known by their addresses.
            own = [
                value.clone() if isinstance(value, torch.Tensor) and i not in self.flats and i not in batched else value
                for i, value in enumerate(args)
            ]
            for i, gradient in zip(batched, gradients, strict=True):
                own[i] = gradient
            results.append(run(own))
        joined = zip(*results, strict=True)
        return [join_batch(each) if isinstance(each[0], torch.Tensor) else each[0] for each in joined]


def _ranks_that_reduce(group: ParamGroup, placement: GradPlacement) -> tuple[str, ...]:
    """The groups of ranks that a backward exchanges gradients over; forwards keep shards of a unit in step anyway."""
    spec = group.params[0].spec
    return (spec.group, spec.replicate_group) if placement is GradPlacement.REDUCED else (spec.group,)


def read_again(forward: StepGraph, backward: StepGraph) -> frozenset[Hashable]:
    """Parameter groups that both graphs of a region read, and that are updated in backward."""
    first, second = ({flat_of(record): record for record in _flats_of(each).values()} for each in (forward, backward))
    updated = (key for key, record in first.items() if record.specs[0].update is Update.IN_BACKWARD)
    return frozenset(updated).intersection(second)


def _grad_outputs(step: StepGraph) -> Iterator[GradOutput]:
    """The flat parameters, and their slots, that a backward graph makes gradients for."""
    placeholders = step.graph.find_nodes(op="placeholder")
    place = {node: index for index, node in enumerate(placeholders)}
    made = {
        claim: spec
        for record in map(require, step.nodes(*MADE))
        for claim, spec in zip(record.claims, record.specs, strict=True)
    }
    updated = {place[node.all_input_nodes[0]] for node in step.nodes(Role.UPDATE)}
    for node, index in place.items():
        if role_of(node) is not Role.FLAT:
            continue
        flat = require(node)
        mine = [made[flat.unit, name] for name in flat.parameters if (flat.unit, name) in made]
        if mine:
            offsets = tuple(sorted(spec.offset for spec in mine))
            given = ((placement, beside(node, role)) for placement, role in PENDING.items())
            pending = tuple((placement, place[each]) for placement, each in given if each is not None)
            update = Update.IN_BACKWARD if index in updated else Update.AFTER_BACKWARD
            yield GradOutput(index, offsets, mine[0].grad_placement, pending, update)


def _flats_of(step: StepGraph) -> dict[int, Record]:
    placeholders = enumerate(step.graph.find_nodes(op="placeholder"))
    return {i: require(node) for i, node in placeholders if role_of(node) is Role.FLAT}


def entered(
    compiled: Callable[..., Any], flats: Sequence[int], parameters: Sequence[int], *, tells_unused: bool
) -> Callable[..., Any]:
    """Wraps what AOTAutograd made of a Dynamo graph.

    Compiled functions run no hook of a model in Python, which would follow parameters that users have changed.

    Args:
        compiled: It takes what the Dynamo graph takes.
        flats: Positions of flat tensors.
        parameters: Positions of gathered parameters among its results: an `nn.Parameter` for callers, as FSDP2's.
        tells_unused: Whether its backward has to know for which outputs there is no gradient.
    """

    def run(*args: Any) -> Any:
        groups = {at: group for at in flats if (group := ParamGroup.of(args[at])) is not None}
        if not all(group.unit.is_followed for group in groups.values()):
            args = _followed(args, groups)
        CastBuffer.follow_all()
        outputs = compiled(*args)
        CastBuffer.follow_all()
        for at in parameters:
            note_gathered(outputs[at])
        if tells_unused:
            leave_unused_undefined(args, outputs)
        return outputs

    return run if flats or CastBuffer.read_in_eval else compiled


def _followed(args: tuple[Any, ...], groups: Groups) -> tuple[Any, ...]:
    """The arguments with the edges to the parameters that there are now."""
    for group in groups.values():
        group.unit.follow()
    thawed = [group for at, group in groups.items() if group.edge.requires_grad and not args[at].requires_grad]
    if thawed and torch.is_grad_enabled():
        raise UnsupportedModelError(
            "parameters that were all frozen are trained now, and a compiled function has no gradients of them",
            where=f"unit {thawed[0].title}",
            instead="calling the compiled model, or the function once more, which compiles it again",
        )
    return tuple(groups[at].edge if at in groups else value for at, value in enumerate(args))
