"""The collectives of a group must be for the same parameters on all of its ranks, in the same order.

Layers of one shape share a compiled graph and send messages of one size: where a rank runs another layer than the
others, no collective fails, and all of them get a mixture of two layers. So each rank notes what its collectives are
for, and the ranks compare one number for all of that at the end of each forward and of each backward.

A note is two numbers: what is done, and for which parameter group.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence

from fsdp_compile._torch.distributed import largest
from fsdp_compile.comm import groups
from fsdp_compile.comm.failures import refuse_lost_ranks
from fsdp_compile.comm.groups import RankStore
from fsdp_compile.comm.rendezvous import Difference
from fsdp_compile.errors import FSDPCompileError, RankMismatchError

Describe = Callable[[int, int], str]
"""One line for a note."""


def compare(place: RankStore, describe: Describe) -> bool:
    """Compares what the ranks of a group have noted since they last did; they call this together.

    Returns:
        Whether some rank of the group has gradients to drop (`RankStore.unused`): the same on all of them.

    Raises:
        RankMismatchError: On every rank of the group, if two of them differ.
        RankFailedError: If a rank does not come in time.
    """
    notes = tuple(place.notes)
    place.notes.clear()
    number = next(place.comparisons)
    digest, asks = digest_of(notes), bool(place.unused)
    place.unused.clear()
    try:
        highest, lowest, some_asks = largest([digest, -digest, int(asks)], groups.comparing_group(place))
    except RuntimeError as error:
        refuse_lost_ranks(error, "at the end of a forward or backward, where ranks compare what they have gathered")
        raise
    if highest == -lowest:
        return bool(some_asks)
    text = "\n".join(describe(what, whose) for what, whose in _pairs(notes))
    try:
        difference = place.rendezvous().compare(f"read/{number}", str(digest), text)
        assert difference is not None
        raise _mismatch(place.ranks, difference)
    except FSDPCompileError as error:
        for each in groups.rank_stores():
            each.rendezvous().tell(error)
        raise


def digest_of(notes: Iterable[int]) -> int:
    """A number of 56 bits that stands for some notes: its negative fits into an int64, too."""
    return int.from_bytes(hashlib.blake2b(array("q", notes).tobytes(), digest_size=7).digest(), "big")


def _pairs(notes: Sequence[int]) -> Iterator[tuple[int, int]]:
    return zip(notes[::2], notes[1::2], strict=True)


def _mismatch(ranks: tuple[int, ...], found: Difference) -> RankMismatchError:
    number, mine, others = found.parting()
    return RankMismatchError(
        f"rank {ranks[0]} and rank {ranks[found.other]} gather or reduce different parameters in the same place of a "
        "step: what this step computed is a mixture of them, and no parameter was changed",
        where=f"number {number + 1} since the last forward or backward: [{mine}] on rank {ranks[0]}, [{others}] on "
        f"rank {ranks[found.other]}",
        instead="the same control flow on every rank: which modules run, and in which order, must not depend on a "
        "rank's number or data; a module that has no rows on a rank is called there all the same, with an empty tensor",
    )
