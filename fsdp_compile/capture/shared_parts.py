"""Parts that two compiled models share, as an actor and a critic share a trunk.

The first of the two that is called would take them into its own units, among parameters that the other one does not
read. As units of their own they belong to both.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from fsdp_compile.runtime.module_state import is_sharded, stored_parameters


def shared_parts(module: nn.Module, others: Iterable[nn.Module]) -> list[nn.Module]:
    """The outermost modules in `module` that are also in another plain model, which neither holds it nor is in it.

    Args:
        module: A plain model that is about to be sharded.
        others: Models that are compiled, or reached by compiled code.
    """
    inside = set(module.modules())
    found: set[nn.Module] = set()
    for other in others:
        theirs = set(other.modules())
        if other not in inside and module not in theirs and not is_sharded(other):
            found |= {part for part in theirs & inside if _can_be_a_unit(part)}
    below = {child for part in found for child in part.modules() if child is not part}
    return [part for part in module.modules() if part in found - below]


def _can_be_a_unit(part: nn.Module) -> bool:
    is_called = type(part).forward is not nn.Module.forward
    return is_called and not is_sharded(part) and any(True for _ in stored_parameters(part))
