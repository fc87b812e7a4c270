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

from fsdp_compile import ConfigError, fully_shard, no_sync
from tests import long
from tests.models.kinds import GraphBreaks, Slim
from tests.numerics.one_process.measure import batches, gradient_difference
from tests.numerics.one_process.test_accumulation import CLOSE, gradients_are_none, make_pair
from tests.ranks import on_ranks, run_ranks
from tests.two_sides import Run, WithFsdp2, WithOneProcess, compare_gradients, loss_of, share


class Branching(nn.Module):
    """Reads one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 3)
        self.chosen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head((self.first if self.chosen == 0 else self.second)(x))


def _hold(pair: WithOneProcess) -> None:
    with no_sync(pair.call):
        pair.backward()


@pytest.mark.core
@on_ranks()
def test_nothing_is_lost_and_nothing_counts_twice() -> None:
    """One model through every odd order of forward, backward and flags; the difference after each."""
    pair = make_pair()
    found: dict[str, float] = {}

    def finish(name: str) -> None:
        found[name] = gradient_difference(*pair)
        pair.update()

    _hold(pair)  # first, since torch decides whether a graph can be kept when its backward is compiled
    for loss in pair.losses():
        loss.backward(retain_graph=True)
        loss.backward()
    finish("two backwards through one graph")

    _hold(pair)
    pair.call(pair.next_batch()[0])  # the loss is thrown away: what it borrowed stays
    pair.backward()
    finish("forward thrown away")

    _hold(pair)
    for first, second in zip(pair.losses(), pair.losses(), strict=True):
        (first + second).backward()
    finish("two forwards before one backward")

    with no_sync(pair.call):
        mine, theirs = pair.losses()
    mine.backward()  # its forward has decided
    assert gradients_are_none(pair.model)
    theirs.backward()
    pair.backward()
    finish("forward inside, backward outside")

    _hold(pair)
    mine, theirs = pair.losses()
    _hold(pair)  # while the first ones are borrowed
    mine.backward()
    theirs.backward()
    finish("held while borrowed")

    _hold(pair)
    x = pair.next_batch()[0].clone().requires_grad_()
    torch.autograd.grad(loss_of(pair.call(x)), [x])  # makes gradients that are never accumulated
    pair.backward()
    finish("gradients of inputs alone")

    _hold(pair)
    pair.model.zero_grad()  # as with FSDP2, what is held stays
    pair.backward()
    finish("zero_grad between")

    with contextlib.suppress(AttributeError), no_sync(pair.call):
        pair.model.get_parameter("nothing")
    pair.backward()
    finish("exception inside")
    assert len(found) == 8
    assert {name: value for name, value in found.items() if not value < CLOSE} == {}


@pytest.mark.long
@on_ranks()
def test_a_parameter_that_the_last_microbatch_does_not_use_gets_what_was_held() -> None:
    pair = make_pair("full", Branching)
    with no_sync(pair.call):
        pair.backward()
    pair.change(lambda model: setattr(model, "chosen", 1))
    pair.backward()
    assert gradient_difference(*pair) < CLOSE


@on_ranks()
def test_a_gradient_stays_when_a_later_backward_skips_its_parameter() -> None:
    pair = make_pair("full", Branching)
    pair.backward()
    pair.change(lambda model: setattr(model, "chosen", 1))
    pair.backward()
    assert gradient_difference(*pair) < CLOSE


def _late() -> float:
    plain = make_pair(how=Run.PLAIN)
    with no_sync(plain.call):  # sharded inside, by its first call
        plain.backward()
    assert gradients_are_none(plain.model)
    plain.backward()
    return gradient_difference(*plain)


def _broken() -> float:
    broken = make_pair("full", GraphBreaks)
    for _ in range(2):
        with no_sync(broken.call):
            broken.backward()
        broken.backward()
    return gradient_difference(*broken)


@pytest.mark.long
@pytest.mark.parametrize("case", [_late, _broken])
def test_a_plain_model_and_graph_breaks_inside_no_sync(case: Callable[[], float]) -> None:
    assert max(run_ranks(case)) < CLOSE


def _share(step: int) -> torch.Tensor:
    return share(batches(1, 4 * dist.get_world_size(), seed=step)[0])


def _beside_fsdp2(hybrid: bool, factor: float | None) -> None:  # noqa: FBT001
    """Gradients after microbatches with each setting, here and with FSDP2, which are compared by the sum of all."""
    world = dist.get_world_size()
    names = ("replicate", "shard")
    shape = (2, world // 2) if hybrid else (world,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names[-len(shape) :])

    def shard(model: Any, fully_shard: Any = fsdp2) -> None:
        for part in (model.blocks[0], model):
            fully_shard(part, mesh=mesh)
            part.set_force_sum_reduction_for_comms(True)  # gloo cannot divide for FSDP2
            if factor is not None:
                part.set_gradient_divide_factor(factor)

    pair = WithFsdp2(lambda: Slim(1), shard, _share, ours=lambda model: shard(model, fully_shard))
    pair.compiled(fullgraph=False)
    pair.change(lambda model: model.set_requires_gradient_sync(False))
    pair.backward()
    pair.change(lambda model: model.set_requires_gradient_sync(True))
    if hybrid:
        pair.change(lambda model: model.set_requires_all_reduce(False))
        pair.backward()
        pair.change(lambda model: model.set_requires_all_reduce(True))
    pair.backward()
    pair.compare_gradients()


@long.parametrize(("hybrid", "factor"), [(False, 3.0), (True, None)], always=[(False, 3.0)])
def test_settings_of_fsdp2_give_its_gradients_bit_by_bit(hybrid: bool, factor: float | None) -> None:  # noqa: FBT001
    run_ranks(_beside_fsdp2, hybrid, factor, world_size=4 if hybrid else 2)


@on_ranks()
def test_each_backward_hands_gradients_over_as_fsdp2_does() -> None:
    """After one that is not the last, too."""

    def shard(model: Any, fully_shard: Any = fsdp2) -> None:
        fully_shard(model.blocks[0])
        fully_shard(model)

    pair = WithFsdp2(lambda: Slim(1), shard, _share, ours=lambda model: shard(model, fully_shard))
    pair.compiled(fullgraph=False)
    for is_last in (False, True):
        pair.change(lambda model: model.set_is_last_backward(is_last))  # noqa: B023  runs at once
        pair.backward()
        compare_gradients(pair.model, pair.reference, within=(0.0, CLOSE))


def test_what_is_no_model_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="not a"), no_sync(3):  # type: ignore[arg-type]
        pass
