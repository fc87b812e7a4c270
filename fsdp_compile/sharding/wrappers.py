"""DDP and FSDP1, which average gradients by themselves: refused, with the lines to write in their place."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffload, FSDPModule, FullyShardedDataParallel, MixedPrecision
from torch.nn.parallel import DistributedDataParallel

from fsdp_compile._torch.composable import is_replicated
from fsdp_compile.errors import ConfigError
from fsdp_compile.modules.classes import original_class
from fsdp_compile.modules.methods import ShardedModule

_AVERAGES: tuple[type, ...] = (DistributedDataParallel, FullyShardedDataParallel, FSDPModule)
_STATE_DICT = "torch.distributed.checkpoint.state_dict"


def refuse_wrappers(root: nn.Module) -> None:
    """Raises `ConfigError` if some module is DDP, FSDP1, or sharded or replicated by torch's composable functions."""
    for name, module in root.named_modules():
        if (isinstance(module, _AVERAGES) or is_replicated(module)) and not isinstance(module, ShardedModule):
            raise refusal(module, name or "the outermost module")


def refusal(wrapper: object, where: str) -> ConfigError:
    """The error for a wrapper at some place of a model."""
    return ConfigError(
        f"{type(wrapper).__name__} averages gradients by itself", where=where, instead=in_its_place(wrapper)
    )


def in_its_place(wrapper: object) -> str:
    """What to write in the place of a wrapper: lines of Python in which it is `wrapped`, and `model` the plain one."""
    if isinstance(wrapper, FullyShardedDataParallel):
        # From the CPU to the CPU, torch hands out values whose memory it has freed or uses for others.
        offload = "" if wrapper.compute_device == torch.device("cpu") else ", cpu_offload=True"
        options = f"{_STATE_DICT}.StateDictOptions(full_state_dict=True{offload})"
        lines = [
            "the plain model, made anew, where `wrapped` is this one (without state, the second line alone):",
            f"state = {_STATE_DICT}.get_model_state_dict(wrapped, options={options})",
            f"fsdp_compile.fully_shard({', '.join(['model', *_arguments(wrapper)])})",
            f"options = {_STATE_DICT}.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)",
            f"{_STATE_DICT}.set_model_state_dict(model, state, options=options)",
            "and get_optimizer_state_dict (same options), set_optimizer_state_dict for its optimizer: docs/migrate.md",
        ]
    # Composable `replicate` is DDP of a list of parameters.
    elif isinstance(wrapper, DistributedDataParallel) and not isinstance(wrapper.module, nn.ParameterList):
        lines = [
            "the plain model, with the weights and the optimizer that it has, where `wrapped` is this one:",
            "model = wrapped.module",
            "del wrapped",
            "compiled = torch.compile(model, backend='fsdp')",
            "and fsdp_compile.no_sync(model) for its no_sync()",
        ]
    else:
        lines = ["the plain model: shard with fsdp_compile.fully_shard(), or with backend='fsdp' alone"]
    return "\n    ".join(lines)


def _arguments(wrapper: FullyShardedDataParallel) -> list[str]:
    """The arguments of `fully_shard` that give the units and policies of a model under FSDP1."""
    inner = [m for m in FullyShardedDataParallel.fsdp_modules(wrapper) if m is not wrapper]
    classes = sorted({original_class(m.module).__name__ for m in inner})
    found = []
    if classes:
        found.append(f"auto_wrap_policy=torch.distributed.fsdp.wrap.ModuleWrapPolicy({{{', '.join(classes)}}})")
    found.append(f"sharding_strategy=torch.distributed.fsdp.{wrapper.sharding_strategy}")
    if wrapper.mixed_precision != MixedPrecision():
        found.append(f"mp_policy={_text(wrapper.mixed_precision)}")
    if wrapper.cpu_offload != CPUOffload():
        found.append("offload_policy=torch.distributed.fsdp.CPUOffload(offload_params=True)")
    if wrapper.process_group is not dist.group.WORLD:
        found.append("mesh=...")  # of the same ranks
    return found


def _text(policy: MixedPrecision) -> str:
    default = MixedPrecision()
    values = {field.name: getattr(policy, field.name) for field in dataclasses.fields(policy)}
    told = [f"{name}={_value(value)}" for name, value in values.items() if value != getattr(default, name)]
    return f"torch.distributed.fsdp.MixedPrecision({', '.join(told)})"


def _value(value: object) -> str:
    is_classes = isinstance(value, tuple | list)
    return f"[{', '.join(each.__name__ for each in value)}]" if is_classes else repr(value)  # type: ignore[attr-defined]
