"""`full_tensors`: names and values of the plain model's state dict, one full value at a time."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullOptimStateDictConfig
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_compile import EMA, ConfigError, MixedPrecision, full_params, full_tensors, fully_shard, optim_state_dict
from fsdp_compile.comm import exchange, gather
from tests import long
from tests.beside import compile_eagerly
from tests.models.meta import Tied
from tests.ranks import run_ranks
from tests.sharding.test_sync_states import mesh_of, seeded


def _assert_is_state_dict(found: dict[str, torch.Tensor], reference: nn.Module) -> None:
    expected = reference.state_dict()
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


@contextlib.contextmanager
def _messages_of(size: int) -> Iterator[None]:
    """Sets the size of messages in this process, which serves other tests afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather, "MESSAGE_BYTES", size)
        yield


def _check(mesh: tuple[int, ...], message: int) -> None:
    """Tied, shared, frozen, uneven and 0-d parameters, of several dtypes and dimensions, and buffers."""
    with _messages_of(message):
        _check_values(mesh)


def _check_values(mesh: tuple[int, ...]) -> None:
    reference: Any = seeded(0)
    model: Any = seeded(0)
    model.middle = compile_eagerly(model.middle)
    columns = model.middle.weight
    fully_shard(
        model,
        mesh=mesh_of(mesh),
        mp_policy=MixedPrecision(buffer_dtype=torch.float16),
        shard_placement_fn=lambda p: Shard(1) if p is columns else None,
    )
    compiled: Any = compile_eagerly(model)
    is_first = dist.get_rank() == 0
    for cpu_offload in (False, True):
        _assert_is_state_dict(dict(full_tensors(compiled, cpu_offload=cpu_offload)), reference)
        found = dict(full_tensors(model, rank0_only=True, cpu_offload=cpu_offload))
        if is_first:
            _assert_is_state_dict(found, reference)
        else:
            assert not found
    kept = dict(full_tensors(model.blocks))
    _assert_is_state_dict(kept, reference.blocks)
    for value in kept.values():
        if value.is_floating_point():
            value.zero_()
    values = {name: value for name, value in full_tensors(model) if name in dict(reference.named_parameters())}
    assert all(torch.equal(value, reference.get_parameter(name)) for name, value in values.items())


@long.parametrize(("mesh", "message"), [((1,), 2**24), ((2,), 2**24), ((3,), 32), ((2, 2), 24)], always=[((2,), 2**24)])
def test_names_and_values_are_those_of_the_plain_model(mesh: tuple[int, ...], message: int) -> None:
    run_ranks(_check, mesh, message, world_size=torch.Size(mesh).numel())


class _Alive(TorchDispatchMode):
    """Counts the bytes of memory that was made under it and is alive."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {a.untyped_storage()._cdata for a in args if isinstance(a, torch.Tensor)}
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in given:
                self._note(tensor.untyped_storage())
        return made

    def _note(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._alive:
            self._alive[storage._cdata] = storage.nbytes()
            weakref.finalize(storage, self._alive.pop, storage._cdata)
        self.peak = max(self.peak, sum(self._alive.values()))


def _check_memory(message: int) -> dict[bool, int]:
    model = fully_shard(nn.Sequential(*(nn.Linear(255, 257, bias=False) for _ in range(4))))
    peaks = {}
    for rank0_only in (False, True):
        with _messages_of(message), _Alive() as alive:
            for _, value in full_tensors(model, rank0_only=rank0_only):
                assert value.shape == (257, 255)
                del value
        peaks[rank0_only] = alive.peak
    return peaks


@long.parametrize("world_size", [2, 3], always=[2])
def test_one_full_value_and_one_message_are_held_at_a_time(world_size: int) -> None:
    """Rows are uneven, so messages are padded. Gloo's two threads let go of one with the next."""
    one, message = 255 * 257 * 4, 9000
    first, *others = run_ranks(_check_memory, message, world_size=world_size)
    assert one < first[False] < one + 6 * message
    assert one < first[True] < one + 6 * message
    for peaks in others:
        assert peaks[False] < one + 6 * message
        assert peaks[True] < 6 * message, "other ranks hold their shards"


def _check_offloaded() -> None:
    model = fully_shard(seeded(0), offload_policy=CPUOffloadPolicy(pin_memory=False))
    _assert_is_state_dict(dict(full_tensors(model)), seeded(0))


def test_offloaded_shards() -> None:
    run_ranks(_check_offloaded)


def _check_places() -> None:
    """Where values are put together, with a device that is not the host, as far as shards can tell."""
    model = fully_shard(seeded(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    device, places, gather_full = torch.device("cpu", 0), set[torch.device](), gather.gather_full

    def gather_at(local: torch.Tensor, spec: Any, receivers: Any, place: torch.device) -> torch.Tensor | None:
        places.add(place)
        return gather_full(local, spec, receivers, place)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "wire_device", lambda *_: device)
        patch.setattr(gather, "gather_full", gather_at)
        for offload in (False, True):
            expected = {torch.device("cpu") if offload else device}
            dict(full_tensors(model, cpu_offload=offload))
            assert places == expected
            places.clear()
            optim_state_dict(model, optimizer, config=FullOptimStateDictConfig(offload_to_cpu=offload))
            assert places == expected
            places.clear()


def test_offloaded_values_are_put_together_on_the_host() -> None:
    run_ranks(_check_places)


def _check_refused() -> None:
    model = fully_shard(seeded(0))
    with full_params(model), pytest.raises(ConfigError, match=r"held in full already(.|\n)*state_dict\(\) is full"):
        full_tensors(model)
    with torch.device("meta"):
        empty = fully_shard(Tied())
    with pytest.raises(ConfigError, match="on the meta device"):
        full_tensors(empty)
    hooked = nn.Linear(3, 3)
    hooked.register_forward_pre_hook(lambda *_: dict(full_tensors(hooked)))
    fully_shard(hooked)
    with pytest.raises(ConfigError, match=r"inside a step(.|\n)*full_tensors\(\) in a forward"):
        fully_shard(nn.Sequential(hooked))(torch.ones(2, 3))


def test_wrong_uses_are_refused() -> None:
    run_ranks(_check_refused)


def test_a_plain_model_gives_what_it_has() -> None:
    model = seeded(0)
    _assert_is_state_dict(dict(full_tensors(model, rank0_only=True)), model)


def _check_first_ranks() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer, ranks in zip(model, ([0, 1], [1, 0]), strict=True):
        fully_shard(layer, mesh=DeviceMesh("cpu", ranks))
    average = EMA(model, 0.9)
    with pytest.raises(ConfigError, match=r"first ranks are \[0, 1\](.|\n)*full_tensors"):
        next(full_tensors(model, rank0_only=True))
    with pytest.raises(ConfigError, match=r"first ranks are \[0, 1\](.|\n)*EMA.full_state_dict"):
        average.full_state_dict(rank0_only=True)
    names = [name for name, _ in full_tensors(model)]
    assert set(average.full_state_dict()) == {"n_averaged", *(f"module.{name}" for name in names)}


def test_one_rank_gets_all_values_or_none_is_asked_for() -> None:
    run_ranks(_check_first_ranks)
