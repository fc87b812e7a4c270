"""Parameters whose gradients are zero on all ranks because no loss uses the outputs that depend on them.

A compiled backward reduces zeros for them, since their gradients travel with those of others and another rank's loss
may use such an output. Where a rank has such zeros and a parameter's `.grad` was `None`, all ranks ask each other at
the end of the backward, and what no rank's loss has used is `None` again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from fsdp_compile._torch.distributed import largest
from fsdp_compile.comm import groups
from fsdp_compile.comm.failures import explained
from fsdp_compile.comm.groups import RankStore
from fsdp_compile.runtime.units import FSDPParam, FSDPParamGroup

Numbers = Collection[int]
"""Of parameter groups, as `ComparedAs.number`, in an order that is the same on all ranks."""


def note_written(group: FSDPParamGroup, written: Iterable[FSDPParam], zeros: Collection[int]) -> None:
    """Records gradients that became `.grad`s where there were none: of these the ones at `zeros` may be dropped."""
    found = {param.spec.offset: param.parameter.grad for param in written if param.spec.offset in zeros}
    places = [] if group.compared is None else [group.compared.shard, group.compared.replicate]
    if not any(places):  # no other rank has a loss
        for param in group.params_at(found):
            param.parameter.grad = None
        return
    group.grads.droppable = {offset: grad for offset, grad in found.items() if grad is not None}
    for place in places:
        if place is not None and group.grads.droppable:
            assert group.compared is not None
            place.unused.add(group.compared.number)


def drop(asked: Mapping[RankStore, Numbers]) -> None:
    """Drops the gradients that no rank has used; all ranks of each place call this together.

    Args:
        asked: Where some rank asks, and the parameter groups that its ranks have communicated.
    """
    alive = {group.compared.number: group for group in FSDPParamGroup.alive() if group.compared is not None}
    used: dict[tuple[FSDPParamGroup, int], bool] = {}
    for place, numbers in asked.items():
        found = [alive[number] for number in numbers if number in alive and _meets(alive[number], place)]
        keys = [(group, param.spec.offset) for group in found for param in group.params]
        mine = [int(used.get((group, at), at not in group.grads.droppable)) for group, at in keys]
        with explained("at the end of a backward, where ranks compare which parameters their losses use"):
            used |= zip(keys, map(bool, largest(mine, groups.comparing_group(place))), strict=True)
    for group in {group for group, _ in used}:
        unused = [param for param in group.params if not used[group, param.spec.offset]]
        for param in unused:
            if param.parameter.grad is group.grads.droppable.get(param.spec.offset):
                param.parameter.grad = None
        group.grads.droppable = {}


def _meets(group: FSDPParamGroup, place: RankStore) -> bool:
    return group.compared is not None and place in (group.compared.shard, group.compared.replicate)
