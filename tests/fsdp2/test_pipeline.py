"""Collectives that run between the graphs of blocks, and what may change from one step to the next."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
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
from fsdp_compile.fsdp2.take_over import model_of
from fsdp_compile.ir.graph import StepGraph
from fsdp_compile.lower import graph_ends, region
from fsdp_compile.lower.compiled_step import CompiledStep
from fsdp_compile.ops.effects import erase_markers
from tests.fsdp2.blocks import Deep, by_blocks, pipeline_of
from tests.fsdp2.decoder import WIDTH, batch, cross_entropy, pair_of, shard
from tests.passes.test_offload import BACKWARD, transformed
from tests.ranks import on_ranks, run_ranks
from tests.two_sides import REDUCED_TWICE, WithFsdp2, local

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


# What runs while blocks compute.


def _overlap(prefetch: Any) -> dict[str, list[int]]:
    pair = by_blocks(pair_of(Deep), prefetch=prefetch)
    pair.train(steps=2)
    events = _events(lambda: cross_entropy(pair.call, batch(0)).backward())
    return {
        "gathers": _matmuls_between(events, "all_gather", "all_gather_copy_out", "blocks.2"),
        "reductions": _matmuls_between(events, "post_backward_reduce", "post_backward_rs_wait", "blocks.2"),
    }


def test_collectives_run_while_other_blocks_compute() -> None:
    for found in run_ranks(_overlap, "auto"):
        forward, backward = found["gathers"]
        assert forward >= 2  # of block 1
        assert backward >= 4  # of block 3
        assert max(found["reductions"]) >= 4  # of block 1


def test_nothing_runs_ahead_at_distance_zero() -> None:
    assert all(not any(found["gathers"]) for found in run_ranks(_overlap, 0))


def _listed() -> dict[str, list[int]]:
    """Matmuls between the start of each block's gather and the wait for it, in forward and in backward."""
    pair = by_blocks(pair_of(Deep), prefetch=0)
    for model in pair:
        model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1], model.blocks[2]])
        model.blocks[3].set_modules_to_backward_prefetch([model.blocks[2], model.blocks[0]])
    pair.train(steps=3)
    events = _events(lambda: cross_entropy(pair.call, batch(0)).backward())
    units = [f"blocks.{number}" for number in range(4)]
    return {unit: _matmuls_between(events, "all_gather", "all_gather_copy_out", unit) for unit in units}


def test_what_lists_name_runs_ahead_until_it_is_used() -> None:
    for found in run_ranks(_listed):
        assert all(len(counts) == 2 for counts in found.values())  # gathered once in each
        forward = [counts[0] for counts in found.values()]
        backward = [counts[1] for counts in found.values()]
        assert (forward[0], forward[3], backward[1], backward[3]) == (0, 0, 0, 0)
        assert forward[1] >= 2  # of block 0
        assert forward[2] >= forward[1] + 2  # and of block 1
        assert backward[2] >= 4  # of block 3
        assert backward[0] >= backward[2] + 8  # and of blocks 2 and 1


class _Repeated(Deep):
    """Each block runs twice in a row."""

    def call(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return block(block(x))


def _gathers_of_repeated() -> int:
    pair = by_blocks(pair_of(_Repeated))
    pair.train(steps=2, within=REDUCED_TWICE)
    events = _events(lambda: pair.call(batch(0)))
    return sum(name == "FSDP::all_gather (blocks.2)" for name in events)


def test_a_block_that_runs_twice_in_a_row_is_gathered_once() -> None:
    assert run_ranks(_gathers_of_repeated) == [1, 1]


class _NoBiases(Deep):
    """Whose backward reads all that forward reads."""

    def __init__(self) -> None:
        super().__init__()
        for module in self.modules():
            if hasattr(module, "bias"):
                module.register_parameter("bias", None)


def _gathers_of_each_unit() -> dict[str, int]:
    def ours(model: Any) -> None:
        fsdp_compile.fully_shard(model, reshard_after_forward="auto")

    pair = by_blocks(WithFsdp2(_NoBiases, shard, batch, cross_entropy, ours=ours))
    pair.train(steps=3)
    events = _events(lambda: cross_entropy(pair.call, batch(0)).backward())
    assert not pipeline_of(pair)._ahead
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
    return Counter(name.partition("(")[2][:-1] for name in events if name.startswith("FSDP::all_gather ("))


def test_what_is_used_last_stays_for_backward() -> None:
    for found in run_ranks(_gathers_of_each_unit):
        assert {name for name, count in found.items() if count == 1} >= {"blocks.3", "head"}
        assert found["blocks.0"] == found["blocks.1"] == 2


class _WideBlock(nn.Module):
    """Of weights that are large enough for messages of their own."""

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


def _waits_of_wide_blocks() -> tuple[list[str], list[str]]:
    def ours(model: Any) -> None:
        fsdp_compile.fully_shard(model, reshard_after_forward="auto")

    pair = by_blocks(WithFsdp2(_Wide, shard, batch, cross_entropy, ours=ours), hardware=SLOW)
    pair.train(steps=3)
    losses: list[torch.Tensor] = []
    forward = _events(lambda: losses.append(cross_entropy(pair.call, batch(0))))
    return forward, _events(losses[0].backward)


def test_a_block_waits_for_each_weight_where_it_needs_it() -> None:
    """Backward needs the weights in the other order, and finds those that have stayed all the same."""
    for forward, backward in run_ranks(_waits_of_wide_blocks):
        wait = "FSDP::all_gather_copy_out (blocks.1)"
        first, second = (number for number, name in enumerate(forward) if name == wait)
        assert "aten::mm" in forward[first:second]
        assert forward.count("FSDP::all_gather (blocks.1)") == backward.count("FSDP::all_gather (blocks.1)") == 2
        assert forward.count("FSDP::all_gather (blocks.3)") == 2
        assert "FSDP::all_gather (blocks.3)" not in backward


class _Short(_NoBiases):
    """The second block and the head stay for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = self.blocks[:2]


def _events_after_a_forward_alone() -> list[str]:
    def ours(model: Any) -> None:
        fsdp_compile.fully_shard(model, reshard_after_forward="auto")

    pair = by_blocks(WithFsdp2(_Short, shard, batch, cross_entropy, ours=ours))
    pair.train(steps=3)
    cross_entropy(pair.call, batch(0))  # nobody asks for its gradients
    return _events(lambda: cross_entropy(pair.call, batch(0)))


def test_what_has_stayed_for_no_backward_takes_no_memory_in_the_next_forward() -> None:
    for events in run_ranks(_events_after_a_forward_alone):
        # The messages of both blocks are more than the largest one.
        of_embedding = events.index("FSDP::all_gather_copy_out (embedding)")
        assert events.index("FSDP::all_gather (blocks.0)") < of_embedding < events.index("FSDP::all_gather (blocks.1)")


def _messages_that_are_not_returned() -> list[str]:
    found: list[str] = []
    starts = (collectives.reduce_scatter_tensor.default, collectives.reduce_scatter_tensor_coalesced.default)

    def noted(step: StepGraph) -> Tail | None:
        tail = graph_ends.take_tail(step)
        assert tail is not None
        sent = [node for node in step.graph.nodes if node.target in starts]
        assert sent
        given = step.output.all_input_nodes
        found.extend(message.name for node in sent for message in node.all_input_nodes if message not in given)
        return tail

    with mock.patch.object(region, "take_tail", noted):
        by_blocks(pair_of(Deep)).train(steps=1)
    return found


@pytest.mark.long
def test_memory_of_messages_is_not_used_again_while_they_are_sent() -> None:
    """Inductor takes memory that nothing in the graph reads any more for other results; the wait is outside."""
    assert run_ranks(_messages_that_are_not_returned) == [[], []]


# Where the order changes, or parameters do.


def _leaves_blocks_out() -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("fsdp_compile.progress")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        pair = by_blocks(pair_of(Deep))
        for left_out in (set(), {1}, {0, 2}, set(), {3}, {0, 1, 2, 3}, set()):
            for model in pair:
                model.left_out = left_out
            pair.train(steps=1)
        assert not pipeline_of(pair)._ahead
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    return [each for each in said if "another graph" in each]


def test_blocks_that_are_left_out() -> None:
    assert [len(each) for each in run_ranks(_leaves_blocks_out)] == [1, 1]


def _changes() -> None:
    pair = by_blocks(pair_of(Deep))
    pair.train(steps=2)
    with torch.no_grad():
        for model in pair:
            for parameter in model.parameters():
                parameter.mul_(1.5)
    pair.train(steps=1)
    for model in pair:
        model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
    pair.train(steps=1)


class _Writes(Deep):
    """Its root changes a block whose gather runs already."""

    writes = False

    def call(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if self.writes and block is self.blocks[2]:
            with torch.no_grad():
                for parameter in block.parameters():
                    parameter.mul_(1.25)
        return block(x)


def _changes_in_a_forward() -> None:
    pair = by_blocks(pair_of(_Writes))
    pair.train(steps=2)
    for model in pair:
        model.writes = True
    pair.train(steps=2)


def test_parameters_that_change_between_and_in_forwards() -> None:
    run_ranks(_changes)
    run_ranks(_changes_in_a_forward)


def _frozen_and_thawed() -> None:
    pair = by_blocks(pair_of(Deep))
    for is_trained in (False, True, False, True):
        for model in pair:
            model.blocks[1].requires_grad_(is_trained)
        pair.zero_grad()
        pair.optimizers.clear()
        pair.train(steps=1)


@pytest.mark.long
def test_blocks_that_are_frozen_and_thawed() -> None:
    run_ranks(_frozen_and_thawed)


class _Stop(Exception):  # noqa: N818
    pass


def _raises() -> None:
    pair = by_blocks(pair_of(Deep))
    pair.train(steps=2)

    def stop(*_: Any) -> None:
        raise _Stop

    for call, model in ((pair.call, pair.model),):
        hook = model.blocks[1].register_forward_hook(stop)
        with contextlib.suppress(_Stop):
            call(batch(0))
        hook.remove()
        loss = cross_entropy(call, batch(0))
        loss.register_hook(stop)
        with pytest.raises(_Stop):
            loss.backward()
    pair.model.zero_grad()
    pair.train(steps=2)


def _converted() -> list[int]:
    pair = by_blocks(pair_of(Deep))
    pair.train(steps=2)
    pair.zero_grad()
    taken = model_of(pair.model)
    assert taken is not None
    old = [weakref.ref(group.flat) for group in taken.groups]
    pair.model.double()
    with torch.no_grad():
        pair.call(batch(0))
    gc.collect()
    return [found.numel() for flat in old if (found := flat()) is not None]


@pytest.mark.long
def test_old_groups_of_a_converted_model_are_freed() -> None:
    assert run_ranks(_converted) == [[], []]


@pytest.mark.long
def test_steps_after_errors() -> None:
    run_ranks(_raises)


def _several_times() -> None:
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


@pytest.mark.long
def test_several_forwards_and_gradients_by_autograd() -> None:
    run_ranks(_several_times)


@contextlib.contextmanager
def _profiled() -> Iterator[Any]:
    with torch.profiler.profile() as profiler:
        yield profiler


def _ranges() -> set[str]:
    pair = by_blocks(pair_of(Deep))
    pair.train(steps=2)
    with _profiled() as profiler:
        pair.backward()
    return {event.name for event in profiler.events() if event.name.startswith("FSDP::") and "blocks.2" in event.name}


@pytest.mark.long
def test_ranges_of_the_profiler() -> None:
    names = {"FSDP::all_gather (blocks.2)", "FSDP::all_gather_copy_out (blocks.2)"}
    names |= {"FSDP::post_backward_reduce (blocks.2)", "FSDP::post_backward_rs_wait (blocks.2)"}
    assert all(names <= found for found in run_ranks(_ranges))


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
