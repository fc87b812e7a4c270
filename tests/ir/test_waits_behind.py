"""A collective of the program's own reads its input until its wait: nothing writes there before."""

from __future__ import annotations

from operator import getitem

import pytest
import torch
from torch import fx

from fsdp_compile.ir.graph import Phase, StepGraph
from fsdp_compile.ir.queries import readers
from fsdp_compile.ops.effects import POISON, RESHARD
from fsdp_compile.passes.poison import poison_freed_messages
from tests.cost.graphs import Sketch

collectives = torch.ops._c10d_functional


def _sent(*, grouped: bool) -> tuple[StepGraph, fx.Node, fx.Node]:
    """A graph that frees an input while it is sent, the input, and the wait."""
    s = Sketch(Phase.BACKWARD)
    message = s.input("message", 4)
    seen = s.call(torch.ops.aten.view.default, message, [2, 2])
    if grouped:
        start = s.call(collectives.all_gather_into_tensor_coalesced.default, [seen], 2, "0")
        started = s.call(getitem, start, 0)
    else:
        started = s.call(collectives.all_gather_into_tensor.default, seen, 2, "0")
    s.call(RESHARD, [message])
    wait = s.call(collectives.wait_tensor.default, started)
    return s.done(s.call(torch.ops.aten.relu.default, wait)), message, wait


@pytest.mark.parametrize("grouped", [False, True])
def test_the_wait_is_a_reader(*, grouped: bool) -> None:
    _, message, wait = _sent(grouped=grouped)
    assert wait in readers([message])


@pytest.mark.parametrize("grouped", [False, True])
def test_messages_become_nan_behind_the_wait(*, grouped: bool) -> None:
    step, message, wait = _sent(grouped=grouped)
    poison_freed_messages(step)
    order = step.order()
    (poison,) = [node for node in message.users if node.target is POISON]
    assert order[poison] == order[wait] + 1
