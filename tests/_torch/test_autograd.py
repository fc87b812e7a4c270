"""Backward passes are followed whatever arguments a version of torch gives them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fsdp_compile._torch.autograd import HookOfPlain, before_each_backward, move_hooks


def test_no_position_of_an_argument_is_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []
    seen: list[object] = []

    def run(*args: object, **kwargs: object) -> int:
        given.append((args, kwargs))
        return 3

    monkeypatch.setattr(torch.autograd, "_engine_run_backward", run)
    before_each_backward(seen.append)
    followed: Any = torch.autograd._engine_run_backward
    assert followed((1,), wanted=[2], keep=True) == 3
    assert followed("outputs") == 3
    assert seen == [(1,), [2]]
    assert given == [(((1,),), {"wanted": [2], "keep": True}), (("outputs",), {})]


class _OfPlain(HookOfPlain):
    def __call__(self, _parameter: torch.Tensor) -> None: ...


def test_hooks_of_users_move_and_those_of_plain_parameters_do_not() -> None:
    old, new = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    old.register_post_accumulate_grad_hook(_OfPlain())
    called: list[torch.Tensor] = []
    old.register_post_accumulate_grad_hook(called.append)
    move_hooks(old, new)
    new.sum().backward()
    assert [each is new for each in called] == [True]
    assert len(new._post_accumulate_grad_hooks) == 1
