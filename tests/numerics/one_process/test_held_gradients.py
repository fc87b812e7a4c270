"""Corner cases of unreduced gradients: nothing is lost, nothing is counted twice."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fsdp_compile.runtime import unshard
from fsdp_compile.runtime.module_state import units
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor

from fsdp_compile import ConfigError, fully_shard, no_sync
from tests import long
from tests.beside import Beside, Run
from tests.models.kinds import Block, GraphBreaks, Slim, Stack
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
    mine.backward()
    loss_of(pair.reference(first)).backward()
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


def _unused() -> tuple[float, float]:
    pair = make_pair("full", Branching)
    world = dist.get_world_size()
    first, second = batches(2, 4 * world)
    with no_sync(pair.model):
        pair.backward(first)
    pair.model.chosen = pair.reference.chosen = 1  # type: ignore[assignment]
    pair.backward(second)
    unused = pair.difference()
    pair.model.zero_grad()
    pair.reference.zero_grad()
    with no_sync(pair.model):
        pair.backward(first)
    pair.model.reset_iter_state()  # type: ignore[operator]
    pair.reference.zero_grad()
    pair.backward(second)
    return unused, pair.difference()


def test_a_parameter_that_the_last_microbatch_does_not_use_gets_what_was_held() -> None:
    for unused, reset in run_ranks(_unused):
        assert unused < CLOSE
        assert reset < CLOSE  # reset_iter_state() drops what was held


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


def _last_backward() -> tuple[bool, int, float]:
    pair = make_pair()
    calls: list[torch.Tensor] = []
    next(pair.model.parameters()).register_post_accumulate_grad_hook(calls.append)
    first, second = batches(2, 4 * dist.get_world_size())
    pair.compiled.set_is_last_backward(False)  # type: ignore[operator]
    pair.backward(first)
    waits = gradients_are_none(pair.model)
    pair.compiled.set_is_last_backward(True)  # type: ignore[operator]
    pair.backward(second)
    return waits, len(calls), pair.difference()


@pytest.mark.long
def test_only_the_last_backward_hands_gradients_over() -> None:
    for waits, calls, difference in run_ranks(_last_backward):
        assert waits
        assert calls == 1
        assert difference < CLOSE


def _beside_fsdp2(hybrid: bool, factor: float | None) -> tuple[list[float], list[float]]:  # noqa: FBT001
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
    return worst, [unit.divide or 0.0 for unit in units(models[0])]


@long.parametrize(("hybrid", "factor"), [(False, 3.0), (True, None)], always=[(False, 3.0)])
def test_settings_of_fsdp2_give_its_gradients_bit_by_bit(hybrid: bool, factor: float | None) -> None:  # noqa: FBT001
    world = 4 if hybrid else 2
    for worst, divide in run_ranks(_beside_fsdp2, hybrid, factor, world_size=world):
        assert worst == [0.0] * len(worst)
        assert set(divide) == {factor or float(world)}


def _kept() -> tuple[float, float, int, int]:
    pair = make_pair()
    model = pair.model
    first, second, third = batches(3, 4 * dist.get_world_size())
    handle = pair.compiled.unshard(async_op=True)  # type: ignore[operator]
    handle.wait()
    kept = sum(flat.unsharded.params is not None for unit in units(model) for flat in unit.param_groups)
    pair.backward(first)
    freed = sum(flat.unsharded.params is not None for unit in units(model) for flat in unit.param_groups)
    by_hand = pair.difference()
    pair.step()
    pair.compiled.unshard(async_op=True)  # type: ignore[operator]  # nobody waits: the next forward does
    pair.compiled.set_reshard_after_backward(False)  # type: ignore[operator]
    for batch in (second, third):
        pair.backward(batch)
    pair.step()  # what is kept is out of date now
    pair.backward(first)
    stays = sum(flat.unsharded.params is not None for unit in units(model) for flat in unit.param_groups)
    difference = pair.difference()
    pair.compiled.reshard()  # type: ignore[operator]
    assert all(flat.unsharded.params is None for unit in units(model) for flat in unit.param_groups)
    return by_hand, difference, kept - freed, stays


def test_kept_parameters_are_taken_and_never_out_of_date() -> None:
    for by_hand, difference, freed, stays in run_ranks(_kept):
        assert by_hand < CLOSE
        assert difference < CLOSE
        assert freed > 0
        assert stays > 0


def _gathers_of_unshard() -> tuple[list[int], bool]:
    """All-gathers up to each call of `unshard()`: nothing is there, they run, all has arrived, all is freed.

    And whether a forward has waited for those that nobody waited for.
    """
    model: Any = fully_shard(Block())
    counts = []
    with mock.patch.object(unshard, "_gathered", wraps=unshard._gathered) as gathered:
        for _ in range(2):
            handle = model.unshard(async_op=True)
            counts.append(gathered.call_count)
        handle.wait()
        model.unshard()
        counts.append(gathered.call_count)
        model.reshard()
        model.unshard()
        counts.append(gathered.call_count)
    model.reshard()
    model.unshard(async_op=True)
    model(torch.ones(2, 32))
    groups = [group for unit in units(model) for group in unit.param_groups]
    return counts, all(group.unsharded.params is not None for group in groups)


def test_unshard_gathers_nothing_that_is_there_or_on_its_way() -> None:
    for (first, running, arrived, again), has_waited in run_ranks(_gathers_of_unshard):
        assert has_waited
        assert first > 0
        assert running == arrived == first
        assert again == 2 * first


def _written_after_unshard() -> float:
    pair = make_pair()
    (batch,) = batches(1, 4 * dist.get_world_size())
    pair.compiled.unshard()  # type: ignore[operator]
    with torch.no_grad():
        for parameter in (*pair.model.parameters(), *pair.reference.parameters()):
            parameter.mul_(1.5)
    pair.backward(batch)
    return pair.difference()


def test_what_was_unsharded_by_hand_before_a_write_is_gathered_again() -> None:
    assert max(run_ranks(_written_after_unshard)) < CLOSE


def _kept_beside_foreach() -> None:
    pair = Beside(Stack, Run.SHARDED)
    pair.model.set_reshard_after_backward(False)  # type: ignore[operator]
    pair.optimize(lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=True))
    for _ in range(3):
        pair.step(width=32)


@pytest.mark.long
def test_kept_parameters_are_out_of_date_after_kernels_that_count_no_versions() -> None:
    run_ranks(_kept_beside_foreach)


def test_wrong_arguments_are_refused_by_name() -> None:
    assert run_ranks(_refusals, world_size=1) == [3]


def _refusals() -> int:
    model = Block()
    fully_shard(model)
    wrong = 0
    for call in (
        lambda: model.set_gradient_divide_factor(0),  # type: ignore[operator]
        lambda: model.set_requires_gradient_sync(1),  # type: ignore[operator]
        lambda: no_sync(3).__enter__(),  # type: ignore[arg-type]
    ):
        try:
            call()
        except ConfigError:
            wrong += 1
    return wrong
