"""Private names of torch.distributed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives
from torch._C._distributed_c10d import _register_process_group, _resolve_process_group
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict as load_state_dict
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict as save_state_dict
from torch.distributed.utils import _apply_to_tensors

MemoryFormat: Any = metadata._MEM_FORMAT_ENCODING
"""What DCP writes for `torch.memory_format`."""

collectives = torch.ops._c10d_functional
"""Functional collectives as graph nodes: each returns a tensor (or a list) that `wait_tensor` completes."""


def cast(value: Any, dtype: torch.dtype | None) -> Any:
    """Floating-point tensors in `value` as `dtype`, if there is one, in the containers in which FSDP2 casts them."""
    return value if dtype is None else _apply_to_tensors(lambda x: x.to(dtype) if x.is_floating_point() else x, value)


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long the collectives of a group may take; the shortest time, if devices differ."""
    found: list[timedelta] = []
    for device in group._device_types:
        backend: Any = group._get_backend(device)
        # TORCH_DISTRIBUTED_DEBUG=DETAIL puts something around it.
        options = getattr(backend, "wrapped_pg", backend).options
        if options is not None:  # that of the fake backend
            found.append(options._timeout)
    return min(found, default=dist.default_pg_timeout)


def largest(numbers: Sequence[int], group: dist.ProcessGroup) -> list[int]:
    """The largest number (of 64 bits) of all ranks of a group at each place; they wait for each other.

    The group is used for nothing else: collectives of another order may be under way in others.
    """
    device = torch.device("cpu")
    stream: Any = contextlib.nullcontext()
    if "gloo" not in str(dist.get_backend_config(group)):
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None
        # On a stream of its own: this waits for the other ranks' hosts, and not for what their devices have queued.
        device, stream = accelerator, torch.Stream(accelerator)
    options: Any = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    backend: Any = group._get_backend(device)
    # Inside of `torch.func.grad` every new tensor would be a wrapper.
    with stream, temporarily_clear_interpreter_stack():
        values = torch.tensor(numbers, dtype=torch.int64, device=device)
        # Past the dispatcher, where modes and profilers of the user's would count a collective the program has not.
        backend.allreduce([values], options).wait()
        return values.tolist()


def fake_store() -> dist.Store:
    """The store of a default group of backend "fake", whose other ranks do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    return FakeStore()


def default_store() -> dist.Store:
    """The store through which the ranks of the default process group found each other."""
    return store_of_this_start(dist.distributed_c10d._get_default_store())


def store_of_this_start(store: dist.Store, environment: Mapping[str, str] = os.environ) -> dist.Store:
    """The part of a store that no rank has written to before torch's launcher restarted them: it keeps the store.

    The whole store on several hosts, whose launchers count restarts each for itself.
    """
    count = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    is_counted_alike = environment.get("GROUP_WORLD_SIZE", "1") == "1"
    return dist.PrefixStore(f"restart {count}", store) if count != "0" and is_counted_alike else store


def other_client(store: dist.Store) -> dist.Store | None:
    """A second connection to a store over TCP, which stays open when the first one is closed; `None` for other stores.

    It does not keep the store itself: that ends with the world on the rank that holds it.
    """
    inner = store
    while isinstance(inner, dist.PrefixStore):
        inner = inner.underlying_store
    # One of a file would keep the file, in which the next world would find the keys of this one.
    return store.clone() if isinstance(inner, dist.TCPStore) else None  # type: ignore[attr-defined, unused-ignore]


def resolve_group(name: str) -> dist.ProcessGroup | None:
    """The process group that is registered under `name`, or `None`."""
    try:
        return _resolve_process_group(name)  # type: ignore[arg-type, unused-ignore]
    except RuntimeError:
        return None


_SERIAL_GLOO = "fsdp_serial_gloo"


def serial_gloo_group(ranks: Sequence[int], timeout: timedelta, description: str) -> dist.ProcessGroup:
    """A second gloo group of some ranks whose collectives run one after the other, on one thread."""
    if _SERIAL_GLOO not in dist.Backend.backend_list:
        dist.Backend.register_backend(_SERIAL_GLOO, _make_serial_gloo, devices=["cpu"])
    # Gloo runs the collectives of a group on two threads, and with several in flight it corrupts its heap now and then
    # (`docs/limits.md`). The number of threads can only be set on the backend itself: `new_group` does not pass
    # options on to gloo. Collectives still overlap with computation.
    return _made(ranks, timeout, description, backend=f"cpu:{_SERIAL_GLOO}")


def _make_serial_gloo(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    # The interfaces that gloo's variable names, as in torch's own groups, or the default.
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    named = [dist.ProcessGroupGloo.create_device(interface=name) for name in names]
    options._devices = named or [dist.ProcessGroupGloo.create_default_device()]
    options._threads = 1
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, size, options)


register_group_alias: Callable[..., None] = _register_process_group
"""Registers a second, rank-independent name under which graphs find a group."""


def high_priority(backends: str, timeout: timedelta | None = None) -> Any:
    """Options of a group whose collectives run on a stream of high priority; `None` where NCCL runs none of them.

    A rank's matmuls fill the device, so the few blocks of a collective would wait for them on a stream of equal
    priority. FSDP2 runs its collectives on such streams; `TORCH_NCCL_HIGH_PRIORITY=1` is torch's setting for the groups
    that scripts make. `backends` has the names of the group's backends, in any text.
    """
    if "nccl" not in backends or not dist.is_nccl_available():
        return None
    options: Any = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    if timeout is not None:
        options._timeout = timeout  # torch warns where it is another one than the group's
    return options


def new_group(ranks: Sequence[int], timeout: timedelta, description: str) -> dist.ProcessGroup:
    """A group of some ranks on the backends of the world; they call this together, and no other rank has to.

    Its communicator is made at once where that of the world was.
    """
    world = dist.group.WORLD
    assert world is not None
    device = world.bound_device_id
    options = high_priority(str(dist.get_backend_config(world)), timeout)
    if len(ranks) < world.size():
        # Torch splits groups off a world that is bound to a device, which NCCL does when all ranks of the world take
        # part: this one gets a communicator of its own.
        world.bound_device_id = None
    try:
        return _made(ranks, timeout, description, pg_options=options, device_id=device)
    finally:
        world.bound_device_id = device


def _made(ranks: Sequence[int], timeout: timedelta, description: str, **settings: Any) -> dist.ProcessGroup:
    made = dist.new_group(
        list(ranks), timeout=timeout, use_local_synchronization=True, group_desc=description, **settings
    )
    assert isinstance(made, dist.ProcessGroup)
    return made
