"""A machine whose copies between host and device happen as late as they may: at the wait, and not before.

Host and device are the CPU. Who reads a copy before its wait reads garbage; who writes to what is being copied, before
the wait, changes the copy. So numbers that are right here are right however long a bus takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fsdp_compile.config.policy import Offload
from fsdp_compile.ops import host_copy  # noqa: F401  registers the operators

ON_SUCH_A_HOST = Offload(pinned=False, from_cpu_to_cpu=True)
"""As `fully_shard(offload_policy=...)`: graphs copy as they do for a GPU."""


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
        yield sizes
        assert not running, "copies that nobody waited for"
    finally:
        library._destroy()
