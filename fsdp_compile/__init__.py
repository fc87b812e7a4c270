"""A `torch.compile` backend for FSDP: passes over the forward and backward graphs shard the model's parameters.

`torch.compile(model, backend="fsdp")` is enough; `fully_shard` before it chooses meshes, dtypes and units.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    __version__: str
    from fsdp_compile.backend import fsdp
    from fsdp_compile.config.policy import MixedPrecision
    from fsdp_compile.config.prefetch import FSDPPrefetch
    from fsdp_compile.errors import (
        BudgetTooSmallError,
        ConfigError,
        FSDPCompileError,
        InvariantError,
        ParityError,
        PoisonError,
        RankFailedError,
        RankMismatchError,
        UnsupportedModelError,
    )
    from fsdp_compile.explain.api import explain
    from fsdp_compile.explain.step_profile import profile_step
    from fsdp_compile.fsdp2.accumulation import no_sync
    from fsdp_compile.fsdp2.comm_hook import register_comm_hook
    from fsdp_compile.fsdp2.take_over import units
    from fsdp_compile.optim.flat_step import flat_step
    from fsdp_compile.optim.gradients import GradScaler, clip_grad_norm_
    from fsdp_compile.optim.step_in_backward import step_in_backward
    from fsdp_compile.optim.whole_step import whole_step
    from fsdp_compile.options import FSDPOptions
    from fsdp_compile.parity.api import check_parity
    from fsdp_compile.search.api import plan
    from fsdp_compile.sharding.fully_shard import fully_shard
    from fsdp_compile.sharding.materialize import materialize
    from fsdp_compile.state.ema import EMA
    from fsdp_compile.state.full_params import full_params, full_tensors
    from fsdp_compile.state.optim_names import rekey_optim_state_dict
    from fsdp_compile.state.optim_state import (
        flatten_sharded_optim_state_dict,
        full_optim_state_dict,
        optim_state_dict,
        optim_state_dict_to_load,
        scatter_full_optim_state_dict,
        shard_full_optim_state_dict,
        sharded_optim_state_dict,
    )

__all__ = [
    "EMA",
    "BudgetTooSmallError",
    "ConfigError",
    "FSDPCompileError",
    "FSDPOptions",
    "FSDPPrefetch",
    "GradScaler",
    "InvariantError",
    "MixedPrecision",
    "ParityError",
    "PoisonError",
    "RankFailedError",
    "RankMismatchError",
    "UnsupportedModelError",
    "check_parity",
    "clip_grad_norm_",
    "explain",
    "flat_step",
    "flatten_sharded_optim_state_dict",
    "fsdp",
    "full_optim_state_dict",
    "full_params",
    "full_tensors",
    "fully_shard",
    "materialize",
    "no_sync",
    "optim_state_dict",
    "optim_state_dict_to_load",
    "plan",
    "profile_step",
    "register_comm_hook",
    "rekey_optim_state_dict",
    "scatter_full_optim_state_dict",
    "shard_full_optim_state_dict",
    "sharded_optim_state_dict",
    "step_in_backward",
    "units",
    "whole_step",
]

_HOMES: Final = {
    "EMA": "fsdp_compile.state.ema",
    "BudgetTooSmallError": "fsdp_compile.errors",
    "ConfigError": "fsdp_compile.errors",
    "FSDPCompileError": "fsdp_compile.errors",
    "FSDPOptions": "fsdp_compile.options",
    "FSDPPrefetch": "fsdp_compile.config.prefetch",
    "GradScaler": "fsdp_compile.optim.gradients",
    "InvariantError": "fsdp_compile.errors",
    "MixedPrecision": "fsdp_compile.config.policy",
    "ParityError": "fsdp_compile.errors",
    "PoisonError": "fsdp_compile.errors",
    "RankFailedError": "fsdp_compile.errors",
    "RankMismatchError": "fsdp_compile.errors",
    "UnsupportedModelError": "fsdp_compile.errors",
    "check_parity": "fsdp_compile.parity.api",
    "clip_grad_norm_": "fsdp_compile.optim.gradients",
    "explain": "fsdp_compile.explain.api",
    "flat_step": "fsdp_compile.optim.flat_step",
    "flatten_sharded_optim_state_dict": "fsdp_compile.state.optim_state",
    "fsdp": "fsdp_compile.backend",
    "full_optim_state_dict": "fsdp_compile.state.optim_state",
    "full_params": "fsdp_compile.state.full_params",
    "full_tensors": "fsdp_compile.state.full_params",
    "fully_shard": "fsdp_compile.sharding.fully_shard",
    "materialize": "fsdp_compile.sharding.materialize",
    "no_sync": "fsdp_compile.fsdp2.accumulation",
    "optim_state_dict": "fsdp_compile.state.optim_state",
    "optim_state_dict_to_load": "fsdp_compile.state.optim_state",
    "plan": "fsdp_compile.search.api",
    "profile_step": "fsdp_compile.explain.step_profile",
    "register_comm_hook": "fsdp_compile.fsdp2.comm_hook",
    "rekey_optim_state_dict": "fsdp_compile.state.optim_names",
    "scatter_full_optim_state_dict": "fsdp_compile.state.optim_state",
    "shard_full_optim_state_dict": "fsdp_compile.state.optim_state",
    "sharded_optim_state_dict": "fsdp_compile.state.optim_state",
    "step_in_backward": "fsdp_compile.optim.step_in_backward",
    "units": "fsdp_compile.fsdp2.take_over",
    "whole_step": "fsdp_compile.optim.whole_step",
}
"""Where each public name is defined. Importing the package loads none of these: a name's first use does."""


class _Package(ModuleType):
    """This package, whose public names importing a submodule does not replace.

    The import system binds a submodule as an attribute of its package: without this class, importing
    `fsdp_compile.explain.plan` would replace the function `fsdp_compile.explain` by a module.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


def _load(name: str) -> Any:
    """A public name at its first use; afterwards it is an ordinary attribute."""
    if name == "__version__":
        from importlib.metadata import version

        return version("fsdp-compile")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if not TYPE_CHECKING:  # a type checker would take every misspelled name for one that this function has
    __getattr__ = _load
sys.modules[__name__].__class__ = _Package
