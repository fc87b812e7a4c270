"""Numbers that a graph must keep to, in addition to the rules that need none."""

from __future__ import annotations

import dataclasses

from fsdp_compile.layout.flat_layout import ReduceLayout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What the caller of `check` promised; `None` leaves a number unchecked.

    Attributes:
        prefetch: Buckets that may be in flight ahead of the one that is needed next.
        alone: Whether a bucket that is gathered ahead may be live only with those that are still in use when it is
            needed: all others are freed first.
        unsharded_bytes: Bytes of gathered parameters that may be live at any node.
        joined_bytes: Bytes of full parameters, or of full gradients, in a collective that several units share.
        num_fwd_outputs: How many outputs of the forward graph go to the caller (results, mutated inputs); the others
            are saved for backward. If `None`, the descriptions that AOTAutograd writes on the output node tell.
        reduce_layout: Only "aligned" promises that messages of reductions are aligned.
    """

    prefetch: int | None = None
    alone: bool = False
    unsharded_bytes: int | None = None
    joined_bytes: int | None = None
    num_fwd_outputs: int | None = None
    reduce_layout: ReduceLayout = ReduceLayout.ALIGNED
