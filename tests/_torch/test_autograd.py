"""What backward passes are asked for can be replaced, and hooks of users move."""

from __future__ import annotations

import torch

from fsdp_compile._torch.autograd import share_hooks

KEEP, USED = True, False


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
