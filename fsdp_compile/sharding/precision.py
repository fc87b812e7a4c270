"""Mixed precision beyond FSDP2's: modules that are excluded, casts of inputs by place in the model."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compile._torch.fully_shard_calls import is_closed
from fsdp_compile.config.policy import as_dict
from fsdp_compile.sharding.arguments import UnitPolicy
from fsdp_compile.sharding.units import Unit


def torch_precision(unit: Unit, call: UnitPolicy, *, is_split: bool) -> MixedPrecisionPolicy:
    """FSDP2's policy of a unit.

    A module casts its inputs where a call or a wrap policy made it a unit: the automatic split changes no numbers.
    """
    own, dtype = unit.policy.precision, unit.policy.own_dtype
    if dtype is not None:  # inputs are cast to it, and parameters, which are of it, are not
        return MixedPrecisionPolicy(dtype, None, own.param_dtype)
    if unit.is_call:
        at_root = own.cast_root_forward_inputs
        casts = own.cast_forward_inputs if at_root is None else at_root
        return MixedPrecisionPolicy(**as_dict(own) | {"cast_forward_inputs": casts})
    output_dtype = own.output_dtype if own != call.precision else None
    casts = own.cast_forward_inputs and not is_split
    return MixedPrecisionPolicy(**as_dict(own) | {"output_dtype": output_dtype, "cast_forward_inputs": casts})


def with_excluded(
    roots: Sequence[nn.Module], policy: UnitPolicy, chosen: Mapping[nn.Module, UnitPolicy]
) -> tuple[UnitPolicy, dict[nn.Module, UnitPolicy]]:
    """The policies of the call and of its units, with one more unit for each module that mixed precision excludes."""
    found: dict[nn.Module, UnitPolicy] = {}
    for root in roots:
        _visit(root, policy, chosen, found)
    if all(root in found for root in roots):  # else nothing is left for the unit of the call
        own = found[roots[0]]
        return own, {module: each for module, each in found.items() if module not in roots}
    return policy, found


def _visit(
    module: nn.Module,
    around: UnitPolicy,
    chosen: Mapping[nn.Module, UnitPolicy],
    found: dict[nn.Module, UnitPolicy],
) -> None:
    if is_closed(module) or module in found:
        return
    policy = chosen.get(module, around)
    precision = policy.precision
    asked = (precision.param_dtype, precision.reduce_dtype, precision.buffer_dtype, precision.gather_dtype)
    if any(each is not None for each in asked) and isinstance(module, precision.full_precision_classes):
        values: Iterable[torch.Tensor] = itertools.chain(module.parameters(), module.buffers())
        dtype = next((t.dtype for t in values if t.is_floating_point()), torch.float32)
        found[module] = dataclasses.replace(policy, own_dtype=dtype)
        return
    if module in chosen:
        found[module] = policy
    for child in module.children():
        _visit(child, policy, chosen, found)
