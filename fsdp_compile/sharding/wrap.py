"""Which modules become units by default, and by FSDP1's wrap policies.

Repeated blocks first: the outermost modules that occur at least twice, with one class, in a `ModuleList`, `Sequential`
or `ModuleDict`. Then every remaining leaf module with a matrix (embedding, output head) by itself, since the two ends
of a model are used at opposite ends of a step. The rest, norms mostly, stays with the root.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

from torch import nn
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy

from fsdp_compile.config.policy import WrapPolicy
from fsdp_compile.errors import ConfigError

CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
"""Modules whose children may be repeated blocks."""


def automatic_units(root: nn.Module, managed: Container[nn.Parameter]) -> list[nn.Module]:
    """Roots of the units of a model, in registration order, without `root`; `managed` are the parameters to shard."""
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
    chosen = {id(m) for m in (*blocks, *ends)}
    return [module for module in root.modules() if id(module) in chosen]


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
        chosen = {m: {} for m in _called_choice(root, policy, managed)[0]}
    return {m: overrides for m, overrides in chosen.items() if m is not root and _has_managed(m, managed)}


def _called_choice(
    module: nn.Module, policy: Callable[..., bool], managed: Container[nn.Parameter]
) -> tuple[Iterable[nn.Module], int]:
    """Chosen modules below and including `module`, children first, and how many elements they cover."""
    numel = sum(p.numel() for p in module.parameters() if p in managed)
    if not policy(module=module, recurse=True, nonwrapped_numel=numel):
        return [], 0
    chosen: list[nn.Module] = []
    covered = 0
    for child in module.children():
        below, below_numel = _called_choice(child, policy, managed)
        chosen.extend(below)
        covered += below_numel
    if policy(module=module, recurse=False, nonwrapped_numel=numel - covered):
        return [*chosen, module], numel
    return chosen, covered
