"""A `torch.compile` backend that shards: FSDP as passes over the forward and backward graphs.

torch.compile(model, backend="fsdp") is all there is to call; `fully_shard` before it chooses meshes, dtypes and units.
"""

from fsdp_compile.backend import fsdp
from fsdp_compile.config.policy import MixedPrecision
from fsdp_compile.config.prefetch import FSDPPrefetch
from fsdp_compile.errors import (
    BudgetTooSmallError,
    ConfigError,
    FSDPCompileError,
    InvariantError,
    ParityError,
    RankFailedError,
    RankMismatchError,
    UnsupportedModelError,
)
from fsdp_compile.explain import explain
from fsdp_compile.modules.methods import ShardedModule
from fsdp_compile.optim.clip import clip_grad_norm_
from fsdp_compile.optim.flat_step import flat_step
from fsdp_compile.optim.grad_scaler import GradScaler
from fsdp_compile.optim.step_in_backward import step_in_backward
from fsdp_compile.options import FSDPOptions
from fsdp_compile.parity.api import check_parity
from fsdp_compile.runtime.accumulation import no_sync
from fsdp_compile.runtime.module_state import units
from fsdp_compile.runtime.unshard import UnshardHandle
from fsdp_compile.sharding.comm_hook import register_comm_hook
from fsdp_compile.sharding.fully_shard import fully_shard
from fsdp_compile.sharding.materialize import materialize
from fsdp_compile.state.full_params import full_params
from fsdp_compile.state.load_from_rank0 import load_from_rank0

__all__ = [
    "BudgetTooSmallError",
    "ConfigError",
    "FSDPCompileError",
    "FSDPOptions",
    "FSDPPrefetch",
    "GradScaler",
    "InvariantError",
    "MixedPrecision",
    "ParityError",
    "RankFailedError",
    "RankMismatchError",
    "ShardedModule",
    "UnshardHandle",
    "UnsupportedModelError",
    "check_parity",
    "clip_grad_norm_",
    "explain",
    "flat_step",
    "fsdp",
    "full_params",
    "fully_shard",
    "load_from_rank0",
    "materialize",
    "no_sync",
    "register_comm_hook",
    "step_in_backward",
    "units",
]
