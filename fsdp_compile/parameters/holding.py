"""Gradients that are not summed over all ranks yet: where they are collected, and how they are reduced in the end."""

from __future__ import annotations

import functools
import weakref

import torch

from fsdp_compile.parameters import epilogue, handover, updating
from fsdp_compile.parameters.flat import FlatShard
from fsdp_compile.parameters.held_gradients import HeldGradients
from fsdp_compile.parameters.ops import sum_over_replicas, sum_over_shards
from fsdp_compile.parameters.spec import Sync
from fsdp_compile.parameters.variants import publish, sync_of


def install(flat: FlatShard) -> None:
    """Makes the leaves that gradients of a flat shard go to which are not summed over all ranks.

    A leaf has the shape of what is accumulated, `[size * numel]` or `[numel]`, and no memory: its stride is 0.
    """
    if not flat.leaf.requires_grad:
        return
    spec = flat.slots[0].spec
    for sync, parts in ((Sync.NONE, spec.size), (Sync.SHARD, 1)):
        element = torch.zeros(1, dtype=spec.reduce_dtype, device=spec.compute or flat.leaf.device)
        holder = element.expand(flat.leaf.numel() * parts).requires_grad_()
        holder.register_post_accumulate_grad_hook(functools.partial(_collect, weakref.ref(flat), sync))
        flat.holders[sync] = holder


@torch.compiler.disable
def _collect(reference: weakref.ref[FlatShard], sync: Sync, holder: torch.Tensor) -> None:
    flat = reference()
    gradient, holder.grad = holder.grad, None
    if flat is None or gradient is None:
        return
    handover.refuse_double_backward(flat, gradient)
    updating.refuse_second(flat)
    if sync is Sync.SHARD:
        flat.held.confirm()
    place_of(flat, sync).add(gradient, flat.noted_gradients(sync))
    if sync_of(flat) is not sync:  # the next reads may be such that take it along
        publish(flat)
    epilogue.expect(flat)


def place_of(flat: FlatShard, sync: Sync) -> HeldGradients:
    """Where gradients are collected that are summed as far as `sync`, which is not all the way."""
    return flat.held if sync is Sync.NONE else flat.partial


def reduce_rest(flat: FlatShard) -> None:
    """Reduces, as far as the unit asks for now, what no graph has taken along, and adds it to the parameters' `.grad`.

    That is the case after a backward whose forward ran while gradients were held back, and for parameters that the last
    microbatch did not use.
    """
    sync = sync_of(flat)
    spec = flat.slots[0].spec
    full = flat.held.take_all() if sync is not Sync.NONE else None
    if full is not None:
        flat.partial.add(sum_over_shards(full.value, spec), full.offsets)
    summed = flat.partial.take_all() if sync is Sync.ALL else None
    if summed is not None:
        gradient = sum_over_replicas(summed.value, spec).to(flat.leaf)
        handover.deliver(flat, gradient, summed.offsets)
    if full is not None or summed is not None:
        publish(flat)
