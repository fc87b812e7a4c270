"""Models that are dropped leave nothing behind: no memory, no threads, no files."""

from __future__ import annotations

import collections
import gc
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import ShardingStrategy

import fsdp_compile
from benchmarks._torch import forget_meshes
from fsdp_compile.fsdp2.param_group import ParamGroup
from fsdp_compile.fsdp2.unit import Unit
from tests.fake_world import fake_world
from tests.ranks import on_ranks

_MODELS = 30
_WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"separate_reduce_group": True},
    {"reshard_after_forward": False},
)
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="threads and files are counted in /proc")


class _Model(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
        self.head = nn.Linear(width, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x) * self.scale


def _sharded(*, by_layer: bool = False, **settings: Any) -> Any:
    model = _Model()
    for layer in model.layers if by_layer else ():
        fsdp_compile.fully_shard(layer, **settings)
    return fsdp_compile.fully_shard(model, **settings)


def _train(model: nn.Module, *, compiled: bool) -> None:
    run = torch.compile(model, backend="fsdp", options={"lower": "eager"}) if compiled else model
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        run(torch.ones(2, 16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _what_dies_with(model: nn.Module) -> list[weakref.ref[Any]]:
    units = fsdp_compile.units(model)
    groups = [group for unit in units for group in unit.groups]
    held = [*model.modules(), *units, *groups, *(group.flat for group in groups), *model.parameters()]
    return [weakref.ref(each) for each in held]


def _left(references: list[weakref.ref[Any]]) -> list[str]:
    gc.collect()  # FSDP2's states and the modules whose hooks they are refer to each other
    return [type(each).__name__ for reference in references if (each := reference()) is not None]


def _open() -> dict[str, int]:
    """Threads and open files of this process; threads take their names a moment after they start."""
    return {kind: len(list(Path(f"/proc/self/{kind}").iterdir())) for kind in ("task", "fd")}


def _alive() -> dict[str, int]:
    return dict(collections.Counter(type(o).__name__ for o in gc.get_objects() if isinstance(o, ParamGroup | Unit)))


_EACH_WAY = [(settings, by_layer, False) for settings in _WAYS for by_layer in (False, True)]


@pytest.mark.parametrize(("settings", "by_layer", "compiled"), [*_EACH_WAY, ({}, False, True), (None, False, True)])
def test_a_model_dies_with_its_last_reference(
    *, settings: dict[str, Any] | None, by_layer: bool, compiled: bool
) -> None:
    """Without settings: a container, which the backend shards."""
    with fake_world(2):
        plain = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
        model = plain if settings is None else _sharded(by_layer=by_layer, **settings)
        del plain
        _train(model, compiled=compiled)
        references = _what_dies_with(model)
        del model
        assert _left(references) == []


def test_prefetched_modules_that_name_each_other_do_not_keep_each_other() -> None:
    with fake_world(2):
        model = _sharded(by_layer=True)
        first, second = model.layers
        first.set_modules_to_forward_prefetch([second])
        second.set_modules_to_backward_prefetch([first])
        references = _what_dies_with(model)
        del model, first, second
        assert _left(references) == []


def test_a_part_outlives_its_model() -> None:
    with fake_world(2):
        model = _sharded()
        part = model.layers[0]
        del model
        gc.collect()
        part(torch.ones(2, 16)).sum().backward()
        assert all(parameter.grad is not None for parameter in part.parameters())


def test_a_part_that_was_called_alone_does_not_keep_its_model() -> None:
    torch._dynamo.reset()
    with fake_world(2):
        model = _sharded(by_layer=True)
        part = model.layers[0]
        _train(part, compiled=True)
        references = [weakref.ref(each) for each in (model, *model.head.modules(), *model.head.parameters())]
        del model
        assert _left(references) == []
        assert fsdp_compile.units(part)


@pytest.mark.long
@linux_only
@on_ranks()
def test_many_models_leave_nothing_behind() -> None:
    left: list[str] = []
    # FSDP2 makes a process group for reductions of each model, which lives as long as the world.
    ways = [way for way in _WAYS if "separate_reduce_group" not in way]
    for settings in ways:  # what models share is made for the first ones
        _train(_sharded(**settings), compiled=True)
    gc.collect()
    opened, alive = [_open()], [_alive()]
    for number in range(_MODELS):
        model = _sharded(**ways[number % len(ways)])
        _train(model, compiled=True)
        references = _what_dies_with(model)
        del model
        left += _left(references)
    opened.append(_open())
    alive.append(_alive())
    assert left == []
    assert alive[0] == alive[1]
    # There may be fewer: earlier tests of this process may have left some.
    assert all(after <= opened[0][kind] for kind, after in opened[1].items())


_WORLDS = 3


@pytest.mark.long
@linux_only
@on_ranks(world_size=4)
def test_a_world_that_is_destroyed_leaves_no_threads_and_no_files(tmp_path: Path) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    opened = []
    for number in range(_WORLDS):
        dist.destroy_process_group()
        forget_meshes()  # DTensor's caches, which hold meshes
        opened.append(_open())
        store = dist.FileStore(f"{tmp_path}/{number}", size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LOCAL_WORLD_SIZE", "2")
            _train(fsdp_compile.fully_shard(_Model(), sharding_strategy=ShardingStrategy.HYBRID_SHARD), compiled=False)
    assert opened[1:] == opened[:1] * (_WORLDS - 1)
