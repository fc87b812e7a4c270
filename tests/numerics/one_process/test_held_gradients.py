"""Corner cases of unreduced gradients: nothing is lost, nothing is counted twice."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor

from fsdp_compile import ConfigError, fully_shard, no_sync
from tests import long
from tests.models.kinds import GraphBreaks, Slim
from tests.numerics.one_process.pair import batches, loss_of
from tests.numerics.one_process.test_accumulation import CLOSE, Pair, gradients_are_none, make_pair
from tests.ranks import run_ranks


class Branching(nn.Module):
    """Reads one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 3)
        self.chosen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head((self.first if self.chosen == 0 else self.second)(x))


def _mine(batch: torch.Tensor) -> torch.Tensor:
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def _hold(pair: Pair, seed: int) -> None:
    with no_sync(pair.compiled):
        pair.backward(batches(1, 4 * dist.get_world_size(), seed=seed)[0])


def _cases() -> dict[str, float]:
    """One model through every odd order of forward, backward and flags; the difference after each."""
    pair = make_pair()
    found: dict[str, float] = {}
    first, second, third = batches(3, 4 * dist.get_world_size(), seed=9)

    def finish(name: str) -> None:
        found[name] = pair.difference()
        pair.step()

    _hold(pair, 2)  # first, since torch decides whether a graph can be kept when its backward is compiled
    mine, theirs = loss_of(pair.compiled(_mine(first))), loss_of(pair.reference(first))
    for loss in (mine, theirs):
        loss.backward(retain_graph=True)
        loss.backward()
    finish("two backwards through one graph")

    _hold(pair, 1)
    pair.compiled(_mine(first))  # the loss is thrown away: what it borrowed stays
    pair.backward(second)
    finish("forward thrown away")

    _hold(pair, 3)
    sum(loss_of(pair.compiled(_mine(b))) for b in (first, second)).backward()  # type: ignore[union-attr]
    sum(loss_of(pair.reference(b)) for b in (first, second)).backward()  # type: ignore[union-attr]
    finish("two forwards before one backward")

    with no_sync(pair.compiled):
        mine = loss_of(pair.compiled(_mine(first)))
    mine.backward()  # its forward has decided
    assert gradients_are_none(pair.model)
    loss_of(pair.reference(first)).backward()
    pair.backward(second)
    finish("forward inside, backward outside")

    _hold(pair, 4)
    mine = loss_of(pair.compiled(_mine(first)))
    _hold(pair, 5)  # while the first ones are borrowed
    mine.backward()
    loss_of(pair.reference(first)).backward()
    finish("held while borrowed")

    _hold(pair, 6)
    x = _mine(first).clone().requires_grad_()
    torch.autograd.grad(loss_of(pair.compiled(x)), [x])  # makes gradients that are never accumulated
    pair.backward(second)
    finish("gradients of inputs alone")

    _hold(pair, 7)
    pair.model.zero_grad()  # as with FSDP2, what is held stays
    pair.backward(third)
    finish("zero_grad between")

    with contextlib.suppress(AttributeError), no_sync(pair.compiled):
        pair.model.get_parameter("nothing")
    pair.backward(third)
    finish("exception inside")
    return found


@pytest.mark.core
def test_nothing_is_lost_and_nothing_counts_twice() -> None:
    for found in run_ranks(_cases):
        assert len(found) == 8
        assert {name: value for name, value in found.items() if not value < CLOSE} == {}


def _unused() -> float:
    pair = make_pair("full", Branching)
    world = dist.get_world_size()
    first, second = batches(2, 4 * world)
    with no_sync(pair.model):
        pair.backward(first)
    pair.model.chosen = pair.reference.chosen = 1  # type: ignore[assignment]
    pair.backward(second)
    return pair.difference()


def test_a_parameter_that_the_last_microbatch_does_not_use_gets_what_was_held() -> None:
    assert max(run_ranks(_unused)) < CLOSE


def _skipped() -> float:
    pair = make_pair("full", Branching)
    first, second = batches(2, 4 * dist.get_world_size())
    pair.backward(first)
    pair.model.chosen = pair.reference.chosen = 1  # type: ignore[assignment]
    pair.backward(second)
    return pair.difference()


def test_a_gradient_stays_when_a_later_backward_skips_its_parameter() -> None:
    assert max(run_ranks(_skipped)) < CLOSE


def _late() -> float:
    plain = make_pair(shard=False)
    first, second = batches(2, 4 * dist.get_world_size())
    with no_sync(plain.compiled):  # sharded inside, by its first call
        plain.backward(first)
    assert gradients_are_none(plain.model)
    plain.backward(second)
    return plain.difference()


def _broken() -> float:
    broken = make_pair("full", GraphBreaks)
    first, second = batches(2, 4 * dist.get_world_size())
    for _ in range(2):
        with no_sync(broken.compiled):
            broken.backward(first)
        broken.backward(second)
    return broken.difference()


@pytest.mark.long
@pytest.mark.parametrize("case", [_late, _broken])
def test_a_plain_model_and_graph_breaks_inside_no_sync(case: Callable[[], float]) -> None:
    assert max(run_ranks(case)) < CLOSE


def _beside_fsdp2(hybrid: bool, factor: float | None) -> list[float]:  # noqa: FBT001
    """Gradients after microbatches with each setting, here and with FSDP2, which are compared by the sum of all."""
    world = dist.get_world_size()
    names = ("replicate", "shard")
    shape = (2, world // 2) if hybrid else (world,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names[-len(shape) :])
    models: list[Any] = []
    for shard in (fully_shard, fsdp2):
        torch.manual_seed(0)
        model: Any = Slim(1)
        shard(model.blocks[0], mesh=mesh)
        shard(model, mesh=mesh)
        for part in (model, model.blocks[0]):
            part.set_force_sum_reduction_for_comms(True)  # gloo cannot divide for FSDP2
            if factor is not None:
                part.set_gradient_divide_factor(factor)
        models.append(model)
    mine: Any = torch.compile(models[0], backend="fsdp", options={"lower": "eager"})
    first, second, third = batches(3, 4 * world)
    for each in (mine, models[1]):
        each.set_requires_gradient_sync(False)
        loss_of(each(_mine(first))).backward()
        each.set_requires_gradient_sync(True)
        if hybrid:
            each.set_requires_all_reduce(False)
            loss_of(each(_mine(second))).backward()
            each.set_requires_all_reduce(True)
        loss_of(each(_mine(third))).backward()
    worst = []
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert isinstance(p.grad, DTensor)
        assert isinstance(q.grad, DTensor)
        worst.append((p.grad.full_tensor() - q.grad.full_tensor()).abs().max().item())
    return worst


@long.parametrize(("hybrid", "factor"), [(False, 3.0), (True, None)], always=[(False, 3.0)])
def test_settings_of_fsdp2_give_its_gradients_bit_by_bit(hybrid: bool, factor: float | None) -> None:  # noqa: FBT001
    world = 4 if hybrid else 2
    for worst in run_ranks(_beside_fsdp2, hybrid, factor, world_size=world):
        assert worst == [0.0] * len(worst)


def _before_the_last_backward() -> list[torch.Tensor]:
    """Differences from FSDP2's gradients after a backward that is not the last one, and after the last one."""
    found = []
    models: list[Any] = []
    for shard in (fully_shard, fsdp2):
        torch.manual_seed(0)
        models.append(Slim(1))
        shard(models[-1].blocks[0])
        shard(models[-1])
    mine: Any = torch.compile(models[0], backend="fsdp", options={"lower": "eager"})
    for batch, is_last in zip(batches(2, 4 * dist.get_world_size()), (False, True), strict=True):
        for each in (mine, models[1]):
            each.set_is_last_backward(is_last)
            loss_of(each(_mine(batch))).backward()
        both = zip(models[0].parameters(), models[1].parameters(), strict=True)
        found += [(p.grad.full_tensor() - q.grad.full_tensor()).abs().max() for p, q in both]
    return found


def test_each_backward_hands_gradients_over_as_fsdp2_does() -> None:
    for found in run_ranks(_before_the_last_backward):
        assert len(found) == 2 * 4
        assert max(found) < CLOSE


def test_what_is_no_model_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="not a"), no_sync(3):  # type: ignore[arg-type]
        pass
