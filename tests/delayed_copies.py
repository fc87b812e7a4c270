"""A machine whose copies between host and device happen as late as they may: at the wait, and not before.

Host and device are the CPU. Who reads a copy before its wait reads garbage; who writes to what is being copied, before
the wait, changes the copy. So numbers that are right here are right however long a bus takes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.distributed.fsdp import CPUOffloadPolicy

from fsdp_compile._torch import fully_shard as fsdp2
from fsdp_compile.fsdp2.param_group import ParamGroup
from fsdp_compile.layout.spec import UnshardSpec
from fsdp_compile.ops import host_copy  # noqa: F401  registers the operators

ON_SUCH_A_HOST = CPUOffloadPolicy(pin_memory=False)
"""As `fully_shard(offload_policy=...)`: graphs copy as they do for a GPU, in `host_apart()`."""


@contextmanager
def host_apart() -> Iterator[None]:
    """Models that are taken over in the block copy between host and device, if they are offloaded, as for a GPU."""
    common_spec = ParamGroup._common_spec

    def on_a_device(group: ParamGroup, *args: Any) -> UnshardSpec:
        spec = common_spec(group, *args)
        return dataclasses.replace(spec, compute="cpu") if fsdp2.offloads(group.of_torch) else spec

    with mock.patch.object(ParamGroup, "_common_spec", on_a_device):
        yield


@contextmanager
def delayed_copies() -> Iterator[list[int]]:
    """Copies as late as possible; yields the sizes of all copies that were made, in bytes."""
    running: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    sizes: list[int] = []

    def start(source: torch.Tensor, _device: str) -> torch.Tensor:
        result = torch.full_like(source, float("nan"))
        running[result.data_ptr()] = (source.detach(), result)
        return result

    def wait(copied: torch.Tensor, _source: torch.Tensor | None = None) -> torch.Tensor:
        source, result = running.pop(copied.data_ptr())
        result.copy_(source)
        sizes.append(source.numel() * source.element_size())
        return copied.view_as(copied)

    library = torch.library.Library("fsdp_compile", "IMPL", "CPU")
    library.impl("start_copy", start)
    library.impl("wait_copy", wait)
    try:
        with host_apart():
            yield sizes
        assert not running, "copies that nobody waited for"
    finally:
        library._destroy()
