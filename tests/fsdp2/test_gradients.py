"""Gradients that are asked for, hooks on them, and penalties: as in one process, or refused by name."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.hooks import RemovableHandle

from fsdp_compile import UnsupportedModelError, fully_shard, no_sync, step_in_backward
from tests import long
from tests.models.kinds import Slim
from tests.models.outlines import Small
from tests.numerics.one_process.measure import gradient_difference
from tests.ranks import on_ranks
from tests.two_sides import Run, WithOneProcess, close, loss_of, share

HOW: Final = long.parametrize("how", [Run.PLAIN, Run.SHARDED], always=[Run.SHARDED], ids=lambda how: how.value)
Gradients = tuple[torch.Tensor | None, ...]


class _Branches(Small):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(3, 3)


def _chosen(model: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if name.startswith("up.")]


def _losses(pair: WithOneProcess) -> tuple[torch.Tensor, torch.Tensor]:
    """Of this rank's share, and of the whole batch in one process."""
    batch = torch.randn(2 * dist.get_world_size(), 6, generator=torch.Generator().manual_seed(1))
    mine = batch.chunk(dist.get_world_size())[dist.get_rank()]
    return loss_of(pair.call(mine)), loss_of(pair.reference(batch))


@HOW
@on_ranks()
def test_gradients_are_returned_and_not_accumulated(how: Run) -> None:
    pair = WithOneProcess(_Branches, how)
    pair.call(torch.ones(2, 6))
    loss, expected = _losses(pair)
    mine: Gradients = torch.autograd.grad(loss, _chosen(pair.model), retain_graph=True)
    theirs: Gradients = torch.autograd.grad(expected, _chosen(pair.reference), retain_graph=True)
    for gradient, other in zip(mine, theirs, strict=True):
        assert isinstance(gradient, DTensor)
        close(gradient.full_tensor(), other, "gradient")
    for model, of in ((pair.model, loss), (pair.reference, expected)):
        unused = list(model.unused.parameters())  # type: ignore[union-attr, operator, unused-ignore]
        none: Gradients = torch.autograd.grad(of, unused, retain_graph=True, allow_unused=True)
        assert none == (None, None)
        with pytest.raises(RuntimeError, match="not have been used"):
            torch.autograd.grad(of, unused, retain_graph=True)
    assert not any(p.grad is not None for p in pair.model.parameters())


def _penalty(model: nn.Module) -> torch.Tensor:
    """Outside of the forward, as docs/limits.md says to write it."""
    penalty = torch.stack([p.square().sum() for p in model.parameters()]).sum()
    return penalty.full_tensor() if isinstance(penalty, DTensor) else penalty


@HOW
@on_ranks()
def test_a_penalty_outside_of_the_forward_counts(how: Run) -> None:
    pair = WithOneProcess(_Branches, how)
    pair.call(torch.ones(2, 6))
    for with_loss in (True, False):
        found: list[Gradients] = []
        for model, loss in zip(pair, _losses(pair), strict=True):
            total = _penalty(model) + (loss if with_loss else 0)
            asked = [*_chosen(model), *model.unused.parameters()]  # type: ignore[union-attr, operator, unused-ignore]
            found.append(torch.autograd.grad(total, asked, retain_graph=True))
            total.backward(inputs=asked)
        for mine, theirs in zip(*found, strict=True):
            assert isinstance(mine, DTensor)
            close(mine.full_tensor(), theirs, "gradient")
        pair.compare()


KINDS = ("register_hook", "register_post_accumulate_grad_hook")


def _batch() -> torch.Tensor:
    """The same on all ranks."""
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(1))


def _backward(called: Any) -> None:
    loss_of(called(_batch())).backward()


@pytest.mark.parametrize("kind", KINDS)
@on_ranks()
def test_hooks_are_called_and_removed_as_in_one_process(kind: str) -> None:
    pair = WithOneProcess(Small, Run.SHARDED)
    counts: list[list[str]] = []
    for model, each in pair.called():
        called: list[str] = []
        counts.append(called)
        handles: list[RemovableHandle] = []

        def hook(name: str, called: list[str] = called, handles: list[RemovableHandle] = handles) -> Any:
            def noted(_: torch.Tensor) -> None:
                called.append(name)
                for handle in handles if name == "once" else ():
                    handle.remove()

            return noted

        register = getattr(model.get_parameter("up.weight"), kind)
        handles += [register(hook("once")), register(hook("removed"))]
        register(hook("always"))
        for _ in range(2):
            _backward(each)
    assert counts[0] == counts[1] == ["once", "removed", "always", "always"]
    pair.compare()


@pytest.mark.parametrize("how", [Run.SHARDED, Run.PLAIN])
@on_ranks()
def test_hooks_change_chosen_gradients(how: Run) -> None:
    pair = WithOneProcess(Small, how)
    pair.backward()
    found = []
    for model, called in pair.called():
        weight = model.get_parameter("up.weight")
        weight.register_hook(lambda g: g * 3)
        weight.register_hook(lambda _: None)
        found.append(torch.autograd.grad(loss_of(called(_batch())), [weight, model.get_parameter("up.bias")]))
    for mine, theirs in zip(*found, strict=True):
        assert isinstance(mine, DTensor)
        close(mine.full_tensor(), theirs, "gradient")


@pytest.mark.long
@pytest.mark.parametrize("how", [Run.SHARDED, Run.PLAIN])
@on_ranks()
def test_a_hook_beside_a_penalty_outside_of_the_forward_is_called_once(how: Run) -> None:
    """With the sum of both parts of the gradient."""
    for kind in KINDS:
        pair = WithOneProcess(Small, how)
        pair.backward()
        counts = []
        for model, each in pair.called():
            called: list[str] = []
            counts.append(called)

            def hook(*_: Any, called: list[str] = called) -> None:
                called.append("called")

            getattr(model.get_parameter("up.weight"), kind)(hook)
            squares = [p.square().sum() for p in model.parameters()]
            penalty = torch.stack([s.full_tensor() if isinstance(s, DTensor) else s for s in squares]).sum()
            (loss_of(each(_batch())) + penalty).backward()
        assert counts[0] == counts[1] == ["called"]
        pair.compare()


@pytest.mark.long
@on_ranks()
def test_a_hook_of_a_parameter_that_was_frozen_since() -> None:
    """What waits from before the freeze is reduced in the next backward, as one process has it."""
    for kind in KINDS:
        pair = WithOneProcess(Small, Run.SHARDED)
        counts = []
        for model, each in pair.called():
            called: list[str] = []
            counts.append(called)
            weight = model.get_parameter("up.weight")
            getattr(weight, kind)(lambda *_, called=called: called.append("called"))
            waits = no_sync if model is pair.model else contextlib.nullcontext
            with waits(model):
                first = loss_of(each(_batch()))
            second = loss_of(each(_batch() + 1))
            with waits(model):
                first.backward()
            weight.requires_grad = False
            second.backward()
        pair.compare()
        # Autograd calls the hooks of the frozen one once more, with a gradient that it drops.
        assert counts[0] == counts[1] == ["called", "called"]


@pytest.mark.long
@on_ranks()
def test_a_gradient_times_a_whole_mask() -> None:
    """As the error says for hooks that were registered before a plain model was sharded."""
    pair = WithOneProcess(Small, Run.SHARDED)
    mask = (torch.arange(7) % 2).unsqueeze(1)

    def masked(g: torch.Tensor) -> torch.Tensor:
        return g * (distribute_tensor(mask, g.device_mesh, g.placements) if isinstance(g, DTensor) else mask)

    pair.change(lambda model: model.get_parameter("up.weight").register_hook(masked))
    pair.train(steps=1)


@HOW
@on_ranks()
def test_a_hook_for_the_first_gradient_is_called_once_in_each_backward(how: Run) -> None:
    pair = WithOneProcess(Small, how)
    pair.backward()
    called: dict[int, int] = {}
    for model in pair:

        def count(_: torch.Tensor, key: int = id(model)) -> None:
            called[key] = called.get(key, 0) + 1

        register_multi_grad_hook(list(model.parameters()), count, mode="any")
        model.zero_grad()
    for _ in range(2):
        pair.backward()
    assert called == dict.fromkeys(map(id, pair), 2)


Model = Callable[[torch.Tensor], torch.Tensor]


def _input() -> torch.Tensor:
    return torch.linspace(-1, 1, 12).reshape(2, 6)


def _batched(model: Model) -> torch.Tensor:
    x = _input().requires_grad_()
    output = model(x)
    several = torch.eye(output.numel()).reshape(-1, *output.shape)
    return torch.autograd.grad(output, x, several, is_grads_batched=True)[0]


@pytest.mark.long
@on_ranks()
def test_batches_of_gradients_are_refused_where_backward_updates() -> None:
    pair = WithOneProcess(Small, Run.SHARDED)
    step_in_backward(torch.optim.SGD(pair.model.parameters(), lr=0.1))
    with pytest.raises(UnsupportedModelError, match=r"(?s)collectives take one.*step_in_backward.*jacrev"):
        _batched(pair.call)
    for mine, theirs in zip(pair.model.parameters(), pair.reference.parameters(), strict=True):
        # What FSDP2 cannot split stays whole.
        assert torch.equal(mine.full_tensor() if isinstance(mine, DTensor) else mine, theirs)


@long.parametrize(
    ("param_dtype", "bound"), [(None, 1e-5), (torch.bfloat16, 1e-1)], always=[(None, 1e-5)], ids=["stored", "cast"]
)
@on_ranks()
def test_gradient_of_the_input(param_dtype: torch.dtype | None, bound: float) -> None:
    shard = functools.partial(fully_shard, mp_policy=MixedPrecisionPolicy(param_dtype))
    pair = WithOneProcess(Small, shard=shard, rows=4)
    mine, theirs = (batch.clone().requires_grad_() for batch in pair.next_batch())
    loss_of(pair.call(mine)).backward()
    loss_of(pair.reference(theirs)).backward()
    assert mine.grad is not None
    assert theirs.grad is not None
    difference = (mine.grad / dist.get_world_size() - share(theirs.grad)).abs().max()
    assert difference / theirs.grad.abs().max() < bound


class _Squares(Slim):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = super().forward(x).square().mean()
        return loss * (1 + self.penalty())

    def penalty(self) -> torch.Tensor:
        return torch.stack([p.square().sum() for p in self.parameters()]).sum()


class _Undifferentiated(_Squares):
    """A factor, to autograd."""

    def penalty(self) -> torch.Tensor:
        with torch.no_grad():
            return super().penalty()


class _Norm(_Squares):
    """Of everything at once: its gradient uses one intermediate value of parameters alone twice."""

    def penalty(self) -> torch.Tensor:
        return torch.cat([p.flatten() for p in self.parameters()]).norm()


class _Children(_Squares):
    def penalty(self) -> torch.Tensor:
        return sum((p.abs().sum() for n, p in self.blocks.named_parameters() if "weight" in n), torch.zeros(()))


@pytest.mark.core
@long.parametrize("make", [_Squares, _Undifferentiated, _Norm, _Children], always=[_Norm])
@on_ranks()
def test_a_penalty_over_parameters_is_one_of_full_parameters(make: Callable[[], nn.Module]) -> None:
    pair = WithOneProcess(make, shape=32, rows=4, twice=False)
    batch = pair.batch(1)
    pair.call(share(batch)).backward()
    pair.reference(batch).backward()
    assert gradient_difference(*pair) < 1e-5
    with torch.no_grad():
        close(pair.call(batch), pair.reference(batch), "loss in inference", (1e-6, 0.0))
