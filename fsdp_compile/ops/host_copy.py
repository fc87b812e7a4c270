"""Copies between host and device that overlap with computation: `start_copy` and `wait_copy`.

    compute   | start | mm ------------- | wait | reads the copy
    side      |       | copy ------|

Each direction has its own stream, since a bus carries both at once. From its start to its wait, the graph refers to
source and result: the wait takes both. The wait blocks the stream, not the host: to read what was copied to the host,
synchronize with the stream first. Without an accelerator a copy is a plain one, and the wait does nothing.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

_LIBRARY = torch.library.Library("fsdp_compile", "FRAGMENT")
# Not in CUDA graphs: a start and its wait meet on the host, by an event, and may be in two of them.
_UNRECORDED = (torch.Tag.cudagraph_unsafe,)
_LIBRARY.define("start_copy(Tensor source, str device) -> Tensor", tags=_UNRECORDED)
# The result aliases the first argument: a compiler that reuses memory must not take it for memory of its own.
_LIBRARY.define("wait_copy(Tensor(a) copied, Tensor? source=None) -> Tensor(a)", tags=_UNRECORDED)
_running: dict[int, Any] = {}
"""For the address of each result that is being copied, the event at the end of its copy."""


def start_copy(source: torch.Tensor, device: str) -> torch.Tensor:
    """Starts to copy a tensor to another type of device.

    Args:
        source: `[n]`, contiguous.
        device: Type of the device, the current one of its type; "cpu" gives pinned memory if `source` is on another.

    Returns:
        `[n]`, not to be read before `wait_copy`.
    """
    to_host = device == "cpu"
    if source.device.type == device:
        result = source.clone()
    else:
        # Pinned memory is not reused by its allocator until copies that use it are done.
        result = torch.empty_like(source, device=device, pin_memory=to_host)
    # A graph that raised between a start and its wait left an event at an address that may have been reused.
    _running.pop(result.data_ptr(), None)
    if source.device.type != device and source.numel() > 0:
        on_device = source.device if to_host else result.device
        _running[result.data_ptr()] = _copy_on(source, result, _stream(on_device, device))
    return result


def _copy_on(source: torch.Tensor, result: torch.Tensor, side: Any) -> Any:
    """Queues a copy on the stream `side`; returns the event at its end."""
    streams = torch.get_device_module(side.device.type)
    # By then the source is computed, and earlier uses of the result's memory by the computing stream are done.
    side.wait_stream(streams.current_stream(side.device))
    with streams.stream(side):
        result.copy_(source, non_blocking=True)
        return side.record_event()


@functools.cache
def _stream(on_device: torch.device, _target: str) -> Any:
    """The stream for copies from or to a device, by the type of device that they go to."""
    return torch.get_device_module(on_device.type).Stream(on_device)


def wait_copy(copied: torch.Tensor, source: torch.Tensor | None = None) -> torch.Tensor:
    """Makes the current stream wait for a copy; `source` is passed along if it may be written to afterwards."""
    event = _running.pop(copied.data_ptr(), None)
    if event is not None:
        on_device = copied.device if source is None else source.device
        # After it, the computing stream is behind the copy, so that it may write to source and result.
        event.wait(torch.get_device_module(on_device.type).current_stream(on_device))
    return copied.view_as(copied)


_LIBRARY.impl("start_copy", start_copy, "CompositeExplicitAutograd")
_LIBRARY.impl("wait_copy", wait_copy, "CompositeExplicitAutograd")


@torch.library.register_fake("fsdp_compile::start_copy", lib=_LIBRARY)
def _(source: torch.Tensor, device: str) -> torch.Tensor:
    return torch.empty_like(source, device=device)


@torch.library.register_fake("fsdp_compile::wait_copy", lib=_LIBRARY)
def _(copied: torch.Tensor, source: torch.Tensor | None = None) -> torch.Tensor:  # noqa: ARG001
    return copied.view_as(copied)


START_COPY = torch.ops.fsdp_compile.start_copy.default
WAIT_COPY = torch.ops.fsdp_compile.wait_copy.default
