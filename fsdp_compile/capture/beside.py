"""What would train, or average, beside the modules that the backend shards: other data parallelism, and plain parts."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp_compile._torch.distributed import names_ignored_by_ddp
from fsdp_compile._torch.dynamo import OptimizedModule, backend_of
from fsdp_compile.capture.unreached import PlainModels
from fsdp_compile.errors import ConfigError, UnsupportedModelError
from fsdp_compile.runtime.module_state import ignored_parameters, named_stored_parameters, stored_parameters
from fsdp_compile.runtime.replaced_params import current
from fsdp_compile.runtime.units import FSDPParamGroup, sharded_parameters

_WHOLE = (
    "torch.compile(model, backend='fsdp') of the whole model, or fully_shard(model) before its parts are compiled, "
    "with ignored_params=[...] for what each rank trains alone"
)
Wrapper = DistributedDataParallel | FullyShardedDataParallel


def refuse_wrappers_around(called: Iterable[nn.Module]) -> None:
    """Raises `ConfigError` if a module that is being called is DDP or FSDP1: this backend averages below it."""
    for module in called:
        if isinstance(module, Wrapper) and not _leaves_out_shards(module, module.module):
            raise _remove(module, module.module)


def refuse_plain_rest(called: Iterable[nn.Module], compiled: nn.Module, plain: PlainModels) -> None:
    """Refuses to shard a part of a model whose rest is plain, trained, and not compiled for this backend.

    Args:
        called: Modules that are being called, outermost first.
        compiled: The outermost compiled one, which is about to be sharded.
        plain: Knows which other parts are compiled, and will be sharded at their first call.

    Raises:
        UnsupportedModelError: If a module around it has other parameters that need gradients.
    """
    if not torch.is_grad_enabled():
        return
    for around in called:
        parts = list(around.modules())
        if isinstance(around, OptimizedModule) or compiled not in parts:
            continue
        own = [part for part in parts if part is compiled or plain.is_compiled(part)]
        inside = {id(parameter) for part in own for parameter in stored_parameters(part)} | ignored_parameters()
        for name, parameter in named_stored_parameters(around):
            if parameter.requires_grad and not isinstance(parameter, DTensor) and id(parameter) not in inside:
                raise UnsupportedModelError(
                    f"only a part of a model is compiled, {type(compiled).__name__}: the gradients of the rest would "
                    "be averaged by no rank",
                    where=f"{type(around).__name__}, parameter {name}",
                    instead=_WHOLE,
                )


def watch_wrappers_and_optimizers(backend: object, plain: PlainModels) -> None:
    """Refuses DDP and FSDP1 around models of the backend, and optimizers of models that it has sharded in part.

    Args:
        backend: The function that Dynamo calls.
        plain: From here, models that DDP or FSDP1 averages are removed.
    """
    checked: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def registered(module: nn.Module, _name: str, child: nn.Module | None) -> None:
        if not isinstance(module, Wrapper) or child is None:
            return
        if _has_model_of(backend, child) and not _leaves_out_shards(module, child):
            raise _remove(module, child)
        plain.remove(child)

    def before_step(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        if optimizer not in checked:
            trained = [p for p in _parameters_of(optimizer) if p.grad is not None]
            _refuse_plain_beside_sharded(optimizer, trained)
            if trained:  # there are none yet before the first call of a closure
                checked.add(optimizer)

    register_module_module_registration_hook(registered)
    register_optimizer_step_pre_hook(before_step)


def _remove(wrapper: nn.Module, child: nn.Module) -> ConfigError:
    name = type(wrapper).__name__
    of_fsdp1 = "; fully_shard(model, ...) before torch.compile() takes its arguments: docs/migrate.md"
    return ConfigError(
        f"{name} averages gradients by itself, and so does backend='fsdp', which shards the model inside of it",
        where=f"{name}({type(child).__name__})",
        instead=f"remove {name}: delete the line `model = {name}(model, ...)`, write `model` where the script has "
        "`model.module`, and fsdp_compile.no_sync(model) for its no_sync; options={'sync_module_states': True} gives "
        "all ranks the first one's values" + of_fsdp1 * isinstance(wrapper, FullyShardedDataParallel),
    )


def _leaves_out_shards(wrapper: nn.Module, child: nn.Module) -> bool:
    """Whether a DDP was told to ignore the sharded parameters in it, and there are some."""
    if not isinstance(wrapper, DistributedDataParallel):
        return False
    every, ignored = sharded_parameters(), names_ignored_by_ddp(child)
    sharded = {name for name, p in nn.Module.named_parameters(child, remove_duplicate=False) if p in every}
    return bool(sharded) and sharded <= ignored


def _has_model_of(backend: object, root: nn.Module) -> bool:
    sharded = sharded_parameters()
    return any(
        (isinstance(part, OptimizedModule) and backend_of(part) is backend)
        or any(parameter in sharded for parameter in part._parameters.values())
        for part in root.modules()
    )


def _parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    # An optimizer that was made before gets the sharded parameters in this very step, maybe after this hook.
    return [current(p) for group in optimizer.param_groups for p in group["params"]]


def _refuse_plain_beside_sharded(optimizer: Optimizer, trained: list[torch.Tensor]) -> None:
    plain = {id(p) for p in trained if not isinstance(p, DTensor)}
    if not plain or len(plain) == len(trained):
        return
    ids = {id(p) for p in trained}
    own = [group.unit for group in FSDPParamGroup.alive() if any(id(param.parameter) in ids for param in group.params)]
    # Where `fully_shard` was called by the user, it has been said what is sharded.
    by_backend = next((unit for unit in own if unit.sharded_with is not None), None)
    if by_backend is None or plain <= {i for unit in own for i in unit.model.ignored.ids()}:
        return
    raise UnsupportedModelError(
        "an optimizer trains parameters that were sharded when a module was compiled, and others that no rank averages",
        where=f"{type(optimizer).__name__}: {len(plain)} of {len(trained)} parameters with gradients are plain, others "
        f"are those of {type(by_backend.root).__name__}",
        instead=_WHOLE,
    )
