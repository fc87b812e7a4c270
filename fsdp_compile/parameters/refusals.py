"""What `fully_shard` refuses before it touches anything."""

from __future__ import annotations

from collections.abc import Container, Iterable

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fsdp_compile.errors import ConfigError
from fsdp_compile.parameters.moved import MovedParameter
from fsdp_compile.parameters.reads import READS
from fsdp_compile.parameters.unit import Unit


def refuse_root(module: nn.Module) -> None:
    """Refuses what cannot be the root of a sharded model.

    Raises:
        ConfigError: If it is no module, or a container that cannot be called.
    """
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"{type(module).__name__} is not a torch.nn.Module",
            where="fully_shard(module)",
            instead="pass the module whose parameters are to be sharded",
        )
    if isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward:
        raise ConfigError(
            f"{type(module).__name__} has no forward",
            where="fully_shard(module)",
            instead="call fully_shard() on its children, or on the module that holds it",
        )


def refuse_reshard(reshard_after_forward: object) -> None:
    """Refuses an argument that means nothing here.

    Raises:
        ConfigError: If it is not of a kind that is supported.
    """
    if reshard_after_forward not in (None, "auto") and not isinstance(reshard_after_forward, int):
        raise ConfigError(
            f"reshard_after_forward={reshard_after_forward!r} is not supported",
            where="fully_shard(reshard_after_forward=...)",
            instead='True (gather again in backward), False (keep for backward), "auto" (keep what there is room for), '
            "a divisor of the shard group or None",
        )


def refuse_wrappers(root: nn.Module) -> None:
    """Refuses a model of which another data parallelism has taken hold.

    Raises:
        ConfigError: If some module is DDP, FSDP1 or sharded by FSDP2.
    """
    for name, module in root.named_modules():
        if isinstance(module, DistributedDataParallel | FullyShardedDataParallel | FSDPModule):
            raise ConfigError(
                f"{type(module).__name__} averages gradients by itself",
                where=name or "the outermost module",
                instead="the plain model: shard with fsdp_compile.fully_shard(), or with backend='fsdp' alone",
            )


def refuse_part(module: nn.Module, units_below: Iterable[Unit]) -> None:
    """Refuses a module whose parameters went to a unit of a call on a module above it.

    Args:
        module: The module.
        units_below: Units of earlier calls on it and on modules in it.

    Raises:
        ConfigError: If there is a parameter that one of these units should hold and does not.
    """
    known = set(units_below)
    for name, part in module.named_modules():
        for _, _, flat in part.__dict__.get(READS, {}).values():
            held_first = any(slot.owners[0][0] is part for slot in flat.slots)  # else it is tied to one from elsewhere
            if held_first and flat.unit not in known:
                raise ConfigError(
                    "the parameters of this module were sharded by a call on a module above it",
                    where=f"fully_shard({type(module).__name__})" + (f", {name}" if name else ""),
                    instead="call fully_shard() on children before parents",
                )


def refuse_gradients(root: nn.Module, ignored: Container[int]) -> None:
    """Refuses plain parameters that have gradients: each rank's own, which no reduction has seen.

    Raises:
        ConfigError: If there is one.
    """
    for name, parameter in root.named_parameters():
        if isinstance(parameter, DTensor | MovedParameter) or id(parameter) in ignored:
            continue
        if parameter.grad is not None:
            raise ConfigError(
                "a parameter has a gradient from before it was sharded, of this rank's data alone",
                where=name,
                instead="step with it or drop it (model.zero_grad(set_to_none=True)) before fully_shard() or the first "
                "compiled call; or shard first",
            )
