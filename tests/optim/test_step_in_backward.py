"""`step_in_backward`: what it frees and when, what it leaves alone, and what it refuses."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

import fsdp_compile
from fsdp_compile import ConfigError, UnsupportedModelError, explain, fully_shard, step_in_backward, units
from fsdp_compile.cost.memory import Holder
from fsdp_compile.options import FSDPOptions
from fsdp_compile.pipeline import passes
from tests.fake_world import fake_world
from tests.models.kinds import WIDTH, Slim
from tests.numerics.one_process.pair import loss_of

EAGER: dict[str, Any] = {"lower": "eager"}


@contextlib.contextmanager
def _one_rank() -> Iterator[None]:
    with fake_world(1):
        yield
    torch._dynamo.reset()


def _model() -> nn.Module:
    torch.manual_seed(0)
    return Slim()


def _input() -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))


def _made(**options: Any) -> tuple[nn.Module, optim.Optimizer, Callable[..., Any]]:
    model = _model()
    optimizer = step_in_backward(optim.AdamW(model.parameters(), lr=0.1))
    return model, optimizer, torch.compile(model, backend="fsdp", options={**EAGER, **options})


def _values(model: nn.Module) -> list[torch.Tensor]:
    return [_local(p).clone() for p in model.parameters()]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _are_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(p, q) for p, q in zip(one, other, strict=True))


def _train_alone(steps: int) -> tuple[nn.Module, optim.Optimizer]:
    model = _model()
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        loss_of(model(_input())).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


class _Seen:
    """Bytes of gradients that are held whenever an optimizer steps, those of flat parameters included."""

    def __init__(self, optimizer: optim.Optimizer, model: nn.Module) -> None:
        self.held: list[int] = []
        self._model = model
        self._storages: dict[StorageWeakRef, int] = {}
        optimizer.register_step_pre_hook(self._look)

    def _look(self, optimizer: optim.Optimizer, *_: Any) -> None:
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        flat = [group.flat_param for unit in units(self._model) for group in unit.param_groups]
        for gradient in (p.grad for p in (*stepped, *flat) if p.grad is not None):
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            self._storages[StorageWeakRef(local.untyped_storage())] = local.untyped_storage().nbytes()
        self.held.append(sum(size for ref, size in self._storages.items() if not ref.expired()))


@pytest.mark.core
@pytest.mark.parametrize("options", [{"prefetch": 0}, {}], ids=str)
def test_gradients_are_freed_unit_by_unit(options: dict[str, Any]) -> None:
    with _one_rank():
        model, optimizer, run = _made(**options)
        seen = _Seen(optimizer, model)
        loss_of(run(_input())).backward()
        sizes = [
            flat.flat_param.numel() * flat.flat_param.element_size()
            for unit in units(model)
            for flat in unit.param_groups
        ]
        assert len(seen.held) == len(sizes) == 3
        assert max(seen.held) == max(sizes) < sum(sizes)
        torch._dynamo.reset()
        again = _model()
        after = _Seen(plain := optim.AdamW(again.parameters()), again)
        loss_of(torch.compile(again, backend="fsdp", options={**EAGER, **options})(_input())).backward()
        plain.step()
        assert after.held == [sum(sizes)], "a step after backward holds all of them"


@pytest.mark.long
@pytest.mark.inductor
def test_inductor_keeps_updates_in_their_place() -> None:
    with _one_rank():
        model, optimizer, _ = _made()
        run = torch.compile(model, backend="fsdp")
        for _ in range(3):
            loss_of(run(_input())).backward()
            optimizer.step()
            optimizer.zero_grad()
        alone, _ = _train_alone(3)
        for p, q in zip(_values(model), _values(alone), strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=2e-3)  # of updates of 0.1 each


@pytest.mark.core
def test_state_is_that_of_the_plain_optimizer_and_loads_again() -> None:
    with _one_rank():
        model, optimizer, run = _made()
        for _ in range(2):
            loss_of(run(_input())).backward()
        alone, theirs = _train_alone(2)
        assert _are_equal(_values(model), _values(alone))
        mine, plain = optimizer.state_dict(), theirs.state_dict()
        assert mine["param_groups"] == plain["param_groups"]
        assert mine["state"].keys() == plain["state"].keys()
        for index, state in plain["state"].items():
            assert mine["state"][index].keys() == state.keys()
            for key, value in state.items():
                assert torch.equal(_local(mine["state"][index][key]), value), (index, key)
        optimizer.load_state_dict(copy.deepcopy(mine))
        loss_of(run(_input())).backward()
        assert _are_equal(_values(model), _values(_train_alone(3)[0]))


def test_settings_are_read_when_a_unit_is_updated() -> None:
    with _one_rank():
        model, optimizer, run = _made()
        loss_of(run(_input())).backward()
        before = _values(model)
        optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
        loss_of(run(_input())).backward()
        assert _are_equal(before, _values(model))


def test_a_parameter_without_an_updater_keeps_its_gradient() -> None:
    with _one_rank():
        model = _model()
        weights = [p for p in model.parameters() if p.dim() > 1]
        step_in_backward(optim.SGD(weights, lr=0.1))
        run = torch.compile(model, backend="fsdp", options=EAGER)
        loss_of(run(_input())).backward()
        plain = _model()
        loss_of(plain(_input())).backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert (p.grad is None) == (p.dim() > 1)
            assert q.grad is not None
            if p.grad is not None:
                assert torch.equal(_local(p.grad), q.grad)
            else:
                assert torch.equal(_local(p), q.detach().add(q.grad, alpha=-0.1))


def test_gradients_that_nobody_accumulates_update_nothing() -> None:
    with _one_rank():
        model, _, run = _made()
        x = _input().requires_grad_()
        loss_of(run(x)).backward()
        before = _values(model)
        (gradient,) = torch.autograd.grad(loss_of(run(x)), x)
        assert gradient.abs().sum() > 0
        assert _are_equal(before, _values(model))
        loss_of(run(x)).backward()
        assert not _are_equal(before, _values(model))


def test_a_backward_of_before_the_update_is_refused() -> None:
    with _one_rank():
        _, _, run = _made()
        first, second = loss_of(run(_input())), loss_of(run(_input()))
        first.backward()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            second.backward()
        model = _model()
        step_in_backward(optim.SGD(fully_shard(model).parameters(), lr=0.1))
        first, second = loss_of(model(_input())), loss_of(model(_input()))  # not compiled
        first.backward()
        with pytest.raises(UnsupportedModelError, match="after the parameters that it belongs to were updated"):
            second.backward()


class _UntoldSGD(optim.SGD):
    """Writes in a way that autograd does not see."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad, alpha=-group["lr"])


class _CountingSGD(_UntoldSGD):
    """It counts its steps in its groups."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
        return super().step(closure)


def test_an_optimizer_that_counts_in_its_groups_is_refused() -> None:
    with _one_rank():
        model = fully_shard(_model())
        step_in_backward(_CountingSGD(model.parameters(), lr=0.1), elementwise=True)
        with pytest.raises(ConfigError, match=r"_CountingSGD changes 'steps' of its groups(.|\n)*flat_step\(optimizer"):
            loss_of(model(_input())).backward()


def test_a_gradient_of_an_input_is_not_computed_with_parameters_of_after_the_update() -> None:
    with _one_rank():
        model = _model()
        step_in_backward(_UntoldSGD(model.parameters(), lr=0.1), elementwise=True)
        run = torch.compile(model, backend="fsdp", options=EAGER)
        x = _input().requires_grad_()
        first, second = loss_of(run(x)), loss_of(run(x))
        before = _values(model)
        first.backward()
        assert not _are_equal(before, _values(model))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(second, x)


def test_what_a_refused_backward_made_is_not_added_by_the_next() -> None:
    with _one_rank():
        ends = []
        for refused in (False, True):
            model = _model()
            step_in_backward(optim.SGD(fully_shard(model).parameters(), lr=0.1))  # not compiled
            first, second = loss_of(model(_input())), loss_of(model(_input()))
            first.backward()
            if refused:
                with pytest.raises(UnsupportedModelError):
                    second.backward()
            loss_of(model(_input())).backward()
            ends.append(_values(model))
        assert _are_equal(*ends)


class _Optional(nn.Module):
    """Two parameters in one parameter group, of which forward reads one."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Parameter(torch.ones(WIDTH, WIDTH))
        self.unread = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.read.relu()


def test_a_gradient_that_waits_updates_only_what_it_is_of() -> None:
    with _one_rank():
        model = _Optional()
        step_in_backward(optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5))
        run = torch.compile(model, backend="fsdp", options=EAGER)
        run(_input())  # a forward without a backward: the next update waits for the end of its backward
        loss_of(run(_input())).backward()
        assert torch.equal(_local(model.unread), torch.ones(WIDTH))
        assert not torch.equal(_local(model.read), torch.ones(WIDTH, WIDTH))


def test_parameters_that_were_exchanged_before_they_were_marked_are_updated() -> None:
    with _one_rank():
        model = fully_shard(_model())
        model.load_state_dict(_model().state_dict(), assign=True)
        step_in_backward(optim.SGD(model.parameters(), lr=0.1))
        before = _values(model)
        loss_of(torch.compile(model, backend="fsdp", options=EAGER)(_input())).backward()
        assert all(p.grad is None for p in model.parameters())
        assert not _are_equal(before, _values(model))


def test_a_pipeline_that_is_cut_off_still_updates_after_the_last_read() -> None:
    names = [one.name for one in passes(FSDPOptions())]
    assert "order-updates" in names
    with _one_rank():
        ends = []
        for stop_after in ("schedule-auto", None):
            model, _, run = _made(stop_after=stop_after)
            for _ in range(2):
                loss_of(run(_input())).backward()
            ends.append(_values(model))
        assert _are_equal(*ends)


class _ReadOnceMore(nn.Module):
    """Backward has the gradient of its weight before that of `inner`, and reads the weight after it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x @ self.weight.detach()) + self.weight[0]


def test_one_rank_that_keeps_parameters_reads_them_before_their_update() -> None:
    gradients = []
    for sharded in (True, False):
        torch.manual_seed(0)
        model, x = _ReadOnceMore(), _input().requires_grad_()
        with _one_rank():
            run: Callable[..., Any] = model
            if sharded:
                step_in_backward(optim.SGD(model.parameters(), lr=0.1))
                fully_shard(model, reshard_after_forward=False)
                run = torch.compile(model, backend="fsdp", options=EAGER)
            loss_of(run(x)).backward()
        assert x.grad is not None
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients)


def test_joined_units_that_divide_by_a_number_of_their_own_are_updated() -> None:
    with fake_world(2):
        ends = []
        for bucket_mb in (0, 1):
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
            for layer in model:
                fully_shard(layer)
            fully_shard(model).set_gradient_divide_factor(3.0)  # type: ignore[operator]
            step_in_backward(optim.SGD(model.parameters(), lr=0.1))
            options = {**EAGER, "bucket_mb": bucket_mb}
            loss_of(torch.compile(model, backend="fsdp", options=options)(_input())).backward()
            ends.append(_values(model))
            torch._dynamo.reset()
        assert _are_equal(*ends)


def test_a_copy_of_what_is_to_be_updated_is_refused() -> None:
    with _one_rank():
        _, _, run = _made()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            loss = loss_of(run(_input()))
        with pytest.raises(UnsupportedModelError, match="hooks on saved tensors"):
            loss.backward()


@pytest.mark.core
def test_what_needs_all_gradients_is_refused() -> None:
    with _one_rank():
        model, optimizer, run = _made()
        with pytest.raises(ConfigError, match="unit by unit"):
            fsdp_compile.clip_grad_norm_(model, 1.0)
        loss = loss_of(run(_input()))
        scaler = fsdp_compile.GradScaler("cpu")
        with pytest.raises(ConfigError, match="scaled gradients"):
            scaler.scale(loss)
        torchs = torch.amp.GradScaler("cpu")
        torchs.scale(loss).backward()
        with pytest.raises(AssertionError, match="No inf checks"):  # torch's own: it finds no gradient
            torchs.step(optimizer)


def test_what_cannot_be_updated_unit_by_unit_is_refused() -> None:
    with _one_rank():
        model = _model()
        with pytest.raises(ConfigError, match="Adafactor is not known"):
            step_in_backward(optim.Adafactor(model.parameters()))
        step_in_backward(optim.SGD(model.parameters()))
        with pytest.raises(ConfigError, match="another optimizer"):
            step_in_backward(optim.SGD(model.parameters()))


def test_a_plan_knows_that_gradients_are_freed() -> None:
    found = []
    for in_backward in (False, True):
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))
        if in_backward:
            step_in_backward(optim.SGD(model.parameters()))
        plan = explain(model, torch.randn(2, 512), world_size=2, options={"lower": "eager", "bucket_mb": 0})
        backward = plan.graphs[-1].memory
        found.append((plan.peak_bytes, backward.at_peak.get(Holder.SHARD_GRADIENT, 0)))
    (after, held), (during, left) = found
    assert during < after
    assert left < held
