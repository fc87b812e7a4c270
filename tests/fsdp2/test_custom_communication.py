"""FSDP2's own hooks and communication classes, in compiled models: such units are gathered by FSDP2's hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from tests.fsdp2.mlp import compiled, only_hooks, sharded, train, unequal
from tests.ranks import run_ranks

calls: list[str] = []
"""Of the classes and hooks below, in one rank."""


class _Gather(DefaultAllGather):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        calls.append("gather")
        return super().__call__(*args, **kwargs)


class _Scatter(DefaultReduceScatter):
    def __call__(self, output_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append("scatter")
        work = super().__call__(output_tensor, *args, **kwargs)
        output_tensor.mul_(2)
        return work


def _hook(reduced: torch.Tensor) -> None:
    calls.append("hook")
    reduced.mul_(3)


SETTINGS: dict[str, Callable[[Any], None]] = {
    "gather": lambda layer: layer.set_custom_all_gather(_Gather()),
    "scatter": lambda layer: layer.set_custom_reduce_scatter(_Scatter()),
    "hook": lambda layer: layer.set_all_reduce_hook(_hook),
    "allocate": lambda layer: layer.set_allocate_memory_from_process_group_for_comm(True),
}


def _differences(name: str) -> tuple[list[int], list[bool], int]:
    found = []
    for is_compiled in (False, True):
        model = sharded()
        SETTINGS[name](model.layers[0])
        calls.clear()
        found.append(train(model, compiled(model) if is_compiled else model))
    return unequal(*found), list(map(bool, only_hooks(model))), calls.count(name)


@pytest.mark.parametrize("name", SETTINGS)
def test_such_a_unit_goes_by_hooks(name: str) -> None:
    differences, by_hooks, count = run_ranks(_differences, name)[0]
    assert differences == []
    assert by_hooks == [False, True, False]
    assert (count >= 2) == (name != "allocate")


def _set_later() -> list[int]:
    found = []
    for is_compiled in (False, True):
        model = sharded()
        call = compiled(model) if is_compiled else model
        first = train(model, call)
        model.layers[1].set_all_reduce_hook(_hook)
        found.append([*first, *train(model, call)])
    return unequal(*found)


def test_a_hook_is_set_after_compiled_steps() -> None:
    assert run_ranks(_set_later) == [[], []]


def _in_one_graph() -> str:
    model = sharded()
    model.layers[0].set_all_reduce_hook(_hook)
    with pytest.raises(Exception, match=r"FSDP2's hooks gather unit 'layers.0': set_all_reduce_hook") as caught:
        compiled(model, fullgraph=True)(torch.randn(3, 16))
    dist.barrier()
    return type(caught.value).__name__


def test_one_graph_is_refused_by_name() -> None:
    assert run_ranks(_in_one_graph) == ["Unsupported"] * 2
