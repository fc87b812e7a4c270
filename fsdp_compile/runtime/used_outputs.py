"""Outputs of a graph that the loss of no rank uses: another rank's loss may need what this one's leaves out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fsdp_compile._torch.distributed import largest
from fsdp_compile.comm import groups
from fsdp_compile.comm.failures import refuse_lost_ranks
from fsdp_compile.runtime import read_order
from fsdp_compile.runtime.units import FSDPParamGroup


def used_on_any_rank(reduced: Iterable[FSDPParamGroup], used: Sequence[bool]) -> list[bool]:
    """Which outputs of a graph are used by some rank with which this one reduces gradients.

    Args:
        reduced: The parameter groups that the backward of the graph reduces gradients of.
        used: Which outputs this rank uses.

    Raises:
        RankMismatchError: If the ranks are not in the same graph.
        RankFailedError: If a rank does not come in time.
    """
    compared = [group.compared for group in reduced if group.compared is not None]
    places = [place for place in groups.rank_stores() if any(place in (c.shard, c.replicate) for c in compared)]
    read_order.compare()  # so that they are in one graph, and have as many outputs to compare
    found = [int(each) for each in used]
    try:
        for place in places:
            found = largest(found, groups.comparing_group(place))
    except RuntimeError as error:
        refuse_lost_ranks(error, "in a compiled backward, where ranks compare which outputs their losses use")
        raise
    return [number > 0 for number in found]
