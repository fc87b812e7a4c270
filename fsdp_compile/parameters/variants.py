"""What reads of a flat shard take besides it: which gradients, which gathered values.

By default nothing. While gradients are held back, a leaf that they go to; once some are held, the held ones, which
backward adds to its own before it reduces both; while parameters stay gathered, their full values. Each combination is
a graph of its own, compiled once: Dynamo guards on the text of a read and on which tensors are there, not on them.
"""

from __future__ import annotations

import dataclasses

from fsdp_compile.parameters import unsettled, updating
from fsdp_compile.parameters.attributes import EVAL_READS, READS
from fsdp_compile.parameters.flat import FlatShard
from fsdp_compile.parameters.queues import reduce_alias
from fsdp_compile.parameters.reads import original_class, read_as_written, set_variant
from fsdp_compile.parameters.spec import ReadSpec, Reshard, Sync, Update
from fsdp_compile.parameters.unit import Unit, titles


def publish(flat: FlatShard) -> None:
    """Makes the next reads of a flat shard what its unit asks for now."""
    unsettled.note(flat)
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


def respecify(unit: Unit) -> None:
    """Writes what a unit's policy, accumulation and optimizers say into its slots' specs and into the next reads."""
    for flat in unit.flats:
        update = flat.progress.update = updating.wanted(flat)
        for slot in flat.slots:
            slot.spec = _respecified(slot.spec, unit, update)
            if slot.eval_spec is not None:
                slot.eval_spec = _respecified(slot.eval_spec, unit, update)
            for module, attribute in slot.owners:
                module.__dict__[READS][attribute] = (flat.leaf, slot.spec.text, flat)
                module.__dict__[EVAL_READS].update(slot.eval_read(attribute))
        publish(flat)
    for module in {module: None for slot in unit.slots for module, _ in slot.owners}:
        if original_class(module) is not type(module):  # else `full_params` gives the class back
            read_as_written(module)


def _respecified(spec: ReadSpec, unit: Unit, update: Update) -> ReadSpec:
    where = unit.policy.arrangement
    group = spec.kept_group if where.kept_over > 1 else ""
    reshard = where.reshard
    if spec.size == 1 and update is Update.IN_BACKWARD:
        # A read of the only rank is a view of the flat shard: backward must see who reads it before the update.
        reshard = Reshard.AFTER_FORWARD
    return dataclasses.replace(
        spec,
        reshard=reshard,
        kept_over=where.kept_over,
        kept_group=group,
        divide=unit.divide,
        reduce_group=reduce_alias(unit),
        forward_prefetch=titles(unit.forward_prefetch),
        backward_prefetch=titles(unit.backward_prefetch),
        update=update,
    )
