"""Parameters whose class says how they are gathered: optimizers of this package, and plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn
from torch.distributed.tensor import DTensor

import fsdp_compile
from fsdp_compile import FSDPCompileError, fully_shard
from tests.models.extended import Half, Layers, Wrapped
from tests.ranks import on_ranks
from tests.two_sides import compile_eagerly


def _sharded(kind: type[Wrapped] | None = Half, **arguments: Any) -> Layers:
    torch.manual_seed(0)
    model = Layers(kind)
    for module in (model.up, model.middle, model.down, model):
        fully_shard(module, **arguments)
    return model


def _local(parameter: torch.Tensor) -> torch.Tensor:
    assert isinstance(parameter, DTensor)
    local = parameter._local_tensor.detach()
    return local.wrapped if isinstance(local, Wrapped) else local


def _values(model: nn.Module) -> list[torch.Tensor]:
    return [_local(parameter).clone() for parameter in model.parameters()]


def _assert_equal(mine: nn.Module, theirs: nn.Module) -> None:
    for one, other in zip(_values(mine), _values(theirs), strict=True):
        assert torch.equal(one, other)


@on_ranks()
def test_optimizers_of_this_package_update_it() -> None:
    """Optimizers that see several parameters as one, or step in backward, leave these to themselves."""

    def run(change: Callable[[torch.optim.Optimizer], object], *, is_compiled: bool) -> Layers:
        model = _sharded()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
        change(optimizer)
        call: Any = compile_eagerly(model) if is_compiled else model
        torch.manual_seed(dist.get_rank())
        for _ in range(2):
            call(torch.randn(4, 6)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model

    expected = run(lambda _: None, is_compiled=False)
    assert not torch.equal(_values(expected)[0], _values(_sharded())[0])
    for change in (fsdp_compile.flat_step, fsdp_compile.step_in_backward):
        for is_compiled in (False, True):
            _assert_equal(run(change, is_compiled=is_compiled), expected)


def test_a_plan_that_would_ask_for_values_is_refused_by_name(fake_world: Callable[..., Any]) -> None:
    with fake_world(2), pytest.raises(FSDPCompileError, match="values") as caught:
        fsdp_compile.explain(Layers(Half), torch.ones(2, 6))
    assert "explain(Layers), up.weight" in str(caught.value.where)
