"""Private names of torch.distributed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives
from torch import nn
from torch._C._distributed_c10d import _register_process_group, _resolve_process_group

collectives = torch.ops._c10d_functional
"""Functional collectives as graph nodes: each returns a tensor (or a list) that `wait_tensor` completes."""


def fake_store() -> dist.Store:
    """The store of a default group of backend "fake", whose other ranks do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    return FakeStore()


def names_ignored_by_ddp(module: nn.Module) -> frozenset[str]:
    """The parameters and buffers of a module that DDP leaves alone, as scripts tell it to."""
    return frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def default_store() -> dist.Store:
    """The store through which the ranks of the default process group found each other."""
    return dist.distributed_c10d._get_default_store()


def resolve_group(name: str) -> dist.ProcessGroup | None:
    """The process group that is registered under `name`, or `None`."""
    try:
        return _resolve_process_group(name)  # type: ignore[arg-type, unused-ignore]
    except RuntimeError:
        return None


_SERIAL_GLOO = "fsdp_serial_gloo"


def serial_gloo_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    """A second gloo group of some ranks whose collectives run one after the other, on one thread."""
    if _SERIAL_GLOO not in dist.Backend.backend_list:
        dist.Backend.register_backend(_SERIAL_GLOO, _make_serial_gloo, devices=["cpu"])
    # Gloo runs the collectives of a group on two threads, and with several in flight it corrupts its heap now and then
    # (`docs/versions.md`). The number of threads can only be set on the backend itself: `new_group` does not pass
    # options on to gloo. Collectives still overlap with computation.
    made = dist.new_group(list(ranks), backend=f"cpu:{_SERIAL_GLOO}", use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made


def _gloo_devices() -> list[Any]:
    """The interfaces that gloo's variable names, as in torch's own groups, or the default."""
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if not names:
        return [dist.ProcessGroupGloo.create_default_device()]
    return [dist.ProcessGroupGloo.create_device(interface=name) for name in names]


def _make_serial_gloo(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = _gloo_devices()
    options._threads = 1
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, size, options)


def register_group_alias(name: str, group: dist.ProcessGroup) -> None:
    """Registers a second, rank-independent name under which graphs find `group`."""
    _register_process_group(name, group)  # type: ignore[arg-type, unused-ignore]
