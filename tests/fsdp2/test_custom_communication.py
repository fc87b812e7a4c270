"""FSDP2's own hooks and communication classes, in compiled models: such units are gathered by FSDP2's hooks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from tests.fsdp2.mlp import only_hooks, pair_of
from tests.ranks import on_ranks, run_ranks


class _Gather(DefaultAllGather):
    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        self.calls = calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append("gather")
        return super().__call__(*args, **kwargs)


class _Scatter(DefaultReduceScatter):
    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        self.calls = calls

    def __call__(self, output_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.calls.append("scatter")
        work = super().__call__(output_tensor, *args, **kwargs)
        output_tensor.mul_(2)
        return work


def _hook(reduced: torch.Tensor, calls: list[str]) -> None:
    calls.append("hook")
    reduced.mul_(3)


SETTINGS: dict[str, Callable[[Any, list[str]], None]] = {
    "gather": lambda layer, calls: layer.set_custom_all_gather(_Gather(calls)),
    "scatter": lambda layer, calls: layer.set_custom_reduce_scatter(_Scatter(calls)),
    "hook": lambda layer, calls: layer.set_all_reduce_hook(functools.partial(_hook, calls=calls)),
    "allocate": lambda layer, _: layer.set_allocate_memory_from_process_group_for_comm(True),
}
NEW: dict[str, Callable[[Any, list[str]], None]] = {
    "set_keep_unsharded_storage": lambda layer, _: layer.set_keep_unsharded_storage(True),  # since torch 2.15
    "set_reduce_scatter_max_input_buffers": lambda layer, _: layer.set_reduce_scatter_max_input_buffers(2),  # 2.13
}
SETTINGS |= {name: change for name, change in NEW.items() if hasattr(FSDPModule, name)}


def _trained(name: str) -> tuple[list[bool], int]:
    pair = pair_of()
    calls: list[str] = []
    for model, noted in zip(pair, (calls, []), strict=True):
        SETTINGS[name](model.layers[0], noted)
    pair.train()
    return list(map(bool, only_hooks(pair.model))), calls.count(name)


@pytest.mark.parametrize("name", SETTINGS)
def test_such_a_unit_goes_by_hooks(name: str) -> None:
    by_hooks, count = run_ranks(_trained, name)[0]
    assert by_hooks == [False, True, False]
    assert (count >= 2) == (name in ("gather", "scatter", "hook"))


@on_ranks()
def test_a_hook_is_set_after_compiled_steps() -> None:
    pair = pair_of()
    pair.train()
    pair.change(lambda model: model.layers[1].set_all_reduce_hook(functools.partial(_hook, calls=[])))
    pair.train()


def _in_one_graph() -> str:
    pair = pair_of(fullgraph=True)
    pair.model.layers[0].set_all_reduce_hook(functools.partial(_hook, calls=[]))
    with pytest.raises(Exception, match=r"FSDP2's hooks gather unit 'layers.0': set_all_reduce_hook") as caught:
        pair.call(torch.randn(3, 16))
    dist.barrier()
    return type(caught.value).__name__


def test_one_graph_is_refused_by_name() -> None:
    assert run_ranks(_in_one_graph) == ["Unsupported"] * 2
