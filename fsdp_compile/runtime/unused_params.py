"""Parameters whose gradients are zero on all ranks because no loss uses the outputs that depend on them.

A compiled backward reduces zeros for them, since their gradients travel with those of others and another rank's loss
may use such an output. Where a rank has such zeros, all ranks ask each other when they compare next, at the end of the
backward or before an update in it. What no rank's loss has used gets no gradient where it has none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from fsdp_compile._torch.distributed import largest
from fsdp_compile.comm import groups
from fsdp_compile.comm.failures import explained
from fsdp_compile.comm.groups import RankStore
from fsdp_compile.runtime.units import FSDPParam, FSDPParamGroup

Numbers = Collection[int]
"""Of parameter groups, as in `ComparedAs.numbers`, in an order that is the same on all ranks."""


def ask(group: FSDPParamGroup) -> None:
    """Makes ranks ask each other which parameters of a group they have used, when they compare next."""
    for place, number in _numbers(group).items():
        place.unused.add(number)


def note_written(group: FSDPParamGroup, written: Iterable[FSDPParam], zeros: Collection[int]) -> None:
    """Records gradients that became `.grad`s where there were none, and drops those that are known to be unused.

    Args:
        group: The parameter group.
        written: The parameters that had no `.grad`.
        zeros: Offsets of those whose gradients are zeros by unused outputs alone.
    """
    group.grads.droppable = {}
    known = group.grads.unused_by_all if _numbers(group) else zeros  # no other rank has a loss
    for param in written:
        offset, gradient = param.spec.offset, param.parameter.grad
        if offset not in zeros or gradient is None:  # a hook has taken it
            continue
        if known is None:
            group.grads.droppable[offset] = (gradient, gradient._version)
        elif offset in known:
            param.parameter.grad = None
    if group.grads.droppable:
        ask(group)


def agree(asked: Mapping[RankStore, Numbers]) -> None:
    """Finds which parameters no rank has used; all ranks of each place call this together.

    Args:
        asked: Where some rank asks, and the parameter groups that its ranks have communicated.
    """
    # A replaced group has the number of the one in its place, and is freed at another time on each rank, maybe.
    alive = [group for group in FSDPParamGroup.alive() if not group.is_replaced]
    used: dict[FSDPParamGroup, list[int]] = {}
    for place, numbers in asked.items():
        of_number = {_numbers(group)[place]: group for group in alive if place in _numbers(group)}
        found = [of_number[number] for number in numbers if number in of_number]
        mine = [used.get(group) or _used(group) for group in found]
        with explained("where ranks compare which parameters their losses use"):
            most = iter(largest([number for each in mine for number in each], groups.comparing_group(place)))
        used |= {group: [next(most) for _ in group.params] for group in found}
    for group, numbers in used.items():
        _drop(group, frozenset(p.spec.offset for p, number in zip(group.params, numbers, strict=True) if not number))


def _used(group: FSDPParamGroup) -> list[int]:
    """For each parameter 0 if it has such zeros alone, written or not, and 1 otherwise."""
    grads = group.grads
    zeros = (grads.unused | grads.zeros) - grads.used | grads.droppable.keys()
    return [int(param.spec.offset not in zeros) for param in group.params]


def _drop(group: FSDPParamGroup, unused: frozenset[int]) -> None:
    for param in group.params_at(unused & group.grads.droppable.keys()):
        written, version = group.grads.droppable[param.spec.offset]
        # Autograd adds in place what a penalty outside of the forward gives the sharded parameter itself.
        if param.parameter.grad is written and written._version == version:
            param.parameter.grad = None
    group.grads.droppable = {}
    group.grads.unused_by_all = unused


def _numbers(group: FSDPParamGroup) -> Mapping[RankStore, int]:
    """Where the ranks meet that reduce gradients with this one, and the group's number there."""
    return {} if group.compared is None else group.compared.numbers
