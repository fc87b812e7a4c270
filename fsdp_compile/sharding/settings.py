"""What a call of `fully_shard` says to the compiler, and FSDP2 has no place for."""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class ShardingSettings:
    """Settings of one unit, kept with FSDP2's state of it (`_torch.fully_shard_calls.settings_of`).

    Attributes:
        is_split: Whether the automatic split made the unit; a later call on a module around its model takes that back.
        cast_inputs_inside: `cast_forward_inputs` of the unit inside of a larger model.
        auto_reshard: `reshard_after_forward="auto"`, for which FSDP2 reshards.
        gather_dtype: What the parameters are sent in, if that is less than FSDP2's 16 or 32 bits.
        keep_low_precision_grads: As in `MixedPrecision`.
        full_precision_in_eval: The same.
        casts_output_in_eval: Whether the unit's output dtype counts in eval mode; not that of what follows a module
            that mixed precision excludes, if that is in full precision then.
        separate_reduce_group: Whether reductions have a process group of their own.
    """

    is_split: bool = False
    cast_inputs_inside: bool = True
    auto_reshard: bool = False
    gather_dtype: torch.dtype | str | None = None
    keep_low_precision_grads: bool = False
    full_precision_in_eval: bool = False
    casts_output_in_eval: bool = True
    separate_reduce_group: bool = False
