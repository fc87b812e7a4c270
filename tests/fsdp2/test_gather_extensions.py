"""Parameters whose class says how they are gathered: FSDP2's hooks gather such units, and the bits are FSDP2's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import fsdp_compile
from fsdp_compile import FSDPCompileError
from tests import long
from tests.fake_world import fake_world
from tests.models.extended import Eight, Half, Layers, Pair, Released, Wrapped
from tests.ranks import on_ranks
from tests.two_sides import MIXED, compile_eagerly, made, mesh_of, taken_over

STEPS = 2


@dataclasses.dataclass(frozen=True)
class _Case:
    """How a model is made and sharded."""

    kind: type[Wrapped] = Half  # class of some of its weights
    rows: int = 8  # of its hidden layers
    micro_batches: int = 1  # of which all but the last are not reduced
    mesh: tuple[int, ...] = ()  # its shape; empty for all ranks
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)  # of `fully_shard`


CASES = {
    "16 bits": _Case(),
    "uneven rows": _Case(rows=7),
    "16 bits, released": _Case(Released),
    "8 bits and scales": _Case(Eight),
    "8 bits, computed in bf16": _Case(Eight, arguments={"mp_policy": MIXED}),
    "unsharded until backward": _Case(arguments={"reshard_after_forward": False}),
    "accumulated": _Case(micro_batches=2),
    "replicas": _Case(mesh=(2, 2)),
}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local = tensor.detach()
    local = local._local_tensor if isinstance(local, DTensor) else local
    return (local.wrapped if isinstance(local, Wrapped) else local).clone()


def _sharded(case: _Case) -> Layers:
    model = made(lambda: Layers(case.kind, case.rows))
    arguments = {**case.arguments, **({"mesh": mesh_of(case.mesh)} if case.mesh else {})}
    for module in (model.up, model.middle, model.down, model):
        fully_shard(module, **arguments)
    return model


def _trained(case: _Case, *, is_compiled: bool = False) -> list[torch.Tensor]:
    """Losses, gradients and parameters of this rank, and the output of a forward without gradients."""
    model: Any = _sharded(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    call = compile_eagerly(model) if is_compiled else model
    torch.manual_seed(100 + dist.get_rank())
    found = []
    for _ in range(STEPS):
        for number in range(case.micro_batches):
            model.set_requires_gradient_sync(number == case.micro_batches - 1)
            loss = call(torch.randn(4, 6)).square().sum()
            loss.backward()
            found.append(loss.detach().clone())
        if is_compiled:
            assert [bool(unit.only_hooks) for unit in taken_over(model).units] == [False, True, False, True]
        found += [_local(p.grad) for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    found += [_local(p) for p in model.parameters()]
    with torch.no_grad():  # last: FSDP2 may leave parameters unsharded
        return [*found, call(torch.ones(2, 6)).clone()]


@long.parametrize("name", CASES, always=["8 bits and scales"])
@on_ranks(world_size=lambda name: 4 if CASES[name].mesh else 2)
def test_bits_are_those_of_fsdp2(name: str) -> None:
    case = CASES[name]
    expected = _trained(case)
    assert len(expected) == STEPS * (case.micro_batches + 6) + 7
    for place, (mine, theirs) in enumerate(zip(_trained(case, is_compiled=True), expected, strict=True)):
        assert torch.equal(mine, theirs), place


def _pairs(*, is_compiled: bool = False) -> list[torch.Tensor]:
    """The same of two layers, of whose plain biases pairs make gradients that are pairs."""
    torch.manual_seed(0)
    first, last = nn.Linear(6, 8), nn.Linear(8, 6)
    model = nn.Sequential(first, nn.Tanh(), last)
    for layer in (first, last):
        value = layer.weight.detach()
        layer.weight = nn.Parameter(Pair(value, value + 1))
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    call: Any = compile_eagerly(model) if is_compiled else model
    torch.manual_seed(100 + dist.get_rank())
    found = []
    for _ in range(STEPS):
        loss = call(torch.randn(4, 6)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.a.detach().clone(), loss.b.detach().clone()]
    for parameter in model.parameters():
        local: Any = parameter._local_tensor  # type: ignore[attr-defined]
        parts = [local.a, local.b] if isinstance(local, Pair) else [local]
        found += [part.detach().clone() for part in parts]
    return found


@on_ranks()
def test_unsharded_parameters_may_be_of_a_class() -> None:
    expected, found = _pairs(), _pairs(is_compiled=True)
    assert all(map(torch.equal, found, expected))
    assert len(found) == len(expected) == 2 * STEPS + 6


@on_ranks()
def test_one_graph_is_refused_by_name() -> None:
    model = Layers(Half)
    for module in (model.up, model):
        fully_shard(module)
    with pytest.raises(Exception, match=r"(?s)FSDP2's hooks gather unit 'up'.*fsdp_pre_all_gather"):
        compile_eagerly(model, fullgraph=True)(torch.randn(4, 6))


@on_ranks()
def test_the_outermost_unit() -> None:
    """The outermost module reads such parameters itself, in the call in which the model is taken over."""
    found = []
    for is_compiled in (False, True):
        model = made(lambda: Layers(Half))
        fully_shard(model)
        call = compile_eagerly(model, fullgraph=True) if is_compiled else model
        losses = [call(torch.ones(4, 6)).square().sum() for _ in range(STEPS)]
        torch.stack(losses).sum().backward()
        found.append([*losses, *(_local(p.grad) for p in model.parameters() if p.grad is not None)])
    assert len(found[0]) == STEPS + 6
    assert [i for i, (a, b) in enumerate(zip(*found, strict=True)) if not torch.equal(a, b)] == []


@on_ranks()
def test_optimizers_of_this_package_update_it() -> None:
    """Optimizers that see several parameters as one, or step in backward, leave these to themselves."""

    def run(change: Callable[[torch.optim.Optimizer], object], *, is_compiled: bool) -> list[torch.Tensor]:
        model = _sharded(_Case())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
        change(optimizer)
        call: Any = compile_eagerly(model) if is_compiled else model
        torch.manual_seed(dist.get_rank())
        for _ in range(2):
            call(torch.randn(4, 6)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [_local(parameter) for parameter in model.parameters()]

    expected = run(lambda _: None, is_compiled=False)
    assert not torch.equal(expected[0], _local(_sharded(_Case()).get_parameter("up.weight")))
    for change in (fsdp_compile.flat_step, fsdp_compile.step_in_backward):
        for is_compiled in (False, True):
            assert all(map(torch.equal, run(change, is_compiled=is_compiled), expected))


def test_a_plan_that_would_ask_for_values_is_refused_by_name() -> None:
    with fake_world(2), pytest.raises(FSDPCompileError, match="values") as caught:
        fsdp_compile.explain(Layers(Half), torch.ones(2, 6))
    assert "explain(Layers), up.weight" in str(caught.value.where)
