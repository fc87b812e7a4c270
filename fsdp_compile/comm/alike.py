"""Whether all ranks of some groups say the same, before they do something together that needs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fsdp_compile.errors import RankMismatchError

T = TypeVar("T")


def of_first(said: T, groups: Sequence[dist.ProcessGroup], device: torch.device) -> T:
    """What the first rank says, on every rank of the groups of a mesh's dimensions; it goes through pickle."""
    sent: list[Any] = [said]
    for group in groups:
        dist.broadcast_object_list(sent, group=group, group_src=0, device=device)
    found: T = sent[0]
    return found


def is_any(holds: bool, groups: Sequence[dist.ProcessGroup], device: torch.device) -> bool:  # noqa: FBT001
    """Whether something holds on some rank of the groups of a mesh's dimensions, which call it together."""
    found = torch.tensor(int(holds), device=device)
    for group in groups:
        dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return bool(found.item())


def require(
    described: Mapping[str, str],
    groups: Sequence[dist.ProcessGroup],
    device: torch.device,
    *,
    what: str,
    where: str,
    instead: str,
) -> None:
    """Compares short texts, by name, over the groups of a mesh's dimensions, whose ranks call it together.

    Raises:
        RankMismatchError: On all ranks, if some rank has other names or texts; a rank names those in which it differs
            from the first one. `what` the texts are about, `where` the call is and what to do `instead` are its own.
    """
    first = of_first(described, groups, device)
    if not is_any(first != described, groups, device):
        return
    differ = [name for name in sorted({*first, *described}) if first.get(name) != described.get(name)]
    shown = "; ".join(
        f"{name} is {described.get(name, 'missing')}, and on the first rank {first.get(name, 'missing')}"
        for name in differ[:5]
    )
    raise RankMismatchError(
        f"ranks have different {what}: {shown or 'another rank than this one differs from the first'}",
        where=where,
        instead=instead,
    )
