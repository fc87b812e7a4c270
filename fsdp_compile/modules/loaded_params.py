"""Registered parameters after `.to()` and `load_state_dict()`: still views where nothing changed, still tied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compile._torch.tensors import is_wrapper, local_tensor, set_local_tensor
from fsdp_compile.errors import ConfigError
from fsdp_compile.runtime.loaded_state import is_of_other_rank
from fsdp_compile.runtime.module_state import reads_of
from fsdp_compile.runtime.units import FSDPParam


def keep_views(module: nn.Module) -> None:
    """Makes the parameters of a module views again whose conversion (`.to()`, `.cpu()`, `.float()`) changed nothing.

    torch gives a converted DTensor another local tensor, of the same memory if there was nothing to convert. State
    dicts find a parameter's place in its flat parameter by that very tensor.
    """
    for attribute, param in _params(module):
        parameter = module._parameters[attribute]
        if parameter is param.parameter and isinstance(parameter, DTensor):
            local = local_tensor(parameter)
            if local is not param.sharded_view and _is_same_memory(local, param.sharded_view):
                set_local_tensor(parameter, param.sharded_view)
                param.dtensor_storage = parameter.untyped_storage()


def keep_ties(module: nn.Module, before: Mapping[str, nn.Parameter | None]) -> None:
    """Registers parameters that `load_state_dict(assign=True)` has put into a module at all places of those before.

    As without `assign`, all places have one value, and the name that is loaded last counts.

    Args:
        module: The module that was loaded.
        before: Its parameters before that.
    """
    for attribute, param in _params(module):
        parameter = module._parameters[attribute]
        if parameter is not None and parameter is not before.get(attribute):
            for owner, name in param.module_refs:
                if owner._parameters.get(name) is not None:
                    owner._parameters[name] = parameter


def refuse_shards_of_other_ranks(module: nn.Module, state_dict: Mapping[str, Any], prefix: str) -> None:
    """Raises `ConfigError` for a value that another rank saved: it holds that rank's part of the parameter."""
    for attribute, param in _params(module):
        if is_of_other_rank(state_dict.get(prefix + attribute), param.dtensor):
            raise ConfigError(
                "the state dict was saved by another rank, and holds that rank's part of each parameter",
                where=f"load_state_dict(), {prefix}{attribute}",
                instead="torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
                "options=StateDictOptions(full_state_dict=True)) on all ranks before rank 0 saves; or "
                "torch.distributed.checkpoint, which saves every rank's part",
            )


def refuse_other_shapes(root: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for all values of other shapes than their parameters: torch would load the others first."""
    if any(module._load_state_dict_pre_hooks for module in root.modules()):
        return  # these may give values other names and shapes
    wrong = []
    for prefix, module in nn.Module.named_modules(root, remove_duplicate=False):
        for attribute, param in _params(module):
            name = f"{prefix}.{attribute}".removeprefix(".")
            value = state_dict.get(name)
            shape = tuple(param.dtensor.shape)
            is_number = shape == () and getattr(value, "shape", None) == (1,)  # which torch takes for 0-d
            if isinstance(value, torch.Tensor) and tuple(value.shape) != shape and not is_number:
                wrong.append(f"{name} has shape {tuple(value.shape)}, and {shape} in the model")
    if wrong:
        raise ConfigError(
            "the state dict does not fit the model: " + "; ".join(wrong),
            where="load_state_dict()",
            instead="values of these shapes; leave out those that are to keep their values, with strict=False",
        )


def refuse_full_values(module: nn.Module, state_dict: Mapping[str, Any], prefix: str) -> None:
    """Raises `ConfigError` for a plain value of a sharded parameter, which torch has refused to copy."""
    # Asked only then: hooks of the module may shard what they find in the state dict.
    for attribute, param in _params(module):
        value = state_dict.get(prefix + attribute)
        if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.shape == param.dtensor.shape:
            raise ConfigError(
                "the state dict holds full values, and the parameters of the model are sharded",
                where=f"load_state_dict(), {prefix}{attribute}",
                instead="torch.distributed.checkpoint.state_dict.set_model_state_dict(model, state, "
                "options=StateDictOptions(full_state_dict=True)); or model.load_state_dict(state) before the model is "
                "sharded, and inside of `with fsdp_compile.full_params(model):`",
            )


def _params(module: nn.Module) -> Iterator[tuple[str, FSDPParam]]:
    """The sharded parameters of a module itself that it has not removed, by attribute."""
    for attribute, read in reads_of(module).items():
        held, params = module._parameters.get(attribute), read.group.params
        if held is None:
            continue
        found = next((param for param in params if param.parameter is held), None)
        if found is None:  # it was replaced
            found = next((param for param in params if (module, attribute) in param.module_refs), None)
        if found is not None:
            yield attribute, found


def _is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.dtype, one.device, one.shape, one.stride()) != (other.dtype, other.device, other.shape, other.stride()):
        return False
    if is_wrapper(one) or is_wrapper(other):
        return False
    return not one.is_meta and (one.numel() == 0 or one.data_ptr() == other.data_ptr())
