"""Mixed precision beyond FSDP2's: modules that are excluded, casts of inputs by place in the model, buffers."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compile._torch.fully_shard_calls import is_closed
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
        return MixedPrecisionPolicy(own.param_dtype, own.reduce_dtype, own.output_dtype, casts)
    output_dtype = own.output_dtype if own != call.precision else None
    return MixedPrecisionPolicy(
        own.param_dtype, own.reduce_dtype, output_dtype, own.cast_forward_inputs and not is_split
    )


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


def cast_buffers(modules: Iterable[nn.Module], dtype: torch.dtype) -> None:
    """Casts the floating-point buffers of modules, one by one; state dicts have them in their original dtype."""
    casts: dict[torch.Tensor, torch.Tensor] = {}  # several modules may have one buffer
    for module in modules:
        originals = {
            name: buffer
            for name, buffer in module.named_buffers(recurse=False)
            if buffer.is_floating_point() and buffer.dtype != dtype
        }
        for name, buffer in originals.items():
            module._buffers[name] = casts.setdefault(buffer, buffer.to(dtype))
        if originals:
            module.register_state_dict_post_hook(_Originals(originals, {n: casts[b] for n, b in originals.items()}))


def full_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """`model.named_buffers()`, with those that were cast as they are in their original dtype."""
    casts = {name: next(iter(_casts_of(model, name)), None) for name, _ in model.named_buffers()}
    return {
        name: buffer if (cast := casts[name]) is None else cast[0].full(cast[1], buffer)
        for name, buffer in model.named_buffers()
    }


@torch.no_grad()
def write_buffer(model: nn.Module, name: str, value: torch.Tensor) -> None:
    """Writes a value in the original dtype to a buffer; one that was cast keeps it for state dicts."""
    model.get_buffer(name).copy_(value)
    for hook, attribute in _casts_of(model, name):
        hook.keep(attribute, model.get_buffer(name), value)


def _casts_of(model: nn.Module, name: str) -> list[tuple[_Originals, str]]:
    """What has the original of a buffer that was cast, in each module that has it; none of other buffers."""
    found, buffer = [], model.get_buffer(name)
    for module in model.modules():
        hooks = [hook for hook in module._state_dict_hooks.values() if isinstance(hook, _Originals)]
        found += [(h, n) for h in hooks for n, each in module._buffers.items() if each is buffer and h.has(n)]
    return found


class _Originals:
    """A hook that puts buffers into state dicts as they were before the cast, or if they changed since, cast back."""

    def __init__(self, originals: dict[str, torch.Tensor], casts: dict[str, torch.Tensor]) -> None:
        self._originals = originals
        self._casts = {name: (cast, cast._version) for name, cast in casts.items()}

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
        for name in self._originals:
            buffer = module._buffers.get(name)
            if buffer is not None and prefix + name in state:
                state[prefix + name] = self.full(name, buffer)

    def has(self, name: str) -> bool:
        """Whether it knows a buffer."""
        return name in self._originals

    def full(self, name: str, buffer: torch.Tensor) -> torch.Tensor:
        """A buffer in its original dtype; the same tensor until it changes."""
        cast, version = self._casts[name]
        if buffer is not cast or cast._version != version:
            self.keep(name, buffer, buffer.to(self._originals[name].dtype))
        return self._originals[name]

    def keep(self, name: str, buffer: torch.Tensor, value: torch.Tensor) -> None:
        """Takes a value in the original dtype for a buffer that was given the same, cast."""
        self._originals[name] = value.detach().clone()
        self._casts[name] = buffer, buffer._version
