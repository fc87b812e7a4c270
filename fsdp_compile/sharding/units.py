"""Units: which modules one call of torch's `fully_shard` each is for, in which order, and in which precision.

By default, repeated blocks first: the outermost modules that occur at least twice, with one class, in a `ModuleList`,
`Sequential` or `ModuleDict`. Then every remaining leaf module with a matrix (embedding, output head) by itself, since
the two ends of a model are used at opposite ends of a step. The rest, norms mostly, stays with the root.
"""

from __future__ import annotations

import dataclasses
import graphlib
import itertools
from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy

from fsdp_compile._torch.fully_shard_calls import is_closed, recursive_wrap
from fsdp_compile.config.policy import WrapPolicy, as_dict
from fsdp_compile.errors import ConfigError, UnsupportedModelError
from fsdp_compile.sharding.arguments import UnitPolicy

CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
"""Modules whose children may be repeated blocks."""


@dataclasses.dataclass(eq=False)
class Unit:
    """One call of torch's function.

    Attributes:
        modules: The argument; torch wants a list where they are several.
        is_call: Whether it is the unit of the whole call, which has what the others leave.
        own: The modules whose parameters are the unit's, inner ones first.
    """

    modules: list[nn.Module]
    policy: UnitPolicy
    is_call: bool = False
    own: list[nn.Module] = dataclasses.field(default_factory=list)

    def params(self) -> list[nn.Parameter]:
        """The parameters of `own`, those that are not sharded included."""
        return list(dict.fromkeys(p for module in self.own for p in module.parameters(recurse=False)))

    def tensors(self) -> set[torch.Tensor]:
        """Parameters and buffers of `own`."""
        return {*self.params(), *(b for module in self.own for b in module.buffers(recurse=False))}


def open_modules(roots: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Modules and those in them, without what torch's function was called on before, inner ones first."""
    seen: set[nn.Module] = set()

    def inner_first(module: nn.Module) -> Iterator[nn.Module]:
        if module not in seen and not is_closed(module):
            seen.add(module)
            yield from itertools.chain.from_iterable(map(inner_first, module.children()))
            yield module

    return itertools.chain.from_iterable(map(inner_first, roots))


def plan_units(
    roots: Sequence[nn.Module],
    policy: UnitPolicy,
    chosen: Mapping[nn.Module, UnitPolicy],
    managed: Mapping[nn.Parameter, str],
) -> list[Unit]:
    """The units of a call, each before those around it.

    Args:
        roots: The modules of the call.
        policy: Of what `chosen` leaves.
        chosen: Modules that become units, and their policies.
        managed: The parameters to shard, and their names.

    Raises:
        ConfigError: If units of different policies share a parameter.
        UnsupportedModelError: If units that share parameters are inside of each other.
    """
    units = [Unit(called, own) for module, own in chosen.items() if (called := _with_forward(module))]
    units.append(Unit([root for root in roots if root not in chosen], policy, is_call=True))
    while True:
        for parameter, owners in _owners(roots, units).items():
            if parameter in managed and len(owners) > 1:
                units = _joined(units, owners, managed[parameter])
                break
        else:
            break
    units = _innermost_first(units)
    taken: set[nn.Module] = set()
    for unit in units:
        unit.own = [module for module in open_modules(unit.modules) if module not in taken]
        taken.update(unit.own)
    return units


def _with_forward(module: nn.Module) -> list[nn.Module]:
    """What torch's function can be called on for a module: a container that is never called, by its children."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward:
        with_params = [child for child in module.children() if any(True for _ in child.parameters())]
        return [part for child in with_params for part in _with_forward(child)]
    return [module]


def _owners(roots: Iterable[nn.Module], units: Collection[Unit]) -> dict[nn.Parameter, list[Unit]]:
    """The units of all places of each parameter."""
    at = {module: unit for unit in units for module in unit.modules}
    call = next(unit for unit in units if unit.is_call)
    found: dict[nn.Parameter, dict[Unit, None]] = {}
    seen: set[tuple[nn.Module, Unit]] = set()
    todo = [(root, call) for root in roots]
    while todo:
        module, around = todo.pop()
        unit = at.get(module, around)
        if (module, unit) in seen or is_closed(module):
            continue
        seen.add((module, unit))
        for parameter in module.parameters(recurse=False):
            found.setdefault(parameter, {})[unit] = None
        todo.extend((child, unit) for child in module.children())
    return {parameter: list(owners) for parameter, owners in found.items()}


def _joined(units: list[Unit], parts: list[Unit], name: str) -> list[Unit]:
    """Units that share a parameter become one: FSDP2 gathers a parameter with one unit."""
    if any(part.policy != parts[0].policy for part in parts):
        raise ConfigError(
            "it is in units that are to be sharded, or to compute, in different ways",
            where=name,
            instead="one policy for all modules that have it",
        )
    call = next((part for part in parts if part.is_call), None)
    if call is not None:
        return [unit for unit in units if unit is call or unit not in parts]
    modules = [module for part in parts for module in part.modules]
    inside = {below for module in modules for below in module.modules() if below is not module}
    one = Unit([module for module in modules if module not in inside], parts[0].policy)
    return [one if unit is parts[0] else unit for unit in units if unit is parts[0] or unit not in parts]


def _innermost_first(units: Sequence[Unit]) -> list[Unit]:
    parts = {unit: {below for module in unit.modules for below in module.modules()} for unit in units}
    inside = {u: [v for v in units if v is not u and not parts[u].isdisjoint(v.modules)] for u in units}
    try:
        return list(graphlib.TopologicalSorter(inside).static_order())
    except graphlib.CycleError as error:
        raise UnsupportedModelError(
            "units that share parameters are inside of each other",
            where=", ".join(type(module).__name__ for unit in error.args[1] for module in unit.modules),
            instead="another auto_wrap_policy, or calls of fully_shard() on lists of modules",
        ) from error


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


def automatic_units(root: nn.Module, managed: Container[nn.Parameter]) -> list[nn.Module]:
    """Roots of the units of a model, without `root`; `managed` are the parameters to shard."""
    blocks = _repeated_blocks(root, managed)
    if not blocks:
        return []
    inside = {id(m) for block in blocks for m in block.modules()}
    ends = [
        module
        for module in root.modules()
        if id(module) not in inside
        and module is not root
        and any(p in managed and p.dim() >= 2 for p in module.parameters(recurse=False))
    ]
    return [*blocks, *ends]


def _repeated_blocks(module: nn.Module, managed: Container[nn.Parameter]) -> list[nn.Module]:
    blocks: list[nn.Module] = []
    children = [child for child in module.children() if _has_managed(child, managed)]
    classes = Counter(type(child) for child in children)
    for child in children:
        repeated = isinstance(module, CONTAINERS) and classes[type(child)] >= 2
        inner = _repeated_blocks(child, managed) if isinstance(child, CONTAINERS) or not repeated else []
        blocks.extend([child] if repeated and not inner else inner)
    return blocks


def _has_managed(module: nn.Module, managed: Container[nn.Parameter]) -> bool:
    return any(p in managed for p in module.parameters())


def policy_units(
    root: nn.Module, policy: WrapPolicy, managed: Container[nn.Parameter]
) -> dict[nn.Module, Mapping[str, Any]]:
    """Roots of the units that one of FSDP1's wrap policies chooses, without `root`, and what each overrides.

    Args:
        root: The model.
        policy: `ModuleWrapPolicy`, `CustomPolicy`, or a callable of `(module, recurse, nonwrapped_numel)` such as a
            `functools.partial` of `size_based_auto_wrap_policy` or `transformer_auto_wrap_policy`.
        managed: The parameters to shard.

    Raises:
        ConfigError: If it is none of these, or a `CustomPolicy` returns neither a bool nor a dict.
    """
    if not isinstance(policy, ModuleWrapPolicy | CustomPolicy) and not callable(policy):
        raise ConfigError(
            f"{policy!r} is no wrap policy",
            where="auto_wrap_policy",
            instead="ModuleWrapPolicy({Block}), a CustomPolicy, or a callable of (module, recurse, nonwrapped_numel)",
        )
    chosen: Mapping[nn.Module, Mapping[str, Any]]
    if isinstance(policy, ModuleWrapPolicy | CustomPolicy):
        try:
            chosen = policy._run_policy(root, set(), {})
        except ValueError as error:
            raise ConfigError(
                f"the wrap policy failed: {error}",
                where="auto_wrap_policy",
                instead="return True, False, or a dict of arguments for that unit",
            ) from error
    else:
        found: list[nn.Module] = []

        def noted(module: nn.Module) -> nn.Module:
            found.append(module)
            return module

        # It registers what this returns in the place of each chosen module: the module itself.
        recursive_wrap(root, policy, noted, set(), {p for p in root.parameters() if p not in managed})
        chosen = {module: {} for module in found}
    return {m: overrides for m, overrides in chosen.items() if m is not root and _has_managed(m, managed)}
