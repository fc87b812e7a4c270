"""Outputs of a compiled model that the loss does not use: None, as in eager, where torch.compile makes zeros."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from fsdp_compile import ConfigError, fully_shard, no_sync, step_in_backward
from tests import long
from tests.ranks import on_ranks
from tests.two_sides import (
    Loss,
    Run,
    WithOneProcess,
    close,
    compare_gradients,
    compile_eagerly,
    loss_of,
    mesh_of,
    whole,
)

Outputs = tuple[torch.Tensor, torch.Tensor | None]


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, *, right: bool = True) -> Outputs:
        hidden = torch.tanh(self.trunk(x))
        return self.left(hidden), self.right(hidden) if right else None


def _loss(*outputs: torch.Tensor | None) -> torch.Tensor:
    return torch.stack([loss_of(each) for each in outputs if each is not None]).sum()


def _of(used: slice) -> Loss:
    return lambda call, batch: _loss(*call(batch)[used])


LEFT, RIGHT, BOTH = _of(slice(0, 1)), _of(slice(1, 2)), _of(slice(0, 2))


def _decayed(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Parameters without a gradient stay as they are, and with zeros they do not."""
    return torch.optim.AdamW(parameters, weight_decay=0.1)


def _heads(how: Run = Run.PLAIN, make: Callable[[], nn.Module] = Heads, **arguments: Any) -> WithOneProcess:
    return WithOneProcess(make, how, twice=False, **arguments)


def _each_head(model: Any) -> None:
    for head in list(model.children())[1:]:
        fully_shard(head)
    fully_shard(model)


@pytest.mark.parametrize("lower", ["eager", pytest.param("inductor", marks=pytest.mark.long)])
@on_ranks()
def test_a_head_whose_output_is_unused_has_none_as_in_one_process(lower: str) -> None:
    for how, shard in ((Run.PLAIN, fully_shard), (Run.SHARDED, _each_head)):  # one unit, and three
        pair = _heads(how, shard=shard, optimizer=_decayed, lower=lower)
        for loss in (BOTH, LEFT, LEFT, RIGHT, BOTH):
            pair.train(steps=1, loss=loss)


def _penalty(model: nn.Module) -> torch.Tensor:
    """Outside of the forward, as docs/limits.md says to write it; the right head's bias is not in it."""
    penalty = torch.stack([p.square().sum() for n, p in model.named_parameters() if n != "right.bias"]).sum()
    return whole(penalty)


@on_ranks()
def test_a_penalty_outside_of_the_forward_counts_for_an_unused_head() -> None:
    pair = _heads(Run.SHARDED)
    for is_before in (True, False, True):
        pair.zero_grad()
        for (model, call), batch in zip(pair.called(), pair.next_batch(), strict=True):
            before = _penalty(model)
            (LEFT(call, batch) + (before if is_before else _penalty(model))).backward()
        pair.compare_gradients()
        assert pair.model.right.weight.grad is not None
        assert pair.model.right.bias.grad is None


@pytest.mark.long
@on_ranks()
def test_with_changing_sizes() -> None:
    pair = _heads(dynamic=True)
    for pair.rows in (2, 3, 5):
        for loss in (BOTH, LEFT):
            pair.zero_grad()
            pair.backward(loss=loss)
            pair.compare_gradients()


@long.parametrize(
    ("first", "second"),
    [(slice(0, 2), slice(0, 1)), (slice(0, 1), slice(0, 2)), (slice(0, 1), slice(0, 1))],
    always=[(slice(0, 2), slice(0, 1))],
)
@on_ranks()
def test_accumulated_gradients_of_an_output_count_when_it_is_used_no_more(first: slice, second: slice) -> None:
    pair = _heads()
    for _ in range(2):  # the second step's graph has accumulated gradients among its inputs
        with no_sync(pair.model):
            pair.backward(loss=_of(first))
        pair.backward(loss=_of(second))
        pair.compare_gradients()
        pair.zero_grad()


def _update_in_backward(pair: WithOneProcess, but: list[nn.Parameter], *losses: Loss) -> None:
    """All but some, which are updated after it; then a step of each loss."""
    names = {id(p) for p in but}
    mine = step_in_backward(_decayed([p for p in pair.model.parameters() if id(p) not in names]))
    pair.optimizers = [(mine, _decayed(list(pair.reference.parameters())))]
    if but:
        pair.optimizers.append((_decayed(but),))
    for loss in losses:
        pair.backward(loss=loss)
        pair.update()
        pair.compare_parameters()


@long.parametrize("unused_is_plain", [False, True], always=[False])
@long.parametrize("used", [0, 1], always=[0])
@on_ranks()
def test_updates_in_backward_leave_it_alone(used: int, unused_is_plain: bool) -> None:  # noqa: FBT001
    """Units are updated one after the other, and ranks compare before the first of these updates alone."""
    pair = _heads(Run.SHARDED, shard=_each_head)
    unused = pair.model.left if used else pair.model.right
    own = list(unused.parameters()) if unused_is_plain else []
    _update_in_backward(pair, own, BOTH, *[_of(slice(used, used + 1))] * 2)


@on_ranks()
def test_what_no_rank_used_in_a_step_may_be_used_by_one_in_the_next() -> None:
    pair = _heads(Run.SHARDED, shard=_each_head)
    _update_in_backward(pair, [])
    for used in ((0, 0), (0, 1), (1, 1), (1, 0)):  # by each of the two ranks
        mine, batch = pair.next_batch()
        loss_of(pair.call(mine)[used[dist.get_rank()]]).backward()
        losses = [loss_of(pair.reference(rows)[output]) for rows, output in zip(batch.chunk(2), used, strict=True)]
        (torch.stack(losses).sum() / 2).backward()
        pair.update()
        pair.compare_parameters()


class ThreeHeads(Heads):
    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        hidden = torch.tanh(self.trunk(x))
        return self.middle(hidden), self.left(hidden), self.right(hidden)


@long.parametrize("used", [0, 1], always=[1])
@on_ranks()
def test_one_that_is_updated_in_backward_beside_one_that_is_not(used: int) -> None:
    pair = _heads(Run.SHARDED, ThreeHeads, shard=_each_head)
    _update_in_backward(pair, list(pair.model.right.parameters()), _of(slice(0, 3)), *[_of(slice(used, used + 1))] * 3)


@pytest.mark.long
@on_ranks()
def test_after_a_gradient_of_inputs() -> None:
    pair = _heads()
    inputs = pair.next_batch()[0].clone().requires_grad_()
    torch.autograd.grad(BOTH(pair.call, inputs), inputs)  # of both outputs, and written nowhere
    pair.backward(loss=LEFT)
    pair.compare_gradients()


@pytest.mark.long
@on_ranks()
def test_a_second_backward_through_the_same_graph_for_the_other_output() -> None:
    pair = _heads()
    mine, batch = pair.next_batch()
    for outputs in zip(pair.call(mine), pair.reference(batch), strict=True):
        for output in outputs:
            loss_of(output).backward(retain_graph=True)
        pair.compare_gradients()


@pytest.mark.long
@on_ranks()
def test_a_frozen_model_with_an_unused_output() -> None:
    pair = _heads()
    pair.change(lambda model: model.requires_grad_(requires_grad=False))
    mine, theirs = (torch.ones(4, 6, requires_grad=True) for _ in pair)
    LEFT(pair.call, mine).backward()
    LEFT(pair.reference, theirs).backward()
    close(mine.grad, theirs.grad, "gradient of the input")


@torch.compile(backend="aot_eager")
def _before(weight: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return weight * x, weight + x


class PassesOn(Heads):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        hidden = torch.tanh(self.trunk(x))
        return x.view(-1), self.left(hidden), self.right(hidden)


@pytest.mark.long
@on_ranks()
def test_a_graph_of_another_backend_before_it_gets_zeros() -> None:
    """It has an output that is not used either, and its backward does not know `None`."""
    pair = _heads(make=PassesOn)
    weights = [torch.ones(6, requires_grad=True) for _ in pair]
    batch = pair.next_batch()[1]
    for (_, call), weight in zip(pair.called(), weights, strict=True):
        outputs = call(_before(weight, batch)[0])
        (outputs[0].mean() + loss_of(outputs[1])).backward()
    close(weights[0].grad, weights[1].grad, "gradient of what came before")
    pair.compare_gradients()


@on_ranks()
def test_a_head_that_the_forward_leaves_out_has_none_as_in_one_process() -> None:
    pair = _heads()
    fsdp2 = copy.deepcopy(pair.reference)
    torch_fully_shard(fsdp2)
    mine, batch = pair.next_batch()
    loss_of(pair.call(mine, right=False)[0]).backward()
    LEFT(fsdp2, mine).backward()
    LEFT(pair.reference, batch).backward()
    assert pair.reference.right.weight.grad is None
    pair.compare_gradients()
    compare_gradients(fsdp2, pair.reference)


class OwnOrder(Heads):
    """Computes alike on all ranks, and returns `first` first; rank 0 alone returns the trunk's output, too."""

    first = "left"

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:  # type: ignore[override]
        hidden = torch.tanh(self.trunk(x))
        heads = {"left": self.left(hidden), "right": self.right(hidden)}
        more = [hidden] if dist.get_rank() == 0 else []
        return [heads.pop(self.first), *heads.values(), *more]


@long.parametrize("firsts", [("left", "right"), ("left", "left")], always=[("left", "right")])
@on_ranks()
def test_ranks_may_return_other_outputs_in_another_order(firsts: tuple[str, str]) -> None:
    pair = _heads(make=OwnOrder)
    pair.model.first = firsts[dist.get_rank()]
    mine, batch = pair.next_batch()
    LEFT(pair.call, mine).backward()
    losses = []
    for pair.reference.first, rows in zip(firsts, batch.chunk(2), strict=True):
        losses.append(LEFT(pair.reference, rows))
    (torch.stack(losses).sum() / 2).backward()
    pair.compare_gradients()


@pytest.mark.long
@on_ranks()
def test_replicas_that_accumulate_fewer_microbatches_than_others() -> None:
    pair = _heads(Run.SHARDED, shard=functools.partial(fully_shard, mesh=mesh_of((2, 1))))
    batch = pair.next_batch()[1]
    with no_sync(pair.model):
        for _ in range(1 + dist.get_rank()):
            LEFT(pair.call, batch).backward()
    LEFT(pair.call, batch).backward()
    for _ in range(5):  # two of rank 0 and three of rank 1
        (LEFT(pair.reference, batch) / 2).backward()
    assert pair.reference.right.weight.grad is None
    pair.compare_gradients()


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.left(x), self.right(y)


@on_ranks()
def test_a_hook_on_an_input_of_an_unused_output_gets_zeros() -> None:
    batch = torch.randn(4, 6, requires_grad=True)
    other = batch * 1
    seen: list[torch.Tensor] = []
    other.register_hook(lambda gradient: seen.append(2 * gradient))
    compiled = compile_eagerly(TwoInputs())
    loss_of(compiled(batch, other)[0]).backward()
    assert [each.any().item() for each in seen] == [False]
    assert batch.grad is not None


def _on_two_meshes(model: Any) -> None:
    fully_shard(model.right, mesh=mesh_of((2, 2)))
    everyone = init_device_mesh("cpu", (4,))
    fully_shard(model.left, mesh=everyone)
    fully_shard(model, mesh=everyone)


def _hybrid(model: Any) -> None:
    fully_shard(model, mesh=mesh_of((2, 2)))


@pytest.mark.long
@pytest.mark.parametrize("used", [0, 1])
@on_ranks(world_size=4)
def test_units_on_two_meshes(used: int) -> None:
    pair = _heads(Run.SHARDED, shard=_on_two_meshes)
    pair.backward(loss=_of(slice(used, used + 1)))
    pair.compare_gradients()


@long.parametrize("shard", [None, _hybrid], always=[None])
@on_ranks(world_size=lambda shard: 4 if shard else 2)
def test_ranks_that_use_one_output_each_get_the_gradients_of_all(shard: Callable[[Any], None] | None) -> None:
    """Why a rank whose own loss leaves an output out must not have None: others have gradients for it."""
    pair = _heads() if shard is None else _heads(Run.SHARDED, shard=shard)
    ranks = dist.get_world_size()
    mine, batch = pair.next_batch()
    loss_of(pair.call(mine)[int(dist.get_rank() == ranks - 1)]).backward()
    left, right = pair.reference(batch)
    losses = [loss_of(each) for each in (*left.chunk(ranks)[:-1], right.chunk(ranks)[-1])]
    (torch.stack(losses).sum() / ranks).backward()
    pair.compare_gradients()


class _Expert(Heads):
    def __init__(self) -> None:
        super().__init__()
        self.expert = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        hidden = torch.tanh(self.expert(torch.tanh(self.trunk(x))))
        return self.left(hidden), self.right(hidden)


@on_ranks(world_size=4)
def test_replicas_of_units_on_other_meshes_agree() -> None:
    """Units that share their replicas, and not their shard group, are not taken for each other."""
    mesh = mesh_of((2, 2))
    model = _Expert()
    fully_shard([model.left, model.right], mesh=mesh)
    fully_shard(model.expert, mesh=mesh["replicate"], sharding_strategy=ShardingStrategy.NO_SHARD)
    compiled = compile_eagerly(fully_shard(model, mesh=mesh))
    _loss(*compiled(torch.ones(2, 6))[: 1 + dist.get_rank() // 2]).backward()
    assert model.right.weight.grad is not None


@on_ranks()
def test_a_penalty_of_plain_parameters_is_refused_once_they_are_sharded() -> None:
    pair = _heads()
    penalty = _penalty(pair.model)
    loss = BOTH(pair.call, pair.next_batch()[0])
    with pytest.raises(ConfigError, match="from before the model was sharded"):
        (loss + penalty).backward()
