"""Notes of what this rank gathers and reduces, which ranks compare before a wrong number can reach a parameter.

They compare when an outermost forward has ended, at the end of each backward, and before each update in backward.
"""

from __future__ import annotations

import enum

import torch

from fsdp_compile._torch.autograd import after_this_backward, backward_in_progress
from fsdp_compile.comm import groups, read_order
from fsdp_compile.runtime import unused_params
from fsdp_compile.runtime.units import FSDPParamGroup


class Done(enum.IntEnum):
    """What a note says was done; the lowest two bits of its first number."""

    READ = 0
    """One parameter was gathered: the other bits are its offset, or a digest of the compiled graph that gathers."""
    REDUCED = 1
    """The gradient of one parameter was reduced, likewise."""
    UNSHARDED = 2
    """All parameters of the group were gathered."""
    REDUCED_REST = 3
    """The accumulated gradients of the group were reduced."""


LARGEST_DIGEST = 2**56
"""What a digest is smaller than."""
_LARGEST_OFFSET = 2**57
"""What is added to digests of graphs, so that no offset is like them."""


def in_graph(digest: int, done: Done) -> int:
    """What to note for the collectives of a compiled graph; `digest`, of 56 bits, stands for their order."""
    return ((_LARGEST_OFFSET + digest) << 2) + done


def note(group: FSDPParamGroup, done: Done, offset: int = 0) -> None:
    """Notes what was done for a parameter group, or for its parameter at `offset`."""
    what = (offset << 2) + done
    note_all(group, what, what if done & Done.REDUCED else None)


def note_all(group: FSDPParamGroup, in_shard_group: int, in_replicate_group: int | None) -> None:
    """Notes what a parameter group's collectives over its shard group are, and those over its replicas if any."""
    compared = group.compared
    if compared is None:
        return
    if compared.shard is not None:
        compared.shard.notes.extend((in_shard_group, compared.numbers[compared.shard]))
    if compared.replicate is not None and in_replicate_group is not None:
        compared.replicate.notes.extend((in_replicate_group, compared.numbers[compared.replicate]))
    backward = backward_in_progress()
    if backward not in (-1, group.unit.model.compared_in_backward):
        group.unit.model.compared_in_backward = backward
        after_this_backward(compare)


@torch.compiler.disable
def compare_after_forward() -> None:
    """As `compare`, unless the forward runs again in a backward, at whose end ranks compare."""
    if backward_in_progress() == -1:
        compare()


@torch.compiler.disable
def compare(*, in_backward: bool = False) -> None:
    """Compares what was noted with the other ranks; raises `RankMismatchError` on all of them if two differ.

    Args:
        in_backward: Whether the backward goes on: at its end ranks compare again, if only which parameters they use.
    """
    asked: dict[groups.RankStore, unused_params.Numbers] = {}
    for place in groups.rank_stores():
        if place.notes or (place.compared_early and not in_backward):
            numbers = [*place.compared_early, *place.notes[1::2]]
            place.compared_early[:] = numbers if in_backward else []
            if read_order.compare(place, lambda what, whose: _line(place, what, whose)):  # noqa: B023  called at once
                asked[place] = dict.fromkeys(numbers)
    if asked:
        unused_params.agree(asked)


def _line(place: groups.RankStore, what: int, whose: int) -> str:
    done, offset = Done(what & 3), what >> 2
    verb = "reduces gradients of" if done & Done.REDUCED else "gathers"
    for group in FSDPParamGroup.alive():
        compared = group.compared
        if compared is not None and compared.numbers.get(place) == whose:
            is_one = done in (Done.READ, Done.REDUCED) and offset < _LARGEST_OFFSET
            params = group.params_at([offset]) if is_one else group.params
            return f"{verb} {', '.join(group.unit.parameter_name(param) for param in params)}"
    return f"{verb} parameters of a model that is deleted"
