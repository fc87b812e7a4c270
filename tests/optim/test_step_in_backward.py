"""`step_in_backward` on torch's FSDP2: the bits of a step after backward, what it frees, what it refuses."""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

import fsdp_compile
from fsdp_compile import explain
from fsdp_compile.cost.memory import Holder
from fsdp_compile.errors import ConfigError, UnsupportedModelError
from fsdp_compile.optim.step_in_backward import step_in_backward
from tests import long
from tests.fake_world import fake_world
from tests.fsdp2.models import assert_same
from tests.models.kinds import WIDTH, Slim
from tests.ranks import on_ranks
from tests.two_sides import compile_eagerly, local, loss_of

MOMENTUM = functools.partial(optim.SGD, lr=0.1, momentum=0.9)
Call = Callable[..., torch.Tensor]


def _sharded(make: Callable[[], nn.Module] = Slim) -> Any:
    torch.manual_seed(0)
    model = make()
    for block in getattr(model, "blocks", ()):
        fully_shard(block)
    return fully_shard(model)


def _input(seed: int = 1) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * seed + dist.get_rank()))


def _values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: local(p).detach().clone() for name, p in model.named_parameters()}


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())])
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks[0](self.blocks[0](x)))


class Broken(Slim):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        torch._dynamo.graph_break()
        return self.head(self.blocks[1](x))


class BrokenTwice(Twice):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        torch._dynamo.graph_break()
        return self.head(self.blocks[0](x))


class Inverse(Slim):
    """An operator that checks for errors has side effects, for which graphs have a further input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.blocks[0][0].weight  # type: ignore[index]
        return super().forward(torch.linalg.solve(torch.eye(WIDTH) + weight @ weight.T, x.T).T)


class Frozen(Slim):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(requires_grad=False)


def _plain(model: Any, call: Call, step: int) -> None:
    loss_of(call(_input(step))).backward()


def _two_forwards(model: Any, call: Call, step: int) -> None:
    (loss_of(call(_input(step))) + loss_of(call(_input(step + 50)))).backward()


def _held_by(model: Any, call: Call, step: int, *, setting: str) -> None:
    before = _values(model)
    getattr(model, setting)(False)  # noqa: FBT003
    loss_of(call(_input(step))).backward()
    assert_same(_values(model), before)  # nothing is updated before the last microbatch
    getattr(model, setting)(True)  # noqa: FBT003
    loss_of(call(_input(step + 50))).backward()


_microbatches = functools.partial(_held_by, setting="set_requires_gradient_sync")


def _evaluated(model: Any, call: Call, step: int) -> None:
    call(_input(step + 50))  # a forward without a backward: the update waits for the end of this one
    loss_of(call(_input(step))).backward()


def _input_gradients(model: Any, call: Call, step: int) -> None:
    for ask in (torch.autograd.grad, lambda loss, x: loss.backward(inputs=[x])):
        model.set_requires_gradient_sync(False)
        (loss_of(call(_input(step))) / 2).backward()
        model.set_requires_gradient_sync(True)
        before, x = _values(model), _input(step + 50).requires_grad_()
        ask(loss_of(call(x)), x)
        assert_same(_values(model), before)  # gradients of inputs update nothing
    loss_of(call(_input(step + 50))).backward()


def _profiled(model: Any, call: Call, step: int) -> None:
    with profile(activities=[ProfilerActivity.CPU]):
        _plain(model, call, step)


def _counted(model: Any, call: Call, step: int) -> None:
    with FlopCounterMode(display=False) as counter:
        _plain(model, call, step)
    assert counter.get_total_flops() > 0


def _changed(model: Any, call: Call, step: int, *, part: str, trained: bool) -> None:
    if step == 1:
        operator.attrgetter(part)(model).requires_grad_(requires_grad=trained)
    _plain(model, call, step)


_thawed = functools.partial(_changed, part="blocks.0", trained=True)
Step = Callable[[Any, Call, int], None]
CASES: dict[str, tuple[Callable[[], nn.Module], Step, bool]] = {
    "plain": (Slim, _plain, True),
    "uncompiled": (Slim, _plain, False),
    "graph break": (Broken, _plain, True),
    "used twice": (Twice, _plain, True),
    "used twice in two graphs": (BrokenTwice, _plain, True),
    "two forwards": (Slim, _two_forwards, True),
    "microbatches": (Slim, _microbatches, True),
    "microbatches, uncompiled": (Slim, _microbatches, False),
    "not the last backward": (Slim, functools.partial(_held_by, setting="set_is_last_backward"), True),
    "a forward without a backward": (Slim, _evaluated, True),
    "gradients of inputs": (Slim, _input_gradients, True),
    "profiler": (Slim, _profiled, True),
    "a dispatch mode": (Slim, _counted, True),
    "an operator with side effects": (Inverse, _plain, True),
    "frozen": (Slim, functools.partial(_changed, part="head", trained=False), True),
    "partly frozen": (Slim, functools.partial(_changed, part="head.bias", trained=False), True),
    "thawed": (Frozen, _thawed, True),
    "thawed, uncompiled": (Frozen, _thawed, False),
}


ALWAYS = ("graph break", "microbatches")


def _train(name: str, *, in_backward: bool) -> tuple[nn.Module, optim.Optimizer]:
    make, run, is_compiled = CASES[name]
    torch._dynamo.reset()
    model = _sharded(make)
    parameters = list(model.parameters())
    decayed: dict[str, Any] = {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1}
    optimizer = optim.AdamW([decayed, {"params": [p for p in parameters if p.dim() <= 1]}], lr=0.1)
    if in_backward:
        step_in_backward(optimizer)
    schedule = optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    call = compile_eagerly(model) if is_compiled else model
    for step in range(3):
        run(model, call, step)
        if in_backward:
            assert all(p.grad is None for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model, optimizer


@long.parametrize("name", CASES, always=ALWAYS)
@on_ranks()
def test_the_bits_are_those_of_a_step_after_backward(name: str) -> None:
    (mine, stepped), (theirs, after) = _train(name, in_backward=True), _train(name, in_backward=False)
    assert_same(_values(mine), _values(theirs))
    assert_same(stepped.state_dict(), after.state_dict())


@on_ranks()
def test_a_compiled_and_an_uncompiled_forward_are_one_step() -> None:
    ends = []
    for in_backward in (True, False):
        torch._dynamo.reset()
        model = _sharded()
        optimizer = MOMENTUM(model.parameters())
        call = compile_eagerly(model)
        loss_of(call(_input())).backward()  # the model is known by now
        optimizer.step()
        optimizer.zero_grad()
        if in_backward:
            step_in_backward(optimizer)
        for step in range(2):
            (loss_of(call(_input(step))) + loss_of(model(_input(step + 9)))).backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append(_values(model))
    assert_same(*ends)


@on_ranks()
def test_gradients_are_freed_unit_by_unit() -> None:
    model = _sharded()
    optimizer = step_in_backward(optim.SGD(model.parameters(), lr=0.1))
    seen: list[int] = []

    def look(*_: Any) -> None:
        seen.append(sum(local(p.grad).numel() for p in model.parameters() if p.grad is not None))

    optimizer.register_step_pre_hook(look)
    loss_of(compile_eagerly(model)(_input())).backward()
    largest = max(sum(local(p).numel() for p in part.parameters()) for part in (*model.blocks, model.head))
    assert len(seen) == 3, "one update of each unit"
    assert max(seen) == largest


@long.parametrize(
    "name", ["register_hook", "register_post_accumulate_grad_hook"], always=["register_post_accumulate_grad_hook"]
)
@on_ranks()
def test_hooks_of_the_user_are_refused(name: str) -> None:
    model = _sharded()
    getattr(model.head.weight, name)(lambda _: None)
    step_in_backward(optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(UnsupportedModelError, match="has a hook on its gradient"):
        loss_of(compile_eagerly(model)(_input())).backward()


@on_ranks()
def test_a_parameter_without_an_updater_keeps_its_gradient() -> None:
    model, plain = _sharded(), _sharded()
    step_in_backward(optim.SGD([p for p in model.parameters() if p.dim() > 1], lr=0.1))
    loss_of(compile_eagerly(model)(_input())).backward()
    loss_of(plain(_input())).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        if p.dim() > 1:
            assert p.grad is None
            assert torch.equal(local(p), local(q).add(local(q.grad), alpha=-0.1))
        else:
            assert torch.equal(local(p.grad), local(q.grad))


class Optional(nn.Module):
    """Two parameters in one group, of which forward reads one."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.unread = nn.Parameter(torch.ones(WIDTH, WIDTH)), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.read.relu()


@on_ranks()
def test_what_got_no_gradient_is_not_updated() -> None:
    model = _sharded(Optional)
    step_in_backward(optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5))
    call = compile_eagerly(model)
    call(_input())
    loss_of(call(_input())).backward()
    assert bool((local(model.unread) == 1).all())
    assert not bool((local(model.read) == 1).all())


class CountingSGD(optim.SGD):
    """It counts its steps in its groups."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
        return super().step(closure)


@on_ranks()
def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="Adafactor is not known"):
        step_in_backward(optim.Adafactor(_sharded().parameters()))
    model = _sharded()
    step_in_backward(step_in_backward(optim.SGD(model.parameters())))
    with pytest.raises(ConfigError, match="another optimizer"):
        step_in_backward(optim.SGD(model.parameters()))
    with pytest.raises(ConfigError, match="unit by unit"):
        fsdp_compile.clip_grad_norm_(model, 1.0)
    scaler = fsdp_compile.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(ConfigError, match="unit by unit"):
        scaler.unscale_(optim.SGD(model.parameters()))
    call = compile_eagerly(model)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        loss = loss_of(call(_input()))
    with pytest.raises(UnsupportedModelError, match="hooks on saved tensors"):
        loss.backward()
    torch._dynamo.reset()
    model = _sharded()
    step_in_backward(CountingSGD(model.parameters(), lr=0.1), elementwise=True)
    with pytest.raises(ConfigError, match=r"CountingSGD changes 'steps' of its groups"):
        loss_of(compile_eagerly(model)(_input())).backward()


@on_ranks()
def test_a_backward_of_before_the_update_is_refused() -> None:
    model = _sharded()
    step_in_backward(optim.SGD(model.parameters(), lr=0.1))
    call = compile_eagerly(model)
    first, second = loss_of(call(_input())), loss_of(call(_input(2)))
    first.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.backward()
    first, second = loss_of(model(_input())), loss_of(model(_input(2)))
    first.backward()
    with pytest.raises(UnsupportedModelError, match="after the parameters that it belongs to were updated"):
        second.backward()


@on_ranks()
def test_state_is_that_of_the_plain_optimizer_and_loads_again() -> None:
    model = _sharded()
    optimizer = step_in_backward(MOMENTUM(model.parameters()))
    call = compile_eagerly(model)
    loss_of(call(_input())).backward()
    saved, values = copy.deepcopy(optimizer.state_dict()), _values(model)
    loss_of(call(_input(2))).backward()
    ended = _values(model)
    optimizer.load_state_dict(saved)
    with torch.no_grad():
        for name, value in values.items():
            local(model.get_parameter(name)).copy_(value)
    loss_of(call(_input(2))).backward()
    assert_same(_values(model), ended)


@on_ranks()
def test_an_optimizer_of_a_plain_model_follows_with_its_frozen_parameters() -> None:
    torch.manual_seed(0)
    plain = Frozen()
    step_in_backward(MOMENTUM(plain.parameters()))
    sharded = _sharded(Frozen)
    step_in_backward(MOMENTUM(sharded.parameters()))
    for model in (plain, sharded):
        call = compile_eagerly(model)
        loss_of(call(_input())).backward()
        model.blocks[0].requires_grad_()
        loss_of(call(_input(2))).backward()
    assert_same(_values(plain), _values(sharded))


@pytest.fixture
def one_rank() -> Iterator[None]:
    with fake_world(1):
        yield
    torch._dynamo.reset()


def _trained_twice(**options: Any) -> dict[str, torch.Tensor]:
    model = _sharded()
    step_in_backward(MOMENTUM(model.parameters()))
    call = compile_eagerly(model, **options)
    for _ in range(2):
        loss_of(call(_input())).backward()
    torch._dynamo.reset()
    return _values(model)


@pytest.mark.usefixtures("one_rank")
def test_a_pipeline_that_is_cut_off_still_updates_after_the_last_read() -> None:
    assert_same(_trained_twice(stop_after="schedule-auto"), _trained_twice())


@pytest.mark.long
@pytest.mark.inductor
@pytest.mark.usefixtures("one_rank")
def test_inductor_keeps_updates_in_their_place() -> None:
    torch.testing.assert_close(_trained_twice(lower="inductor"), _trained_twice(), rtol=0, atol=2e-3)


@on_ranks()
def test_joined_units_that_divide_by_a_number_of_their_own_are_updated() -> None:
    ends = []
    for bucket_mb in (0, 1):
        torch.manual_seed(0)
        model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        for layer in model:
            fully_shard(layer)
            layer.set_gradient_divide_factor(3.0)
        fully_shard(model)
        step_in_backward(optim.SGD(model.parameters(), lr=0.1))
        loss_of(compile_eagerly(model, bucket_mb=bucket_mb)(_input())).backward()
        ends.append(_values(model))
        torch._dynamo.reset()
    assert_same(*ends)


def test_a_plan_knows_that_gradients_are_freed() -> None:
    found = []
    for in_backward in (False, True):
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))
        if in_backward:
            step_in_backward(optim.SGD(model.parameters()))
        plan = explain(model, torch.randn(2, 512), world_size=2, options={"lower": "eager", "bucket_mb": 0})
        backward = plan.graphs[-1].memory
        found.append((plan.peak_bytes, backward.at_peak.get(Holder.SHARD_GRADIENT, 0)))
    (after, all_at_once), (during, left) = found
    assert during < after
    assert left < all_at_once
