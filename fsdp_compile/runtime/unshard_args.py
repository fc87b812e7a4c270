"""What reads of a flat shard take besides it: which gradients, which gathered values.

By default nothing. While gradients are held back, a leaf that they go to; once some are held, the held ones, which
backward adds to its own before it reduces both; while parameters stay gathered, their full values. Each combination is
a graph of its own, compiled once: Dynamo guards on the text of a read and on which tensors are there, not on them.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from fsdp_compile.layout.spec import Sync
from fsdp_compile.runtime import pending
from fsdp_compile.runtime.units import VARIANTS, FlatShard

Variant = tuple[str, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""Arguments of a read besides the flat shard: `variants.py`."""


def set_variant(module: nn.Module, name: str, variant: Variant | None) -> None:
    """Sets what reads of a parameter take besides the flat shard, or that they take nothing."""
    variants = {**module.__dict__.get(VARIANTS, {}), name: variant}
    present = {n: v for n, v in variants.items() if v is not None}
    if present:
        object.__setattr__(module, VARIANTS, present)
    elif VARIANTS in module.__dict__:
        object.__delattr__(module, VARIANTS)


def publish(flat: FlatShard) -> None:
    """Makes the next reads of a flat shard what its unit asks for now."""
    pending.note(flat)
    sync = sync_of(flat)
    into = None if sync is Sync.ALL else flat.holders[sync]
    held = None if sync is Sync.NONE else flat.held.value
    partial = flat.partial.value if sync is Sync.ALL else None
    is_default = sync is Sync.ALL and held is None and partial is None and flat.kept is None
    for slot in flat.slots:
        variant = None
        if not is_default:
            kept = None if flat.kept is None else flat.kept.values[slot.spec.offset]
            variant = (dataclasses.replace(slot.spec, sync=sync).text, kept, into, held, partial)
        for module, attribute in slot.owners:
            set_variant(module, attribute, variant)


def sync_of(flat: FlatShard) -> Sync:
    """Over which ranks the gradients of a flat shard are summed now; frozen ones have none to hold back."""
    return flat.unit.sync if flat.leaf.requires_grad else Sync.ALL
