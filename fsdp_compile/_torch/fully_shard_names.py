"""The private names of torch's FSDP2 that this package imports, all of them.

Only `fully_shard.py`, `fully_shard_calls.py` and `fully_shard_params.py` use them. The attributes that these use of
FSDP2's objects, what to read again for a new torch, are listed in `tests/_torch/test_fully_shard_names.py`.
"""

from __future__ import annotations

from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp._fully_shard import _fsdp_common, _fsdp_init, _fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState, _get_module_fsdp_state

MANAGED = "_is_fsdp_managed_module"
"""FSDP2's mark on each module of a sharded model; Dynamo guards marked modules in a way of its own."""
ORIGINAL_PARAMS = "_fsdp_use_orig_params"
"""Another one."""
