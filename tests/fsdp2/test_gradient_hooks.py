"""Users' gradient hooks as in one process: removed, beside penalties and in `autograd.grad()`."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.hooks import RemovableHandle

from fsdp_compile import no_sync
from tests.models.outlines import Small
from tests.ranks import on_ranks, run_ranks
from tests.two_sides import Run, WithOneProcess, close, loss_of

KINDS = ("register_hook", "register_post_accumulate_grad_hook")


def _batch() -> torch.Tensor:
    """The same on all ranks."""
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(1))


def _backward(called: Any) -> None:
    loss_of(called(_batch())).backward()


def _removed_by_itself(kind: str) -> None:
    pair = WithOneProcess(Small, Run.SHARDED)
    counts: list[list[str]] = []
    for model, each in pair.called():
        called: list[str] = []
        counts.append(called)
        handles: list[RemovableHandle] = []

        def once(_: torch.Tensor, called: list[str] = called, handles: list[RemovableHandle] = handles) -> None:
            called.append("once")
            for handle in handles:
                handle.remove()

        def removed(_: torch.Tensor, called: list[str] = called) -> None:
            called.append("removed")

        def always(_: torch.Tensor, called: list[str] = called) -> None:
            called.append("always")

        register = getattr(model.get_parameter("up.weight"), kind)
        handles += [register(once), register(removed)]
        register(always)
        for _ in range(2):
            _backward(each)
    assert counts[0] == counts[1] == ["once", "removed", "always", "always"]
    pair.compare()


def _in_chosen_gradients(how: Run) -> None:
    pair = WithOneProcess(Small, how)
    pair.backward()
    found = []
    for model, called in pair.called():
        model.get_parameter("up.weight").register_hook(lambda g: g * 3)
        model.get_parameter("up.weight").register_hook(lambda _: None)
        asked = [model.get_parameter("up.weight"), model.get_parameter("up.bias")]
        found.append(torch.autograd.grad(loss_of(called(_batch())), asked))
    for mine, theirs in zip(*found, strict=True):
        assert isinstance(mine, DTensor)
        close(mine.full_tensor(), theirs, "gradient")


def _penalized_loss(call: Any, model: Any) -> torch.Tensor:
    squares: list[Any] = [p.square().sum() for p in model.parameters()]
    penalty = torch.stack([s.full_tensor() if isinstance(s, DTensor) else s for s in squares]).sum()
    return loss_of(call(_batch())) + penalty


def _beside_a_penalty(how: Run) -> None:
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
            _penalized_loss(each, model).backward()
        assert counts[0] == counts[1] == ["called"]
        pair.compare()


def test_a_hook_beside_a_penalty_outside_of_the_forward_is_called_once() -> None:
    """With the sum of both parts of the gradient."""
    for how in (Run.SHARDED, Run.PLAIN):
        run_ranks(_beside_a_penalty, how)


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


@on_ranks()
def test_a_gradient_times_a_whole_mask() -> None:
    """As the error says for hooks that were registered before a plain model was sharded."""
    pair = WithOneProcess(Small, Run.SHARDED)
    mask = (torch.arange(7) % 2).unsqueeze(1)

    def masked(g: torch.Tensor) -> torch.Tensor:
        return g * (distribute_tensor(mask, g.device_mesh, g.placements) if isinstance(g, DTensor) else mask)

    pair.change(lambda model: model.get_parameter("up.weight").register_hook(masked))
    pair.train(steps=1)


@on_ranks()
def test_hooks_are_called_and_removed_as_in_one_process() -> None:
    for how in (Run.SHARDED, Run.PLAIN):
        _in_chosen_gradients(how)
    for kind in KINDS:
        _removed_by_itself(kind)
