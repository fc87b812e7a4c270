"""Initializations leave alone what has values already, and run once on each module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

import fsdp_compile
from fsdp_compile import fully_shard, materialize
from tests.ranks import on_ranks


class _Masked(nn.Module):
    """A weight, and two buffers that no checkpoint holds, one of which is computed from the weight."""

    table: torch.Tensor
    norm: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.register_buffer("norm", torch.zeros(()), persistent=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        self.weight.data[0].zero_()
        self.table.copy_(torch.arange(4.0))
        self.norm.copy_(self.weight.detach().norm())


class _Block(nn.Module):
    """Nothing of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), _Masked()


def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | _Masked):
        module.reset_parameters()


def _by_replacing(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | _Masked):
        module.to_empty(device="cpu", recurse=False)
        module.reset_parameters()
        module.weight = nn.Parameter(torch.zeros_like(module.weight))


def _make() -> nn.Module:
    return nn.Sequential(_Block(), _Masked())


def _on_meta(make: Callable[[], nn.Module]) -> Any:
    with torch.device("meta"):
        return make()


@pytest.mark.parametrize("way", ["loaded", "assigned", "replaced", "ignored"])
@on_ranks()
def test_loaded_values_stay(way: str) -> None:
    torch.manual_seed(1)
    state = _make().state_dict()
    model = _on_meta(_make)
    if way == "assigned":
        model.load_state_dict({name: value.clone() for name, value in state.items()}, assign=True)
        fully_shard(model, param_init_fn=_init)
    else:
        ignored = [model[1].weight] if way == "ignored" else []
        if ignored:
            model[1].weight = nn.Parameter(state["1.weight"].clone())
            ignored = [model[1].weight]
        fully_shard(model, ignored_params=ignored)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, dict(state) if dist.get_rank() == 0 else {}, options=options)
        materialize(model, param_init_fn=_by_replacing if way in ("replaced", "ignored") else _init)
    full = dict(fsdp_compile.full_tensors(model))
    assert all(torch.equal(full[name], value) for name, value in state.items())
    assert torch.equal(model[1].table, torch.arange(4.0))
    assert model[1].norm > 0, "of what the initialization wrote to the weight"


@on_ranks()
def test_bottom_up_calls_initialize_each_module_once() -> None:
    called: list[nn.Module] = []

    def init(module: nn.Module) -> None:
        called.append(module)
        _by_replacing(module)

    model = _on_meta(lambda: nn.Sequential(_Block(), _Block(), nn.Linear(4, 4)))
    for block in model[:2]:
        fully_shard(block, param_init_fn=init)
    fully_shard(model, param_init_fn=init)
    with_own = [module for module in model.modules() if module._parameters]
    assert sorted(map(id, called)) == sorted(map(id, with_own)), "each once"
    assert all(not value.is_meta and not value.isnan().any() for _, value in fsdp_compile.full_tensors(model))
