"""The largest number of bytes that are alive at one moment of a step, as the allocator saw it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile


def measured_peak_bytes(model: nn.Module, inputs: object, step: Callable[[], None], device: str) -> int:
    """Peak of one step: parameters, buffers, inputs and everything that the step allocates.

    On a CPU every allocation of torch's is counted, compiled kernels' included; on CUDA the allocator's own maximum.

    Args:
        model: Its parameters are there before the step; gradients must not be.
        inputs: Tensors in tuples, lists and dicts.
        step: Forward and backward.
        device: "cpu" or "cuda".
    """
    gc.collect()
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return held_bytes(model, inputs) + torch.cuda.max_memory_allocated() - before
    held = held_bytes(model, inputs)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    result = profiled.profiler.kineto_results
    events = [event for event in result.events() if event.name() == "[memory]"]
    alive = largest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        largest = max(largest, alive)
    return held + largest


def held_bytes(model: nn.Module, inputs: object) -> int:
    """Bytes that are there before a step."""
    tensors = [t for t in torch.utils._pytree.tree_leaves(inputs) if isinstance(t, Tensor)]
    return storage_bytes([*model.parameters(), *model.buffers(), *tensors])


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory behind tensors on this rank; memory that several share counts once."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())
