"""Users' gradient hooks as in one process: from before sharding, removed, in `full_params` and `autograd.grad()`."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from fsdp_compile import UnsupportedModelError, full_params, fully_shard, no_sync
from tests.beside import Beside, Run, close, compile_eagerly, loss_of
from tests.models.outlines import Small
from tests.ranks import run_ranks

KINDS = ("register_hook", "register_post_accumulate_grad_hook")


def _batch() -> torch.Tensor:
    """The same on all ranks."""
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(1))


def _backward(called: Any) -> None:
    loss_of(called(_batch())).backward()


def _removed_after_sharding(how: Run) -> None:
    pair = Beside(Small, Run.UNSHARDED)
    counts: list[list[str]] = []
    handles: list[RemovableHandle] = []
    for model in pair.both():
        called: list[str] = []
        counts.append(called)
        weight: Any = model.get_parameter("up.weight")
        handles.append(weight.register_hook(lambda g: g * 0))
        handles.append(weight.register_post_accumulate_grad_hook(lambda _, called=called: called.append("after")))
        frozen: Any = model.get_parameter("up.bias")
        handles.append(frozen.register_hook(lambda _, called=called: called.append("frozen")))
        frozen.requires_grad = False
    called_model: Any = fully_shard(pair.model) if how is Run.EAGER else compile_eagerly(pair.model)
    for step in range(3):
        for model, each in zip(pair.both(), (called_model, pair.reference), strict=True):
            if step == 1:
                model.get_parameter("up.bias").requires_grad = True
            model.zero_grad()
            _backward(each)
        pair.compare()
        if step == 1:
            for handle in handles:
                handle.remove()
    assert sorted(counts[0]) == sorted(counts[1]) == ["after", "after", "frozen"]


def _removed_by_itself(kind: str) -> None:
    pair = Beside(Small, Run.EAGER)
    counts: list[list[str]] = []
    for model in pair.both():
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
            _backward(model)
    assert counts[0] == counts[1] == ["once", "removed", "always", "always"]
    pair.compare()


def _in_full_params() -> None:
    pair = Beside(Small, Run.EAGER)
    handles = [model.get_parameter("up.weight").register_hook(lambda g: g * 3) for model in pair.both()]
    with full_params(pair.model, with_grads=True):
        handles += [model.get_parameter("up.bias").register_hook(lambda g: g * 5) for model in pair.both()]
        for model in pair.both():
            _backward(model)
    pair.compare()
    for model in pair.both():  # sharded again
        _backward(model)
    pair.compare()
    for handle in handles:
        handle.remove()
    for model in pair.both():
        _backward(model)
    pair.compare()


def _in_chosen_gradients(how: Run) -> None:
    pair = Beside(Small, how)
    pair.backward()
    found = []
    calls: tuple[Any, Any] = (pair.compiled, pair.reference)
    for model, called in zip(pair.both(), calls, strict=True):
        model.get_parameter("up.weight").register_hook(lambda g: g * 3)
        model.get_parameter("up.weight").register_hook(lambda _: None)
        asked = [model.get_parameter("up.weight"), model.get_parameter("up.bias")]
        found.append(torch.autograd.grad(loss_of(called(_batch())), asked))
    for mine, theirs in zip(*found, strict=True):
        assert isinstance(mine, DTensor)
        close(mine.full_tensor(), theirs, "gradient")
    weight = pair.model.get_parameter("up.weight")
    register_multi_grad_hook([weight], lambda _: None)
    with pytest.raises(UnsupportedModelError, match=r'mode="all"'):
        torch.autograd.grad(loss_of(pair.compiled(_batch())), [weight])


def _penalized_loss(pair: Beside) -> torch.Tensor:
    penalty: Any = torch.stack([p.square().sum() for p in pair.model.parameters()]).sum()
    return loss_of(pair.compiled(_batch())) + penalty.full_tensor()


def _beside_a_penalty(how: Run) -> None:
    for kind in KINDS:
        pair = Beside(Small, how)
        pair.backward()
        weight = pair.model.get_parameter("up.weight")
        handle = getattr(weight, kind)(lambda *_: None)
        loss_of(pair.compiled(_batch())).backward()
        for backward in (torch.Tensor.backward, lambda loss, weight=weight: loss.backward(inputs=[weight])):
            with pytest.raises(UnsupportedModelError, match=r"(?s)run twice.*up\.weight"):
                backward(_penalized_loss(pair))
        if kind == "register_hook":
            with pytest.raises(UnsupportedModelError, match=r"(?s)run twice.*up\.weight"):
                torch.autograd.grad(_penalized_loss(pair), [weight])
        handle.remove()
        _penalized_loss(pair).backward()


def test_a_hook_beside_a_penalty_outside_of_the_forward_is_refused() -> None:
    """It would run for either part of the gradient."""
    for how in (Run.EAGER, Run.PLAIN):
        run_ranks(_beside_a_penalty, how)


def _frozen_before_the_rest_is_reduced() -> None:
    """What waits from before the freeze is reduced in the next backward, as one process has it."""
    for kind in KINDS:
        pair = Beside(Small, Run.EAGER)
        counts = []
        calls: tuple[Any, Any] = (pair.compiled, pair.reference)
        for model, each in zip(pair.both(), calls, strict=True):
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
        # Autograd calls `register_hook`'s for the frozen one once more, with a gradient that it drops.
        assert counts[0] == ["called"]


def test_a_hook_of_a_parameter_that_was_frozen_since() -> None:
    run_ranks(_frozen_before_the_rest_is_reduced)


def _all() -> None:
    for how in (Run.EAGER, Run.PLAIN):
        _removed_after_sharding(how)
        _in_chosen_gradients(how)
    for kind in KINDS:
        _removed_by_itself(kind)
    _in_full_params()


def test_hooks_are_called_and_removed_as_in_one_process() -> None:
    run_ranks(_all)
