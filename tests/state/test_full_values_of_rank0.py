"""A full state dict that rank 0 alone has: torch's own function gives every rank of a sharded model its part."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from fsdp_compile import fully_shard, materialize
from tests.fsdp2.models import mesh_of
from tests.models.meta import full_state, on_meta
from tests.ranks import on_ranks, run_ranks
from tests.two_sides import compile_eagerly


def _made() -> Any:
    """Uneven rows, a tied weight, buffers, one of them not saved."""
    model: Any = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 5), nn.Linear(5, 5, bias=False))
    model[3].weight = model[2].weight
    model[2].register_buffer("table", torch.ones(2, device=model[2].weight.device), persistent=False)
    return model


def _fill_table(module: Any) -> None:
    if hasattr(module, "table"):
        module.table.fill_(1)


def _load(mesh: tuple[int, ...], *, meta: bool, compiled: bool) -> None:
    torch.manual_seed(0)
    state = copy.deepcopy(_made().state_dict())
    model: Any = fully_shard(on_meta(_made) if meta else _made(), mesh=mesh_of(mesh))
    set_model_state_dict(
        compile_eagerly(model) if compiled else model,
        dict(state) if dist.get_rank() == 0 else {},  # torch replaces its values
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
    if meta:
        materialize(model, param_init_fn=_fill_table)
    found = full_state(model)
    for name, value in state.items():
        assert torch.equal(found[name], value), name
    assert model(torch.ones(4, 3)).isfinite().all()
    assert model[3].weight is model[2].weight, "as FSDP2 ties what torch has assigned one by one"


@on_ranks()
def test_torch_sends_the_state_dict_of_rank_0() -> None:
    for meta in (False, True):
        for compiled in (False, True):
            _load((2,), meta=meta, compiled=compiled)


def test_replicas_get_it_too() -> None:
    run_ranks(_load, (2, 2), meta=True, compiled=False, world_size=4)
