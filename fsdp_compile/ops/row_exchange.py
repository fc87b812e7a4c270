"""Rows of a parameter that is sharded by rows, exchanged between the ranks that want them and the rank that has each.

    ids of a rank         [5, 0, 5, 9]          rows 0-3 are rank 0's, 4-7 rank 1's, 8-11 rank 2's
    asked of the owners   0: [0]  1: [5, 5]  2: [9]
    rows come back, gradients go there, in the order in which they were asked for

The ranks exchange first how many rows each wants of each other, so that only these rows are sent, and ranks may want
different numbers of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed as dist

from fsdp_compile._torch.distributed import resolve_group
from fsdp_compile.layout.spec import UnshardSpec

_BAD_IDS = -1
"""Sent in place of a number of rows by a rank whose ids are out of range: then all ranks raise, and none waits."""


@dataclasses.dataclass(frozen=True)
class RowExchange:
    """Which ranks want which rows of which rank.

    Attributes:
        order: The positions of this rank's ids, `[ids]`, owner after owner.
        asked: How many rows this rank wants of each rank.
        wanted: How many rows each rank wants of this one.
        rows: Which of this rank's own rows the others want, rank after rank: `[sum(wanted)]`.
    """

    order: torch.Tensor
    asked: Sequence[int]
    wanted: Sequence[int]
    rows: torch.Tensor
    group: dist.ProcessGroup

    @classmethod
    def of(cls, ids: torch.Tensor, spec: UnshardSpec) -> RowExchange:
        """Exchanges which rows each rank of the shard group wants; all of them call this together.

        Args:
            ids: Rows of the full parameter that this rank wants, of any shape.
            spec: Of the parameter.

        Raises:
            IndexError: On every rank of the shard group, if an id of any of them is no row.
        """
        group = resolve_group(spec.group)
        assert group is not None
        ids = ids.reshape(-1).long()
        rows_per_rank = spec.shard_shape[0]
        owners = ids.div(rows_per_rank, rounding_mode="floor").clamp(0, spec.size - 1)
        order = owners.argsort(stable=True)
        asked = owners.bincount(minlength=spec.size)
        good = ((ids >= 0) & (ids < spec.shape[0])).all()
        wanted = _exchanged(torch.where(good, asked, _BAD_IDS), group)
        asked_of, wanted_by = torch.stack([asked, wanted]).tolist()  # the host waits once: sizes depend on them
        _refuse_bad_ids(ids, spec, wanted_by, group)
        rows = _exchanged((ids % rows_per_rank)[order], group, sent=asked_of, received=wanted_by)
        return cls(order, asked_of, wanted_by, rows, group)

    def bring(self, rows: torch.Tensor) -> torch.Tensor:
        """Sends every rank the rows that it wants.

        Args:
            rows: `[sum(wanted), width]`: those that the others want of this rank, in the order of `self.rows`.

        Returns:
            `[ids, width]`: those that this rank wants, in the order of its ids.
        """
        arrived = _exchanged(rows, self.group, sent=self.wanted, received=self.asked)
        return torch.empty_like(arrived).index_copy_(0, self.order, arrived)

    def send(self, gradients: torch.Tensor) -> torch.Tensor:
        """Sends every rank the gradients of its rows.

        Args:
            gradients: `[ids, width]`: of the rows that this rank looked up, in the order of its ids.

        Returns:
            `[sum(wanted), width]`: of this rank's rows, in the order of `self.rows`.
        """
        return _exchanged(gradients[self.order], self.group, sent=self.asked, received=self.wanted)

    def askers(self) -> torch.Tensor:
        """Which rank wants each of `rows`: `[sum(wanted)]`."""
        ranks = torch.arange(len(self.wanted), device=self.rows.device)
        return ranks.repeat_interleave(torch.tensor(self.wanted, device=ranks.device), output_size=len(self.rows))


def _exchanged(
    message: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    sent: Sequence[int] | None = None,
    received: Sequence[int] | None = None,
) -> torch.Tensor:
    """The parts of all ranks for this one, rank after rank; equal parts if no numbers of rows are given."""
    length = message.shape[0] if received is None else sum(received)
    # Zeros: the fake group of tests and benchmarks, which sends nothing, leaves the memory as it is.
    arrived = message.new_zeros((length, *message.shape[1:]))
    dist.all_to_all_single(
        arrived, message, None if received is None else list(received), None if sent is None else list(sent), group
    )
    return arrived


def _refuse_bad_ids(ids: torch.Tensor, spec: UnshardSpec, wanted: Sequence[int], group: dist.ProcessGroup) -> None:
    bad = [rank for rank, number in enumerate(wanted) if number == _BAD_IDS]
    if group.rank() in bad:
        raise IndexError(
            f"ids from {ids.min().item()} to {ids.max().item()} are looked up in an embedding of {spec.shape[0]} rows"
        )
    if bad:
        ranks = ", ".join(str(dist.get_process_group_ranks(group)[rank]) for rank in bad)
        raise IndexError(f"rank {ranks} looks up ids that are out of range in an embedding of {spec.shape[0]} rows")
