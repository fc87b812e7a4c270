"""`explain`: the plan of a model without ranks, devices or memory for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from fsdp_compile._torch.fully_shard import states_below
from fsdp_compile.capture.forms import refusal_of_several
from fsdp_compile.cost.hardware import Hardware
from fsdp_compile.cost.hardware import hardware as named_hardware
from fsdp_compile.errors import ConfigError
from fsdp_compile.explain.build import build_plan
from fsdp_compile.explain.open_batch import Inputs, hollow_inputs
from fsdp_compile.explain.plan import Plan
from fsdp_compile.explain.rescale import Traced
from fsdp_compile.explain.skipped import not_in_graphs
from fsdp_compile.explain.stand_in import planning_mesh, planning_world, shard_stand_in, stand_in
from fsdp_compile.explain.trace import trace
from fsdp_compile.explain.units import units_of
from fsdp_compile.fsdp2.module_class import user_class
from fsdp_compile.fsdp2.take_over import model_of
from fsdp_compile.fsdp2.unit import Model
from fsdp_compile.lower.region import CompiledRegion, regions_of
from fsdp_compile.options import FSDPOptions
from fsdp_compile.passes.settings import FUSION


def explain(
    model: nn.Module | Callable[..., Any],
    *args: Any,
    world_size: int | None = None,
    options: Mapping[str, Any] | FSDPOptions | None = None,
    hardware: Hardware | None = None,
    **kwargs: Any,
) -> Plan:
    """Reports what the passes make of a model, and estimates its time and memory.

    No values are read, and neither the model nor a random number generator is changed: a copy without memory is traced.
    Models on any device work, meta included. What the forward does in Python runs once.

    Args:
        model: A plain model, or a compiled one that has run, whose graphs are then reported as they ran.
        *args: What its forward is called with; only types, shapes and Python values matter.
        world_size: Ranks to plan for. May be left out if a process group is initialized.
        options: As for `torch.compile(..., backend="fsdp", options=...)`. With `regions="blocks"` the model is planned
            as one graph in which each unit is gathered while the one before it computes, and reduced while the next one
            does, as the graphs of blocks are; else as a whole.
        hardware: What times are estimated for; by default that of `options`, or hosts of H100 with 400 Gb/s per device.
        **kwargs: Keyword arguments of its forward.

    Raises:
        ConfigError: For a wrong option, no world size, a process group of another size, or two different machines.
        UnsupportedModelError: If the model cannot be traced or sharded.
    """
    checked = FSDPOptions.from_dict(options)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"{type(model).__name__} is not a torch.nn.Module",
            where="explain(model)",
            instead="the model, or the result of torch.compile(model)",
        )
    plain = getattr(model, "_orig_mod", model)
    if hardware is not None and checked.planned_for not in (None, hardware):
        raise ConfigError(
            "two machines are given: one to plan for, and another to estimate times of",
            where="explain(hardware=..., options={'hardware': ...})",
            instead="one of the two",
        )
    estimated_for = hardware or checked.planned_for or named_hardware()
    if checked.regions == "blocks":
        checked = as_blocks(checked)
    if states_below(plain):
        if args or kwargs or options is not None:
            raise ConfigError(
                "a sharded model is explained as it ran; inputs and options have no effect",
                where=f"explain({type(plain).__name__}, ...)",
                instead="explain(model) without arguments, or explain the plain model before it is sharded",
            )
        return _plan_of_run(plain, world_size, estimated_for)
    if checked.prefetch == "auto":
        checked = dataclasses.replace(checked, hardware=checked.planned_for or estimated_for)
    inputs = hollow_inputs(args, kwargs)
    with planning_world(world_size) as ranks:
        traced = traced_model(plain, inputs, ranks, checked)
        return traced.plan([region.steps for region in traced.regions], traced.units, ranks, estimated_for)


def traced_model(
    plain: nn.Module, inputs: Inputs, ranks: int, options: FSDPOptions, recomputed: int | None = None
) -> Traced:
    """Traces a sharded copy of a plain model, inside of `planning_world`.

    `recomputed` blocks are computed again in backward, in graphs that are captured and on which no passes run; `None`
    for as few as the budget allows.

    Raises:
        UnsupportedModelError: If the model cannot be traced or sharded.
    """
    copied = stand_in(plain)
    sharded = shard_stand_in(copied, **{"mesh": planning_mesh(options.sharding_strategy), **options.sharding})
    regions = trace(copied, inputs, options, recomputed)
    return Traced(copied, units_of(sharded), tuple(regions), ranks, options, FUSION[options.lower])


def as_blocks(options: FSDPOptions) -> FSDPOptions:
    """Options with which the one graph of a model gathers and reduces as the graphs of its blocks do."""
    if options.memory_budget_gb is not None:
        raise refusal_of_several("blocks are compiled one by one", options)
    ahead = 1 if options.prefetch == "auto" else options.prefetch
    return dataclasses.replace(options, prefetch=ahead, hardware=None, bucket_mb=0)


def as_it_ran(model: nn.Module, where: str) -> tuple[Model, list[CompiledRegion]]:
    """A sharded model, and the regions that it ran last.

    Raises:
        ConfigError: If it has not run.
    """
    taken = model_of(model)
    regions = [] if taken is None else regions_of(taken.units)
    if taken is None or not regions:
        raise ConfigError(
            "the model has not run yet",
            where=where,
            instead="two steps of the compiled model first, or explain() of the plain model before it is sharded",
        )
    return taken, regions


def _plan_of_run(model: nn.Module, world_size: int | None, hardware: Hardware) -> Plan:
    """Reports on the graphs that a compiled model ran last."""
    taken, regions = as_it_ran(model, f"explain({user_class(model).__name__})")
    made = units_of(taken)
    ranks = max(param.spec.size * param.spec.replicas for unit in made for param in unit.params)
    if world_size not in (None, ranks):
        raise ConfigError(
            f"the model is sharded over {ranks} ranks",
            where=f"explain(world_size={world_size})",
            instead="explain the plain model before it is sharded",
        )
    fusion = FUSION[regions[0].lower]
    steps = [region.steps for region in regions]
    plan = build_plan(model, made, steps, world_size=ranks, hardware=hardware, fusion=fusion)
    return dataclasses.replace(plan, skipped=(*not_in_graphs(taken.units), *plan.skipped))
