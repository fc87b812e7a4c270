"""Numbers of ranks to which a traced plan is not taken: there the model has other graphs, or another mesh."""

from __future__ import annotations

from typing import Final

from fsdp_compile.errors import BudgetTooSmallError, ConfigError
from fsdp_compile.explain.plan_data import Traced
from fsdp_compile.explain.units import UnitData
from fsdp_compile.ir.graph import Role, require
from fsdp_compile.layout.spec import UnshardSpec
from fsdp_compile.ops.unshard import UNSHARD
from fsdp_compile.partition.cast_before_gather import casts_of

_CASTS: Final = "parameters that are cast where they are read, as by torch.autocast, are cast before they are sent"


def refuse_ranks(traced: Traced, ranks: int) -> None:
    """Refuses ranks of a mesh with two dimensions, ranks over which parameters do not divide, and other graphs.

    Raises:
        ConfigError: If the plan for so many ranks does not follow from what was traced.
    """
    if ranks < 1:
        raise ConfigError(f"there are no {ranks} ranks", where="Plan.at(world_size=...)", instead="1, 2, ...")
    if (traced.world_size == 1) != (ranks == 1) and (reason := _other_graph(traced)):
        raise ConfigError(
            f"one rank has another graph than several: {reason}",
            where=f"Plan.at(world_size={ranks}) of a plan for {traced.world_size}",
            instead="explain() once more in a world of that size",
        )
    if any(region.recomputed for region in traced.regions):
        raise _recomputed(traced, ranks)
    if traced.may_send_low_bits:
        raise ConfigError(
            "which parameters are sent in 8 bits depends on the number of ranks",
            where=f"Plan.at(world_size={ranks}), options={{'mp_policy': MixedPrecision(gather_dtype=...)}}",
            instead="explain() once more in a world of that size",
        )
    for unit in traced.units:
        for param in unit.params:
            _refuse_mesh(unit.title, param.spec, traced.world_size, ranks)
        _refuse_rows(unit, ranks)


def refuse_to_recompute(traced: Traced, ranks: int, error: BudgetTooSmallError) -> None:
    """Says of a budget that is too small on other ranks, if a compile there would compute blocks again.

    Raises:
        ConfigError: If it would; `error` is its cause.
    """
    if traced.options.may_recompute and ranks != traced.world_size:
        raise _recomputed(traced, ranks) from error


def _refuse_mesh(unit: str, spec: UnshardSpec, world_size: int, ranks: int) -> None:
    """Refuses a mesh of which one number does not say how it changes."""
    if spec.replicas > 1:
        raise ConfigError(
            f"{spec.replicas} replicas of groups of {spec.size} ranks: one number does not say how both change",
            where=f"Plan.at(world_size={ranks}), unit {unit}",
            instead="explain() once more in a world of that size, with its mesh",
        )
    if spec.post_forward_size > 1:
        raise ConfigError(
            f"parameters are kept over {spec.post_forward_size} ranks, and one number does "
            "not say over how many they would be",
            where=f"Plan.at(world_size={ranks}), unit {unit}",
            instead="explain() once more in a world of that size",
        )
    if spec.size != world_size:
        raise ConfigError(
            f"parameters are sharded over {spec.size} of {world_size} ranks, and one number does not "
            "say how both change",
            where=f"Plan.at(world_size={ranks}), unit {unit}",
            instead="explain() once more in a world of that size, with its mesh",
        )


def _refuse_rows(unit: UnitData, ranks: int) -> None:
    """Refuses ranks over which a dimension other than the first does not divide."""
    for slot in unit.params:
        spec = slot.spec
        if spec.dim and spec.shape[spec.dim] % ranks:
            raise ConfigError(
                f"dimension {spec.dim} of size {spec.shape[spec.dim]} does not divide over {ranks} ranks",
                where=f"Plan.at(world_size={ranks}), parameter {slot.name}",
                instead="a number of ranks that divides it, or Shard(0)",
            )


def _recomputed(traced: Traced, ranks: int) -> ConfigError:
    return ConfigError(
        "how many blocks are computed again in backward for the budget was chosen when the model was traced, for "
        f"{traced.world_size} ranks",
        where=f"Plan.at(world_size={ranks}) of a plan with options={{'memory_budget_gb': ...}}",
        instead="explain() once more in a world of that size",
    )


def _other_graph(traced: Traced) -> str:
    """Why what happens before the passes depends on whether a rank is alone; "" if it does not."""
    if traced.options.embedding == "sharded":
        return 'embedding="sharded" looks rows up on other ranks'
    own = {slot.name: slot.spec.param_dtype for unit in traced.units for slot in unit.params}
    for step in (step for region in traced.regions for step in region.steps):
        for node in step.nodes(Role.FLAT):
            record = require(node)
            sent = zip(record.parameters, record.specs, strict=True)
            if any(spec.param_dtype.itemsize < own[name].itemsize for name, spec in sent):
                return _CASTS
        if any(casts_of(read) for read in step.graph.find_nodes(op="call_function", target=UNSHARD)):
            return _CASTS
    return ""
