"""FSDP1's static methods of a module that is sharded here: refused, with the line to write in their place.

torch looks for modules of its own class in it. Where it finds none, some of them fail on an index, and
`set_state_dict_type` and `summon_full_params` do nothing: what is saved then is one rank's part.
"""

from __future__ import annotations

import functools

from torch import nn

from fsdp_compile._torch.fsdp1 import call_before
from fsdp_compile.errors import ConfigError
from fsdp_compile.runtime.module_state import units

_TYPES = (
    "model.state_dict() for a sharded one; for a full one torch.distributed.checkpoint.state_dict."
    "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)), or "
    "fsdp_compile.full_tensors(model); config=... of fsdp_compile.optim_state_dict() for an optimizer's"
)
_INSTEAD = {
    "set_state_dict_type": _TYPES,
    "get_state_dict_type": _TYPES,
    "state_dict_type": _TYPES,
    "summon_full_params": "with fsdp_compile.full_params(model, ...): with the same arguments",
    "optim_state_dict": "fsdp_compile.optim_state_dict(model, optim), full on the host of all ranks; "
    "config=FullOptimStateDictConfig(rank0_only=True) or ShardedOptimStateDictConfig() as for set_state_dict_type()",
    "optim_state_dict_to_load": "fsdp_compile.optim_state_dict_to_load(model, optim, state); "
    "config=FullOptimStateDictConfig(rank0_only=True) if the first rank alone has it",
    **{
        name: f"fsdp_compile.{name}() with the same arguments"
        for name in (
            "full_optim_state_dict",
            "sharded_optim_state_dict",
            "shard_full_optim_state_dict",
            "flatten_sharded_optim_state_dict",
            "scatter_full_optim_state_dict",
        )
    },
}


@functools.cache
def refuse_fsdp1_methods() -> None:
    """Makes static methods of FSDP1 refuse modules that are sharded here; others they treat as before."""
    call_before(_INSTEAD, _refuse)


def _refuse(name: str, module: nn.Module) -> None:
    if units(module):
        raise ConfigError(
            "it is for modules that FSDP1 has wrapped, and this one is sharded by fsdp_compile",
            where=f"FullyShardedDataParallel.{name}()",
            instead=_INSTEAD[name],
        )
