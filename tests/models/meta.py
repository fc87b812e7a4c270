"""Models without values, and the values that they are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.two_sides import whole


def on_meta(make: Callable[[], nn.Module]) -> Any:
    with torch.device("meta"):
        return make()


def full_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer, non-persistent ones too, in full."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: whole(tensor).detach() for name, tensor in named}


def assert_equal(model: nn.Module, reference: nn.Module) -> None:
    """The same values under the same names, all on the CPU."""
    mine, theirs = full_state(model), full_state(reference)
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        assert mine[name].device.type == "cpu", name
        assert torch.equal(mine[name], value), name
