"""`explain`: the plan of a model without ranks, devices or memory for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from fsdp_compile.cost.fusion import Fusion
from fsdp_compile.cost.hardware import Hardware
from fsdp_compile.cost.hardware import hardware as named_hardware
from fsdp_compile.errors import ConfigError
from fsdp_compile.explain.build import build_plan
from fsdp_compile.explain.report import Plan
from fsdp_compile.explain.stand_in import hollow_flats, hollow_inputs, stand_in
from fsdp_compile.explain.trace import trace
from fsdp_compile.explain.world import planning_mesh, planning_world
from fsdp_compile.options import FSDPOptions
from fsdp_compile.parameters.sharding import fully_shard


def explain(
    model: nn.Module,
    *args: Any,
    world_size: int | None = None,
    options: Mapping[str, Any] | FSDPOptions | None = None,
    hardware: Hardware | None = None,
    **kwargs: Any,
) -> Plan:
    """Reports what the passes make of a model, and estimates its time and memory.

    Nothing is run, no values are read, and the model is left as it is: a copy without memory is traced. Models built on
    the meta device work, as do ones on any other.

    Args:
        model: A plain model, or a compiled one that has run, whose graphs are then reported as they ran.
        *args: What its forward is called with; only types, shapes and Python values matter.
        world_size: Ranks to plan for. May be left out if a process group is initialized.
        options: As for `torch.compile(..., backend="fsdp", options=...)`.
        hardware: What times are estimated for; by default an H100 with 400 Gb/s per device.
        **kwargs: Keyword arguments of its forward.

    Raises:
        ConfigError: For a wrong option, no world size, or a process group of another size.
        UnsupportedModelError: If the model cannot be traced or sharded.
    """
    checked = FSDPOptions.from_dict(options)
    fusion = Fusion.KERNELS if checked.lower == "inductor" else Fusion.NONE
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"{type(model).__name__} is not a torch.nn.Module",
            where="explain(model)",
            instead="the model, or what torch.compile(model) returned",
        )
    with planning_world(world_size) as ranks:
        copied = stand_in(model)
        fully_shard(copied, **{"mesh": planning_mesh(), **checked.sharding})
        hollow_flats(copied)
        regions = trace(copied, hollow_inputs(args), hollow_inputs(kwargs), checked)
        return build_plan(copied, regions, world_size=ranks, hardware=hardware or named_hardware(), fusion=fusion)
