"""Which parameter groups the next forward gathers first, as a compiled forward tells when it runs.

    gather a, b | wait a, b | compute | gather c ...     ->     a and b are gathered when the optimizer has stepped

A forward that finds some of them gathered has been told by another one which they are, and tells no others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch

from fsdp_compile.errors import ConfigError
from fsdp_compile.ir.graph import Record, Role, StepGraph, require
from fsdp_compile.layout.spec import Reshard
from fsdp_compile.lower.wrappers import Compiled, flats_of
from fsdp_compile.modules.forward import in_forward
from fsdp_compile.runtime.next_forward import expect
from fsdp_compile.runtime.units import FSDPParamGroup


@dataclasses.dataclass(frozen=True)
class FirstGather:
    """What a training forward gathers first.

    Attributes:
        flats: Positions of the flat parameters among the inputs; none if they are to be gathered in forward.
        model: Position of one that tells the model.
    """

    flats: tuple[int, ...]
    model: int


def first_gather(step: StepGraph, room_bytes: int | None) -> FirstGather | None:
    """What a transformed training forward gathers first.

    Args:
        step: The forward.
        room_bytes: Most bytes that may stay unsharded from the optimizer's step to the end of backward; `None` for
            what is gathered first, whatever it takes.

    Returns:
        `None` for a graph that reads no parameter group.
    """
    flats = flats_of(step)
    if not flats:
        return None
    first = next(step.nodes(Role.GATHER), None)
    is_chosen = any(True for _ in step.nodes(Role.UNSHARDED_PARAM))
    claims = set() if first is None or is_chosen else set(require(first).claims)
    found = [(i, record) for i, record in flats if claims.intersection(record.claims)]
    if room_bytes is not None and sum(_unsharded_bytes(record) for _, record in found) > room_bytes:
        found = []
    return FirstGather(tuple(i for i, _ in found), flats[0][0])


def _unsharded_bytes(record: Record) -> int:
    """Bytes of a whole parameter group, which is gathered even if a graph gathers a part of it first."""
    return sum(spec.size * spec.extent * spec.param_dtype.itemsize for spec in record.specs)


def refuse_after_step(inputs: Iterable[object]) -> None:
    """Raises `ConfigError` if a parameter group that a graph reads cannot be gathered when an optimizer has stepped."""
    found = (FSDPParamGroup.of(value) for value in inputs if isinstance(value, torch.Tensor))
    for group in (group for group in found if group is not None):
        if group.unit.policy.offload is not None:
            problem = "its shards are on the host, and would be copied to the device at once"
            instead = "one of the two"
        elif group.is_extended:
            problem = "the class of its parameters says how they are gathered, and writes to them are not seen"
            instead = "leave 'unshard_after_step' out"
        elif group.unit.policy.mesh_placement.reshard is Reshard.AUTO:
            problem = "a plan chooses which units stay unsharded, for graphs that find none of them gathered"
            instead = "reshard_after_forward=True or a number, or leave 'unshard_after_step' out"
        else:
            continue
        raise ConfigError(
            f"a unit cannot be gathered when an optimizer has stepped: {problem}",
            where=f"options={{'unshard_after_step': True}}, unit {group.unit.title}",
            instead=instead,
        )


def expect_next_forward(compiled: Compiled, first: FirstGather) -> Compiled:
    """Wraps a compiled training forward so that optimizer steps start the first gather of the next one."""

    def run(args: list[Any]) -> Any:
        model = FSDPParamGroup.of(args[first.model])
        # A compiled function enters it without the model's own `__call__`, which waits for what was started.
        if model is not None and in_forward():
            groups = [FSDPParamGroup.of(args[position]) for position in first.flats]
            expect([group for group in groups if group is not None], model.unit.model)
        return compiled(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
