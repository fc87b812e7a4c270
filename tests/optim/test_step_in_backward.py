"""`step_in_backward` on torch's FSDP2: the bits of a step after backward, what it frees, what it refuses."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

import fsdp_compile
from fsdp_compile import explain
from fsdp_compile.backend import fsdp
from fsdp_compile.cost.memory import Holder
from fsdp_compile.errors import ConfigError, UnsupportedModelError
from fsdp_compile.fsdp2.updates import refuse_whole_gradients
from fsdp_compile.optim.step_in_backward import step_in_backward
from tests import long
from tests.fake_world import fake_world
from tests.models.kinds import WIDTH, Slim
from tests.ranks import on_ranks
from tests.two_sides import loss_of

MOMENTUM = functools.partial(optim.SGD, lr=0.1, momentum=0.9)
Call = Callable[..., torch.Tensor]


def _sharded(make: Callable[[], nn.Module] = Slim) -> Any:
    torch.manual_seed(0)
    model = make()
    for block in getattr(model, "blocks", ()):
        fully_shard(block)
    return fully_shard(model)


def _compiled(model: nn.Module) -> Call:
    return torch.compile(model, backend=fsdp, options={"lower": "eager"})


def _input(seed: int = 1) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * seed + dist.get_rank()))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _values(model: nn.Module) -> list[torch.Tensor]:
    return [_local(p).clone() for p in model.parameters()]


def _equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(p, q) for p, q in zip(one, other, strict=True))


class Twice(nn.Module):
    """One block that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())])
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks[0](self.blocks[0](x)))


class Broken(Slim):
    """A graph break between two blocks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        torch._dynamo.graph_break()
        return self.head(self.blocks[1](x))


class BrokenTwice(Twice):
    """A graph break between two calls of one block."""

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
    """A block that is frozen before it is sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(requires_grad=False)


def _plain(model: Any, call: Call, step: int) -> None:
    loss_of(call(_input(step))).backward()


def _two_forwards(model: Any, call: Call, step: int) -> None:
    (loss_of(call(_input(step))) + loss_of(call(_input(step + 50)))).backward()


def _microbatches(model: Any, call: Call, step: int) -> None:
    before = _values(model)
    model.set_requires_gradient_sync(False)
    loss_of(call(_input(step))).backward()
    assert _equal(before, _values(model)), "nothing is updated before the last microbatch"
    model.set_requires_gradient_sync(True)
    loss_of(call(_input(step + 50))).backward()


def _not_last(model: Any, call: Call, step: int) -> None:
    before = _values(model)
    model.set_is_last_backward(False)
    loss_of(call(_input(step))).backward()
    assert _equal(before, _values(model))
    model.set_is_last_backward(True)
    loss_of(call(_input(step + 50))).backward()


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
        assert _equal(before, _values(model)), "gradients of inputs update nothing"
    loss_of(call(_input(step + 50))).backward()


def _profiled(model: Any, call: Call, step: int) -> None:
    with profile(activities=[ProfilerActivity.CPU]):
        _plain(model, call, step)


def _counted(model: Any, call: Call, step: int) -> None:
    with FlopCounterMode(display=False) as counter:
        _plain(model, call, step)
    assert counter.get_total_flops() > 0


def _frozen(model: Any, call: Call, step: int) -> None:
    if step == 1:
        model.head.bias.requires_grad_(requires_grad=False)
    _plain(model, call, step)


def _thawed(model: Any, call: Call, step: int) -> None:
    if step == 1:
        model.blocks[0].requires_grad_(requires_grad=True)
    _plain(model, call, step)


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
    "not the last backward": (Slim, _not_last, True),
    "a forward without a backward": (Slim, _evaluated, True),
    "gradients of inputs": (Slim, _input_gradients, True),
    "profiler": (Slim, _profiled, True),
    "a dispatch mode": (Slim, _counted, True),
    "an operator with side effects": (Inverse, _plain, True),
    "frozen": (Slim, _frozen, True),
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
    call = _compiled(model) if is_compiled else model
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
    differing = [
        n
        for (n, p), q in zip(mine.named_parameters(), theirs.parameters(), strict=True)
        if not torch.equal(_local(p), _local(q))
    ]
    one, other = stepped.state_dict(), after.state_dict()
    assert one["param_groups"] == other["param_groups"]
    for index, state in other["state"].items():
        assert one["state"][index].keys() == state.keys()
        differing += [
            f"{index} {key}" for key, v in state.items() if not torch.equal(_local(one["state"][index][key]), _local(v))
        ]
    assert differing == []


@on_ranks()
def test_a_compiled_and_an_uncompiled_forward_are_one_step() -> None:
    ends = []
    for in_backward in (True, False):
        torch._dynamo.reset()
        model = _sharded()
        optimizer = MOMENTUM(model.parameters())
        call = _compiled(model)
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
    assert _equal(*ends)


@on_ranks()
def test_gradients_are_freed_unit_by_unit() -> None:
    model = _sharded()
    optimizer = step_in_backward(optim.SGD(model.parameters(), lr=0.1))
    seen: list[int] = []

    def look(*_: Any) -> None:
        seen.append(sum(_local(p.grad).numel() for p in model.parameters() if p.grad is not None))

    optimizer.register_step_pre_hook(look)
    loss_of(_compiled(model)(_input())).backward()
    largest = max(sum(_local(p).numel() for p in part.parameters()) for part in (*model.blocks, model.head))
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
    loss = loss_of(_compiled(model)(_input()))
    with _refused(UnsupportedModelError, "has a hook on its gradient"):
        loss.backward()


@on_ranks()
def test_a_parameter_without_an_updater_keeps_its_gradient() -> None:
    model, plain = _sharded(), _sharded()
    step_in_backward(optim.SGD([p for p in model.parameters() if p.dim() > 1], lr=0.1))
    loss_of(_compiled(model)(_input())).backward()
    loss_of(plain(_input())).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (p.dim() > 1)
        expected = _local(q.grad)
        assert (
            torch.equal(_local(p.grad), expected)
            if p.grad is not None
            else torch.equal(_local(p), _local(q).add(expected, alpha=-0.1))
        )


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
    call = _compiled(model)
    call(_input())
    loss_of(call(_input())).backward()
    assert bool((_local(model.unread) == 1).all())
    assert not bool((_local(model.read) == 1).all())


@contextlib.contextmanager
def _refused(kind: type[Exception], text: str) -> Iterator[None]:
    with pytest.raises(kind, match=text):
        yield


class CountingSGD(optim.SGD):
    """It counts its steps in its groups."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
        return super().step(closure)


@on_ranks()
def test_what_cannot_be_is_refused() -> None:
    with _refused(ConfigError, "Adafactor is not known"):
        step_in_backward(optim.Adafactor(_sharded().parameters()))
    model = _sharded()
    step_in_backward(step_in_backward(optim.SGD(model.parameters())))
    with _refused(ConfigError, "another optimizer"):
        step_in_backward(optim.SGD(model.parameters()))
    with _refused(ConfigError, "unit by unit"):
        refuse_whole_gradients(model.parameters(), where="a norm", instead="none")
    call = _compiled(model)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        loss = loss_of(call(_input()))
    with _refused(UnsupportedModelError, "hooks on saved tensors"):
        loss.backward()
    torch._dynamo.reset()
    model = _sharded()
    step_in_backward(CountingSGD(model.parameters(), lr=0.1), elementwise=True)
    with _refused(ConfigError, r"CountingSGD changes 'steps' of its groups"):
        loss_of(_compiled(model)(_input())).backward()


@on_ranks()
def test_a_backward_of_before_the_update_is_refused() -> None:
    model = _sharded()
    step_in_backward(optim.SGD(model.parameters(), lr=0.1))
    call = _compiled(model)
    first, second = loss_of(call(_input())), loss_of(call(_input(2)))
    first.backward()
    with _refused(RuntimeError, "modified by an inplace operation"):
        second.backward()
    first, second = loss_of(model(_input())), loss_of(model(_input(2)))
    first.backward()
    with _refused(UnsupportedModelError, "after the parameters that it belongs to were updated"):
        second.backward()


@on_ranks()
def test_state_is_that_of_the_plain_optimizer_and_loads_again() -> None:
    model = _sharded()
    optimizer = step_in_backward(MOMENTUM(model.parameters()))
    call = _compiled(model)
    loss_of(call(_input())).backward()
    saved, values = copy.deepcopy(optimizer.state_dict()), _values(model)
    loss_of(call(_input(2))).backward()
    ended = _values(model)
    optimizer.load_state_dict(saved)
    with torch.no_grad():
        for p, value in zip(model.parameters(), values, strict=True):
            _local(p).copy_(value)
    loss_of(call(_input(2))).backward()
    assert _equal(ended, _values(model))


@pytest.fixture
def one_rank() -> Iterator[None]:
    with fake_world(1):
        yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("one_rank")
def test_settings_are_read_when_a_unit_is_updated() -> None:
    model = _sharded()
    optimizer, call = step_in_backward(MOMENTUM(model.parameters())), _compiled(model)
    loss_of(call(_input())).backward()
    before = _values(model)
    optimizer.param_groups[0].update(lr=0.0)
    loss_of(call(_input())).backward()
    assert _equal(before, _values(model))


def _trained_twice(**options: Any) -> list[torch.Tensor]:
    model = _sharded()
    step_in_backward(MOMENTUM(model.parameters()))
    call = torch.compile(model, backend="fsdp", options={"lower": "eager", **options})
    for _ in range(2):
        loss_of(call(_input())).backward()
    torch._dynamo.reset()
    return _values(model)


@pytest.mark.usefixtures("one_rank")
def test_a_pipeline_that_is_cut_off_still_updates_after_the_last_read() -> None:
    assert _equal(_trained_twice(stop_after="schedule-auto"), _trained_twice())


@pytest.mark.long
@pytest.mark.inductor
@pytest.mark.usefixtures("one_rank")
def test_inductor_keeps_updates_in_their_place() -> None:
    for mine, theirs in zip(_trained_twice(lower="inductor"), _trained_twice(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-3)


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
        options: dict[str, Any] = {"lower": "eager", "bucket_mb": bucket_mb}
        loss_of(torch.compile(model, backend="fsdp", options=options)(_input())).backward()
        ends.append(_values(model))
        torch._dynamo.reset()
    assert _equal(*ends)


@pytest.mark.usefixtures("one_rank")
def test_what_needs_all_gradients_is_refused() -> None:
    model = _sharded()
    optimizer, call = step_in_backward(MOMENTUM(model.parameters())), _compiled(model)
    with pytest.raises(ConfigError, match="unit by unit"):
        fsdp_compile.clip_grad_norm_(model, 1.0)
    loss = loss_of(call(_input()))
    torchs = torch.amp.GradScaler("cpu")
    torchs.scale(loss).backward()
    with pytest.raises(AssertionError, match="No inf checks"):  # torch's own: it finds no gradient
        torchs.step(optimizer)


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
