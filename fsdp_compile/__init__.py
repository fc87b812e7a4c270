"""A `torch.compile` backend that shards: FSDP as passes over the forward and backward graphs.

torch.compile(model, backend="fsdp") is all there is to call; `fully_shard` before it chooses meshes, dtypes and units.
"""

from fsdp_compile.backend import fsdp
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
from fsdp_compile.gradients.clip import clip_grad_norm_
from fsdp_compile.gradients.scaler import GradScaler
from fsdp_compile.optimizers.flat_step import flat_step
from fsdp_compile.optimizers.in_backward import step_in_backward
from fsdp_compile.options import FSDPOptions
from fsdp_compile.parameters.accumulation import no_sync
from fsdp_compile.parameters.full_params import full_params
from fsdp_compile.parameters.keeping import UnshardHandle
from fsdp_compile.parameters.load_first import load_from_rank0
from fsdp_compile.parameters.materialize import materialize
from fsdp_compile.parameters.methods import ShardedModule
from fsdp_compile.parameters.precision import MixedPrecision
from fsdp_compile.parameters.register import register_comm_hook
from fsdp_compile.parameters.sharding import fully_shard, units
from fsdp_compile.parity.api import check_parity
from fsdp_compile.prefetch import FSDPPrefetch

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
