"""Collectives that run between the graphs of blocks, and what may change from one step to the next."""

from __future__ import annotations

import copy
import dataclasses
import gc
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import fsdp_compile
from fsdp_compile._torch.distributed import collectives
from fsdp_compile.cost.hardware import DEVICES, Hardware, Quantity, make_link
from fsdp_compile.fsdp2.pipeline import Tail
from fsdp_compile.ir.graph import StepGraph
from fsdp_compile.lower import graph_ends, region
from fsdp_compile.lower.compiled_step import CompiledStep
from fsdp_compile.ops.effects import erase_markers
from tests.fsdp2.decoder import WIDTH, Deep, batch, by_blocks, cross_entropy, pair_of, progress_lines, shard
from tests.passes.test_offload import BACKWARD, transformed
from tests.ranks import on_ranks
from tests.two_sides import REDUCED_TWICE, Averaging, WithFsdp2, local, taken_over

pytestmark = pytest.mark.core


def _events(step: Callable[[], object]) -> list[str]:
    """Matmuls, and FSDP's ranges, of what a step runs, in their order."""
    with torch.profiler.profile() as profiler:
        step()
    found = sorted((event.time_range.start, event.name) for event in profiler.events())
    named = [name.replace("addmm", "mm") for _, name in found]
    return [name for name in named if name == "aten::mm" or name.startswith("FSDP::")]


def _matmuls_between(events: list[str], start: str, end: str, unit: str) -> list[int]:
    """How many run between each start of a unit's collective and the wait for it."""
    counts, since = [], -1
    for number, name in enumerate(events):
        if name == f"FSDP::{start} ({unit})":
            since = number
        if name == f"FSDP::{end} ({unit})" and since >= 0:
            counts.append(events[since:number].count("aten::mm"))
            since = -1
    return counts


def _step_events(pair: WithFsdp2) -> list[str]:
    return _events(lambda: cross_entropy(pair.call, batch(0)).backward())


# What runs while blocks compute.


@on_ranks()
def test_collectives_run_while_other_blocks_compute() -> None:
    for prefetch in ("auto", 0):
        torch._dynamo.reset()
        pair = by_blocks(pair_of(Deep), prefetch=prefetch)
        pair.train(steps=2)
        events = _step_events(pair)
        forward, backward = _matmuls_between(events, "all_gather", "all_gather_copy_out", "blocks.2")
        if prefetch == 0:
            assert forward == backward == 0
            continue
        assert forward >= 2  # of block 1
        assert backward >= 4  # of block 3
        reductions = _matmuls_between(events, "post_backward_reduce", "post_backward_rs_wait", "blocks.2")
        assert max(reductions) >= 4  # of block 1


@on_ranks()
def test_what_lists_name_runs_ahead_until_it_is_used() -> None:
    pair = by_blocks(pair_of(Deep), prefetch=0)
    for model in pair:
        model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1], model.blocks[2]])
        model.blocks[3].set_modules_to_backward_prefetch([model.blocks[2], model.blocks[0]])
    pair.train(steps=3)
    events = _step_events(pair)
    found = [_matmuls_between(events, "all_gather", "all_gather_copy_out", f"blocks.{number}") for number in range(4)]
    forward, backward = zip(*found, strict=True)  # gathered once in each
    assert (forward[0], forward[3], backward[1], backward[3]) == (0, 0, 0, 0)
    assert forward[1] >= 2  # of block 0
    assert forward[2] >= forward[1] + 2  # and of block 1
    assert backward[2] >= 4  # of block 3
    assert backward[0] >= backward[2] + 8  # and of blocks 2 and 1


class _Repeated(Deep):
    def call(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return block(block(x))


@on_ranks()
def test_a_block_that_runs_twice_in_a_row_is_gathered_once() -> None:
    pair = by_blocks(pair_of(_Repeated))
    pair.train(steps=2, within=REDUCED_TWICE)
    assert _events(lambda: pair.call(batch(0))).count("FSDP::all_gather (blocks.2)") == 1


class _NoBiases(Deep):
    """Whose backward reads all that forward reads."""

    def __init__(self) -> None:
        super().__init__()
        for module in self.modules():
            if hasattr(module, "bias"):
                module.register_parameter("bias", None)


def _with_open_reshard(make: Callable[[], nn.Module], **options: Any) -> WithFsdp2:
    def ours(model: Any) -> None:
        fsdp_compile.fully_shard(model, reshard_after_forward="auto")

    pair = by_blocks(WithFsdp2(make, shard, batch, cross_entropy, ours=ours), **options)
    pair.train(steps=3)
    return pair


@on_ranks()
def test_what_is_used_last_stays_for_backward() -> None:
    pair = _with_open_reshard(_NoBiases)
    events = _step_events(pair)
    gathers = Counter(name.partition("(")[2][:-1] for name in events if name.startswith("FSDP::all_gather ("))
    assert {name for name, count in gathers.items() if count == 1} >= {"blocks.3", "head"}
    assert gathers["blocks.0"] == gathers["blocks.1"] == 2
    assert not taken_over(pair.model).pipeline._ahead
    pair.zero_grad()
    loss = cross_entropy(pair.call, batch(0))
    # Units that have stayed compute first: the next gather starts before the first of them is reduced.
    backward = _events(loss.backward)
    assert backward.index("FSDP::all_gather (blocks.2)") < backward.index("FSDP::post_backward_reduce (head)")
    pair.zero_grad()
    loss = cross_entropy(pair.call, batch(0))
    with torch.no_grad():  # what stays is of old values
        for parameter in pair.model.parameters():
            parameter.add_(1.0)
    assert "FSDP::all_gather (blocks.3)" in _events(loss.backward)


class _WideBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, 4096, bias=False)
        self.b = nn.Linear(4096, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(torch.relu(self.a(x)))


class _Wide(_NoBiases):
    block = _WideBlock


NONE = Quantity(0.0, "us", "a test")
SLOW = Hardware(DEVICES["cpu"], dataclasses.replace(make_link("slow", 1.0, "a test"), launch=NONE, hop=NONE))


@on_ranks()
def test_a_block_waits_for_each_weight_where_it_needs_it() -> None:
    """Backward needs the weights in the other order, and finds those that have stayed all the same."""
    pair = _with_open_reshard(_Wide, hardware=SLOW)
    losses: list[torch.Tensor] = []
    forward = _events(lambda: losses.append(cross_entropy(pair.call, batch(0))))
    backward = _events(losses[0].backward)
    wait = "FSDP::all_gather_copy_out (blocks.1)"
    first, second = (number for number, name in enumerate(forward) if name == wait)
    assert "aten::mm" in forward[first:second]
    assert forward.count("FSDP::all_gather (blocks.1)") == backward.count("FSDP::all_gather (blocks.1)") == 2
    assert forward.count("FSDP::all_gather (blocks.3)") == 2
    assert "FSDP::all_gather (blocks.3)" not in backward


@on_ranks()
def test_a_hook_of_the_user_gets_all_gradients_of_a_unit_at_once() -> None:
    pair, average = pair_of(_Wide), Averaging()
    fsdp_compile.register_comm_hook(pair.model, average)
    by_blocks(pair, hardware=SLOW).train(steps=1)
    numels = [numel for _, numel, _ in average.calls]
    assert numels.count(2 * 4096 * WIDTH) == 4  # blocks of two weights each
    assert 4096 * WIDTH not in numels


class _Short(_NoBiases):
    """The second block and the head stay for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = self.blocks[:2]


@on_ranks()
def test_what_has_stayed_for_no_backward_takes_no_memory_in_the_next_forward() -> None:
    pair = _with_open_reshard(_Short)
    cross_entropy(pair.call, batch(0))  # nobody asks for its gradients
    events = _events(lambda: cross_entropy(pair.call, batch(0)))
    # The messages of both blocks are more than the largest one.
    of_embedding = events.index("FSDP::all_gather_copy_out (embedding)")
    assert events.index("FSDP::all_gather (blocks.0)") < of_embedding < events.index("FSDP::all_gather (blocks.1)")


@pytest.mark.long
@on_ranks()
def test_memory_of_messages_is_not_used_again_while_they_are_sent() -> None:
    """Inductor takes memory that nothing in the graph reads any more for other results; the wait is outside."""
    not_returned: list[str] = []
    starts = (collectives.reduce_scatter_tensor.default, collectives.reduce_scatter_tensor_coalesced.default)

    def noted(step: StepGraph) -> Tail | None:
        tail = graph_ends.take_tail(step)
        assert tail is not None
        sent = [node for node in step.graph.nodes if node.target in starts]
        assert sent
        given = step.output.all_input_nodes
        not_returned.extend(message.name for node in sent for message in node.all_input_nodes if message not in given)
        return tail

    with mock.patch.object(region, "take_tail", noted):
        by_blocks(pair_of(Deep)).train(steps=1)
    assert not_returned == []


# Where the order changes, or parameters do.


@on_ranks()
def test_blocks_that_are_left_out() -> None:
    pair = by_blocks(pair_of(Deep))
    with progress_lines() as lines:
        for left_out in (set(), {1}, {0, 2}, set(), {3}, {0, 1, 2, 3}, set()):
            for model in pair:
                model.left_out = left_out
            pair.train(steps=1)
    assert not taken_over(pair.model).pipeline._ahead
    assert len([line for line in lines if "another graph" in line]) == 1


class _Writes(Deep):
    """Its root changes a block whose gather runs already."""

    writes = False

    def call(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if self.writes and block is self.blocks[2]:
            with torch.no_grad():
                for parameter in block.parameters():
                    parameter.mul_(1.25)
        return block(x)


@on_ranks()
def test_parameters_that_change_between_and_in_forwards() -> None:
    def scale(model: Any) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)

    pair = by_blocks(pair_of(_Writes))
    pair.train(steps=2)
    pair.change(scale)
    pair.train(steps=1)
    pair.change(lambda model: model.load_state_dict({name: 0.5 * v for name, v in model.state_dict().items()}))
    pair.train(steps=1)
    pair.change(lambda model: setattr(model, "writes", True))
    pair.train(steps=2)


@pytest.mark.long
@on_ranks()
def test_blocks_that_are_frozen_and_thawed() -> None:
    pair = by_blocks(pair_of(Deep))
    for is_trained in (False, True, False, True):
        for model in pair:
            model.blocks[1].requires_grad_(is_trained)
        pair.zero_grad()
        pair.optimizers.clear()
        pair.train(steps=1)


@pytest.mark.long
@on_ranks()
def test_old_groups_of_a_converted_model_are_freed() -> None:
    pair = by_blocks(pair_of(Deep))
    pair.train(steps=2)
    pair.zero_grad()
    old = [weakref.ref(group.flat) for group in taken_over(pair.model).groups]
    pair.model.double()
    with torch.no_grad():
        pair.call(batch(0))
    gc.collect()
    assert not any(flat() is not None for flat in old)


@pytest.mark.long
@on_ranks()
def test_steps_after_errors() -> None:
    pair = by_blocks(pair_of(Deep))
    pair.train(steps=2)

    def stop(*_: Any) -> None:
        raise ValueError("expected")

    with pair.model.blocks[1].register_forward_hook(stop), pytest.raises(ValueError, match="expected"):
        pair.call(batch(0))
    loss = cross_entropy(pair.call, batch(0))
    loss.register_hook(stop)
    with pytest.raises(ValueError, match="expected"):
        loss.backward()
    pair.model.zero_grad()
    pair.train(steps=2)


@pytest.mark.long
@on_ranks()
def test_several_forwards_and_gradients_by_autograd() -> None:
    """A block that is called twice, two forwards before one backward, and gradients of inputs alone."""
    pair = by_blocks(pair_of(Deep))
    pair.train(steps=2)

    def twice(call: Any, tokens: torch.Tensor) -> torch.Tensor:
        return cross_entropy(call, tokens) + 2 * cross_entropy(call, tokens.flip(0))

    pair.train(steps=2, loss=twice, within=REDUCED_TWICE)

    parameters = list(pair.model.blocks[1].parameters())
    found = torch.autograd.grad(cross_entropy(pair.call, batch(3)), parameters)
    assert all(parameter.grad is None for parameter in parameters)
    cross_entropy(pair.call, batch(3)).backward()
    for gradient, parameter in zip(found, parameters, strict=True):
        assert torch.equal(local(gradient), local(parameter.grad))
    pair.zero_grad()
    pair.train(steps=1, within=REDUCED_TWICE)


# What is not left to other graphs.


class _WithUnused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.unused = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)))


@pytest.mark.long
@on_ranks()
def test_a_graph_of_two_models_adds_the_gradients_of_both_forwards() -> None:
    torch.manual_seed(0)
    models = nn.ModuleList([_WithUnused(), _WithUnused()])
    reference = copy.deepcopy(models)
    for model in (*models, *reference):
        for module in (*model.children(), model):
            fully_shard(module)
    compiled = torch.compile(lambda x: models[1](models[0](x)).square().mean(), backend="fsdp")
    for step in range(2):
        x, y = torch.randn(2, 4, 16)
        (compiled(x) + compiled(y)).backward()
        sum(reference[1](reference[0](each)).square().mean() for each in (x, y)).backward()
        for (name, mine), theirs in zip(models.named_parameters(), reference.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None) == ("unused" in name), (step, name)
            if mine.grad is not None and theirs.grad is not None:
                torch.testing.assert_close(local(mine.grad), local(theirs.grad), msg=f"{name} in step {step}")


def test_copies_of_gradients_to_the_host_stay_in_their_graph_which_waits_for_them() -> None:
    step = transformed(BACKWARD)
    erase_markers(step.graph)
    assert graph_ends.take_tail(step) is None
    assert CompiledStep.of(step).host_copies_from == "cuda"
