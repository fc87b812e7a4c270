"""What backward passes are asked for can be replaced, and hooks of users move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from fsdp_compile._torch.autograd import HookOfPlain, RunBackward, move_hooks, replace_inputs_of_backwards, share_hooks


class _Doubled:
    def run(
        self, backward: RunBackward, grads_of_outputs: Sequence[object], *, accumulates: bool, allows_unused: bool
    ) -> tuple[torch.Tensor | None, ...]:
        assert (grads_of_outputs, accumulates, allows_unused) == (["gradient"], False, False)
        return backward(("other",))


KEEP, USED = True, False


def test_inputs_of_a_backward_are_replaced_where_something_takes_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []

    def run(*args: object, **kwargs: object) -> int:
        given.append((args, kwargs))
        return 3

    monkeypatch.setattr(torch.autograd, "_engine_run_backward", run)
    replace_inputs_of_backwards(lambda inputs: _Doubled() if inputs == ["wanted"] else None)
    followed: Any = torch.autograd._engine_run_backward
    assert followed((1,), ["gradient"], KEEP, ["wanted"], USED, accumulate_grad=False) == 3
    assert followed((1,), ["gradient"], [2], accumulate_grad=True) == 3
    assert given == [
        (((1,), ["gradient"], True, ("other",), True), {"accumulate_grad": False}),
        (((1,), ["gradient"], [2]), {"accumulate_grad": True}),
    ]


class _OfPlain(HookOfPlain):
    def __call__(self, _parameter: torch.Tensor) -> None: ...


def test_hooks_of_users_move_and_those_of_plain_parameters_do_not() -> None:
    old, new = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    old.register_post_accumulate_grad_hook(_OfPlain())
    called: list[torch.Tensor] = []
    old.register_post_accumulate_grad_hook(called.append)
    move_hooks(old, new)
    new.sum().backward()
    old.sum().backward()
    assert [each is new for each in called] == [True]
    assert len(new._post_accumulate_grad_hooks) == 1


def test_shared_hooks_are_removed_by_their_handles_and_late_ones_by_both() -> None:
    old, new = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=False)
    handle = old.register_hook(lambda g: g * 2)
    share_hooks(old, new)
    new.requires_grad_()
    new.register_hook(lambda g: g * 5)
    for expected in (10, 5):
        for each in (old, new):
            (gradient,) = torch.autograd.grad(each.sum(), each)
            assert gradient.tolist() == [expected] * 2
        handle.remove()
