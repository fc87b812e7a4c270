"""What runs around a compiled graph at every step: three look-ups per parameter group, and little else."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fsdp_compile._torch.autograd import backward_in_progress, below_autograd
from fsdp_compile._torch.context_parallel import balances_tokens
from fsdp_compile._torch.tensors import is_batched, join_batch, split_batch
from fsdp_compile.comm.failures import refuse_lost_ranks
from fsdp_compile.errors import UnsupportedModelError
from fsdp_compile.ir.calls import natural
from fsdp_compile.ir.graph import Phase, Record, Role, StepGraph, require, role_of
from fsdp_compile.layout.spec import Update
from fsdp_compile.lower.failed_collective import failed_wait
from fsdp_compile.modules.forward import in_forward
from fsdp_compile.runtime import checked_groups, update_in_backward
from fsdp_compile.runtime.read_order import LARGEST_DIGEST, Done, compare_after_forward, in_graph, note_all
from fsdp_compile.runtime.units import FSDPParamGroup
from fsdp_compile.runtime.unshard import is_outdated, unshard_again
from fsdp_compile.sharding import initial_values
from fsdp_compile.sharding.views import check_inside_graph

Compiled = Callable[[list[Any]], Any]
FlatKey = tuple[str, tuple[str, ...]]
"""Unit and parameters: the same for one parameter group of a region in both graphs."""


def flat_key(record: Record) -> FlatKey:
    """The key of the parameter group that a record belongs to."""
    return record.unit, record.parameters


@dataclasses.dataclass(frozen=True)
class FlatInput:
    """A parameter group among the inputs of a forward graph.

    Attributes:
        kept: Offset and position of each of its full parameters that are still unsharded.
    """

    position: int
    kept: tuple[tuple[int, int], ...]


def flat_inputs(step: StepGraph) -> list[FlatInput]:
    """The parameter groups among a graph's inputs."""
    placeholders = step.graph.find_nodes(op="placeholder")
    kept = [(i, require(node)) for i, node in enumerate(placeholders) if role_of(node) is Role.UNSHARDED_PARAM]
    found = []
    for index, node in enumerate(placeholders):
        if role_of(node) is Role.FLAT:
            owner = require(node)
            mine = [(i, r) for i, r in kept if r.unit == owner.unit and r.parameters[0] in owner.parameters]
            found.append(FlatInput(index, tuple((record.specs[0].offset, i) for i, record in mine)))
    return found


def check_inputs(compiled: Compiled, inputs: Sequence[FlatInput]) -> Compiled:
    """Wraps a compiled forward that may be entered without the own `__call__` of a model that it reads.

    A compiled function calls none, and a model that is compiled whole calls none of others that it does not own.
    """

    def run(args: list[Any]) -> Any:
        checked = checked_groups.checked() if in_forward() else ()
        for each in inputs:
            flat = FSDPParamGroup.of(args[each.position])
            if flat is not None and flat not in checked:
                if flat.unit.model.before_next_forward:  # of a model that came after the compile
                    initial_values.compare(flat.unit.model)
                check_inside_graph(flat)
                if backward_in_progress() == -1:
                    update_in_backward.begin(flat)
                _replace_stale(args, flat, each)
        return compiled(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _replace_stale(args: list[Any], flat: FSDPParamGroup, at: FlatInput) -> None:
    if at.kept and is_outdated(flat):
        unshard_again(flat)
        assert flat.unsharded.params is not None
        for offset, position in at.kept:
            args[position] = flat.unsharded.params.values[offset]


@dataclasses.dataclass(frozen=True)
class Noted:
    """A parameter group among the inputs of a graph, and what to note for it in each of its process groups, if any."""

    position: int
    in_shard_group: int
    in_replicate_group: int | None


def noted_order(step: StepGraph, digests: Mapping[str, int]) -> list[Noted]:
    """What to note of a graph's parameter groups, so that ranks compare for which of them it communicates.

    Args:
        step: Its collectives are the same on all ranks; layers share it, so what they are for is known at the call.
        digests: What stands for its collectives, by the alias of their process group.
    """
    position_of = {record: i for i, record in flats_of(step)}
    done = Done.READ if step.phase is Phase.FORWARD else Done.REDUCED
    noted = []
    # The same order for all layers that share the graph, and on all ranks.
    for record in sorted(position_of, key=lambda record: natural(record.parameters[0])):
        spec = record.specs[0]
        over_shards = sum(digests.get(alias, 0) for alias in (spec.group, spec.reduce_group, spec.post_forward_group))
        over_replicas = digests.get(spec.replicate_group)
        in_replicate_group = None if over_replicas is None else in_graph(over_replicas, done)
        noted.append(Noted(position_of[record], in_graph(over_shards % LARGEST_DIGEST, done), in_replicate_group))
    return noted


def units_of(step: StepGraph) -> str:
    """The units whose parameter groups a graph reads, as errors name them."""
    return ", ".join(dict.fromkeys(record.unit for _, record in flats_of(step)))


def flats_of(step: StepGraph) -> list[tuple[int, Record]]:
    """The flat parameters among a graph's inputs: position and record of each."""
    placeholders = enumerate(step.graph.find_nodes(op="placeholder"))
    return [(i, require(node)) for i, node in placeholders if role_of(node) is Role.FLAT]


def note_order(
    compiled: Compiled, noted: Sequence[Noted], phase: Phase, units: str, waits: Mapping[str, str]
) -> Compiled:
    """Wraps a compiled graph so that ranks compare for which parameter groups it communicates."""
    is_forward = phase is Phase.FORWARD
    doing = f"in a compiled {phase.value} of unit {units}"

    def run(args: list[Any]) -> Any:
        for each in noted:
            flat = FSDPParamGroup.of(args[each.position])
            if flat is not None:  # else a copy by saved-tensor hooks, of unknown owner
                note_all(flat, each.in_shard_group, each.in_replicate_group)
        try:
            result = compiled(args)
        except RuntimeError as error:
            waited = failed_wait(error, waits)
            refuse_lost_ranks(error, doing if waited is None else f"waiting for {waited} {doing}")
            raise
        # A compiled function enters it without the model's own `__call__`, at whose end ranks compare.
        if is_forward and not in_forward():
            compare_after_forward()
        return result

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def read_again(forward: StepGraph, backward: StepGraph) -> frozenset[FlatKey]:
    """Parameter groups that both graphs of a region read, and that are updated in backward."""
    return _updated(forward) & _updated(backward)


def _updated(step: StepGraph) -> frozenset[FlatKey]:
    records = map(require, step.nodes(Role.FLAT))
    return frozenset(flat_key(record) for record in records if record.specs[0].update is Update.IN_BACKWARD)


def counted_reads(step: StepGraph, flats: frozenset[FlatKey]) -> list[int]:
    """Positions of those parameter groups among a graph's inputs that `read_again` found."""
    return [i for i, record in flats_of(step) if flat_key(record) in flats]


def count_reads(compiled: Compiled, positions: Sequence[int], phase: Phase) -> Compiled:
    """Wraps a compiled graph so that updates in backward know of forwards whose backward has not run."""
    note = update_in_backward.note_read if phase is Phase.FORWARD else update_in_backward.note_backward

    def run(args: list[Any]) -> Any:
        for position in positions:
            flat = FSDPParamGroup.of(args[position])
            if flat is not None:
                note(flat)
        return compiled(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def runs_optimizers(step: StepGraph) -> bool:
    """Whether a graph updates parameters: optimizers are users' code, which may need autograd."""
    return any(True for _ in step.nodes(Role.UPDATE))


def without_autograd(compiled: Compiled) -> Compiled:
    """Wraps a compiled graph so that its operators skip autograd, which no graph needs."""

    def run(args: list[Any]) -> Any:
        # Derivatives of collectives are written in Python, and would run at each call to no purpose.
        with below_autograd():
            return compiled(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def tangents_of(step: StepGraph) -> list[int]:
    """Positions of the gradients of outputs among a backward graph's inputs."""
    placeholders = enumerate(step.graph.find_nodes(op="placeholder"))
    return [i for i, node in placeholders if node.name.startswith("tangents")]


def one_by_one(compiled: Compiled, tangents: Sequence[int], *, has_updates: bool) -> Compiled:
    """Wraps a compiled backward so that a batch of gradients goes through it one by one: collectives take no batch.

    Args:
        compiled: The backward.
        tangents: Positions of the gradients of outputs among its inputs.
        has_updates: Whether it updates parameters, which must happen once.
    """

    def run(args: list[Any]) -> Any:
        batched = [i for i in tangents if isinstance(args[i], torch.Tensor) and is_batched(args[i])]
        if not batched:
            return compiled(args)
        batches = [split_batch(args[i]) for i in batched]
        if has_updates or not all(batches):
            raise UnsupportedModelError(
                "several gradients go through a compiled backward at once, whose collectives take one at a time",
                where="is_grads_batched=True, " + ("step_in_backward()" if has_updates else "a batch of batches"),
                instead="one call for each gradient, or torch.func.jacrev() of the compiled model",
            )
        results = []
        for gradients in zip(*batches, strict=True):
            own = [_copy_of_saved(value) for value in args]  # compiled code may write into what it reads last
            for i, gradient in zip(batched, gradients, strict=True):
                own[i] = gradient
            results.append(compiled(own))
        return [
            join_batch(each) if isinstance(each[0], torch.Tensor) else each[0] for each in zip(*results, strict=True)
        ]

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _copy_of_saved(value: Any) -> Any:
    """A copy of what backward reads, but of flat parameters, which are known by their addresses."""
    is_plain = isinstance(value, torch.Tensor) and not is_batched(value)
    return value.clone() if is_plain and FSDPParamGroup.of(value) is None else value


def host_copies_from(step: StepGraph) -> str:
    """Type of the device from which a graph copies gradients to the host; empty if it copies none."""
    return next((require(node).specs[0].compute for node in step.nodes(Role.OFFLOAD_OUT)), "")


def wait_for_host_copies(compiled: Compiled, device_type: str) -> Compiled:
    """Wraps a compiled backward that copies gradients to the host: the host waits once, when all copies are queued."""

    def run(args: list[Any]) -> Any:
        result = compiled(args)
        if device_type != "cpu":
            torch.get_device_module(device_type).current_stream().synchronize()  # it waits for each copy
        return result

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def keep_balance(compiled: Compiled, balanced: bool) -> Compiled:  # noqa: FBT001  as it was found
    """Wraps a graph whose attention is split over tokens, and was traced for `balanced` tokens or for others."""

    def run(args: list[Any]) -> Any:
        if balances_tokens() is not balanced:
            raise UnsupportedModelError(
                f"attention was compiled for tokens that are {'' if balanced else 'not '}balanced over ranks, and now "
                f"they are {'not ' if balanced else ''}balanced: it would attend to other ones",
                where="torch's context parallelism, load_balancer of _context_parallel_shard()",
                instead="the same choice in every step, or torch.compiler.reset() after a change",
            )
        return compiled(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
