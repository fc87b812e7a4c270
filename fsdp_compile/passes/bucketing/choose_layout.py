"""Whether the large parameters of a bucket are messages of their own, or packed with their neighbours.

A message of its own is read in place, and costs `Link.message` on its link. Packed, large parameters are copied out of
the gathered message, and gradients into the one that is reduced. The cheaper one is taken, by the times of the cost
model, which are the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_compile.cost.hardware import Hardware
from fsdp_compile.ir.graph import require
from fsdp_compile.ir.queries import InputsByFlat
from fsdp_compile.passes.bucketing.messages import Bucket, Packing, ParamCollective, is_small, make_bucket


def cheapest_bucket(singles: Sequence[ParamCollective], hardware: Hardware | None, partials: InputsByFlat) -> Bucket:
    """The bucket of some parameters in the layout that takes less time; without hardware, nothing is copied.

    `partials` are the inputs with accumulated reduce-scattered gradients.
    """
    apart = make_bucket(singles)
    if hardware is None or len({require(s.start).unit for s in singles}) > 1:
        return apart
    if not all(_can_be_packed(single, partials) for single in singles):
        return apart
    packed = make_bucket(singles, Packing.PACKED)
    saved_us = (len(apart.pieces) - len(packed.pieces)) * hardware.link_of(singles[0].ranks).message.value
    return packed if saved_us > _copies_us(packed, hardware) else apart


def _can_be_packed(single: ParamCollective, partials: InputsByFlat) -> bool:
    spec = single.spec
    return not (single.is_post_forward or spec.gather_format or spec.hook or partials.of(single.flat))


def _copies_us(packed: Bucket, hardware: Hardware) -> float:
    """Time of copying what would otherwise be used in place."""
    together = (single for piece in packed.pieces if len(piece.singles) > 1 for single in piece.singles)
    copied = [single for single in together if not is_small(single) and single.spec.is_contiguous]
    size_bytes = sum(single.full_bytes for single in copied)
    return 2 * size_bytes * 1e6 / hardware.device.bytes_per_s
