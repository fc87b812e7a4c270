"""Blocks that are compiled one by one: FSDP2's bits, and collectives that run while other blocks compute."""

from __future__ import annotations

import contextlib
import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import fsdp_compile
from fsdp_compile._torch.distributed import collectives
from fsdp_compile.errors import ConfigError
from fsdp_compile.fsdp2.pipeline import Tail
from fsdp_compile.fsdp2.take_over import model_of
from fsdp_compile.ir.graph import StepGraph
from fsdp_compile.lower import graph_ends, region
from fsdp_compile.optim.step_in_backward import step_in_backward
from tests import long
from tests.fsdp2.decoder import Block, Decoder, Tied, batch, cross_entropy, gathered_by_hooks, pair_of, shard
from tests.ranks import run_ranks
from tests.two_sides import REDUCED_TWICE, WithFsdp2, compile_eagerly, compile_in_place, local, made

pytestmark = pytest.mark.core
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class _Deep(Decoder):
    """Of four blocks, of which some can be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.block() for _ in range(4)])
        self.left_out: set[int] = set()

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            x = x if number in self.left_out else self.call(block, x)
        return x

    def call(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return block(x)


class _Checkpointed(_Deep):
    def call(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, x, use_reentrant=False)


class _Reentrant(_Deep):
    """The backward of each block runs inside of the model's."""

    def call(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, x, use_reentrant=True)


def _by_blocks(pair: WithFsdp2, **options: Any) -> WithFsdp2:
    pair.compiled(fullgraph=False, regions="blocks", **options)
    return pair


def _pipeline(pair: WithFsdp2) -> Any:
    taken = model_of(pair.model)
    assert taken is not None
    return taken.pipeline


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


# Bits of FSDP2.

LAYOUTS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "fp32": (_Deep, {}),
    "bf16": (_Deep, {"mp_policy": BF16}),
    "kept": (_Deep, {"reshard_after_forward": False}),
    "checkpointed": (_Checkpointed, {"mp_policy": BF16}),
    "reentrant": (_Reentrant, {"mp_policy": BF16}),
    "tied": (Tied, {}),
    "host": (_Deep, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
}


def _trains(layout: str, mesh: tuple[int, ...], options: dict[str, Any]) -> None:
    make, settings = LAYOUTS[layout]
    names = ("replicate", "shard")[-len(mesh) :]
    of = {"mesh": init_device_mesh("cpu", mesh, mesh_dim_names=names), **settings}
    pair = _by_blocks(pair_of(make, **of), reduce_layout="fsdp2", **options)
    with gathered_by_hooks() as titles:
        pair.train(steps=2)
        pair.train(pair.call, pair.call, pair.call, steps=1)  # microbatches
    units = {unit.title for unit in _units(pair)}
    assert set(titles) == ({"(root)", "embedding+head"} if layout == "tied" else {"(root)"}) & units
    with torch.no_grad():
        mine, theirs = (call.eval()(batch(9)) for call in (pair.call, pair.other))
    assert torch.equal(mine, theirs)
    pair.change(lambda model: model.train())
    pair.train(steps=1)


def _units(pair: WithFsdp2) -> list[Any]:
    taken = model_of(pair.model)
    assert taken is not None
    return taken.units


@pytest.mark.parametrize("layout", LAYOUTS)
def test_numbers_are_those_of_fsdp2(layout: str) -> None:
    run_ranks(_trains, layout, (2,), {})


@long.parametrize("layout", ["fp32", "bf16", "checkpointed"], always=["bf16"])
def test_numbers_of_hybrid_sharding(layout: str) -> None:
    run_ranks(_trains, layout, (2, 2), {}, world_size=4)


def _trains_neighbours() -> None:
    _trains("fp32", (4,), {})
    pair = _by_blocks(pair_of(_Deep, reshard_after_forward=2))
    pair.train(steps=3)


@pytest.mark.long
def test_numbers_of_shards_over_neighbours() -> None:
    run_ranks(_trains_neighbours, world_size=4)


@long.parametrize("prefetch", [0, 1, 3, "BACKWARD_PRE", "BACKWARD_POST+forward_prefetch", "none"], always=[3])
def test_numbers_do_not_depend_on_the_distance(prefetch: Any) -> None:
    run_ranks(_trains, "fp32", (2,), {"prefetch": prefetch})


def _updates_in_backward() -> None:
    pair = _by_blocks(pair_of(_Deep))
    pair.optimize()
    mine, theirs = pair.optimizers[0]
    mine = step_in_backward(mine)
    for _ in range(3):
        pair.backward()
        for optimizer in (mine, theirs):
            optimizer.step()
            optimizer.zero_grad()
        pair.compare_parameters()


def test_numbers_of_updates_in_backward() -> None:
    run_ranks(_updates_in_backward)


# What runs while blocks compute.


def _overlap(prefetch: Any) -> dict[str, list[int]]:
    pair = _by_blocks(pair_of(_Deep), prefetch=prefetch)
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


class _Repeated(_Deep):
    """Each block runs twice in a row."""

    def call(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return block(block(x))


def _gathers_of_repeated() -> int:
    pair = _by_blocks(pair_of(_Repeated))
    pair.train(steps=2, within=REDUCED_TWICE)
    events = _events(lambda: pair.call(batch(0)))
    return sum(name == "FSDP::all_gather (blocks.2)" for name in events)


def test_a_block_that_runs_twice_in_a_row_is_gathered_once() -> None:
    assert run_ranks(_gathers_of_repeated) == [1, 1]


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
        _by_blocks(pair_of(_Deep)).train(steps=1)
    return found


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
        pair = _by_blocks(pair_of(_Deep))
        for left_out in (set(), {1}, {0, 2}, set(), {3}, {0, 1, 2, 3}, set()):
            for model in pair:
                model.left_out = left_out
            pair.train(steps=1)
        assert not _pipeline(pair)._ahead
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    return [each for each in said if "another graph" in each]


def test_blocks_that_are_left_out() -> None:
    assert [len(each) for each in run_ranks(_leaves_blocks_out)] == [1, 1]


def _changes() -> None:
    pair = _by_blocks(pair_of(_Deep))
    pair.train(steps=2)
    with torch.no_grad():
        for model in pair:
            for parameter in model.parameters():
                parameter.mul_(1.5)
    pair.train(steps=1)
    for model in pair:
        model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
    pair.train(steps=1)


class _Writes(_Deep):
    """Its root changes a block whose gather may run already."""

    writes = False

    def call(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if self.writes and block is self.blocks[1]:
            with torch.no_grad():
                for parameter in self.blocks[2].parameters():
                    parameter.mul_(1.25)
        return block(x)


def _changes_in_a_forward() -> None:
    pair = _by_blocks(pair_of(_Writes))
    pair.train(steps=2)
    for model in pair:
        model.writes = True
    pair.train(steps=2)


def test_parameters_that_change_between_and_in_forwards() -> None:
    run_ranks(_changes)
    run_ranks(_changes_in_a_forward)


class _Stop(Exception):  # noqa: N818
    pass


def _raises() -> None:
    pair = _by_blocks(pair_of(_Deep))
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
    pair = _by_blocks(pair_of(_Deep))
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


def test_old_groups_of_a_converted_model_are_freed() -> None:
    assert run_ranks(_converted) == [[], []]


def test_steps_after_errors() -> None:
    run_ranks(_raises)


def _several_times() -> None:
    """A block that is called twice, two forwards before one backward, and gradients of inputs alone."""
    pair = _by_blocks(pair_of(_Deep))
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


def test_several_forwards_and_gradients_by_autograd() -> None:
    run_ranks(_several_times)


# How blocks come to be compiled one by one.


def _loops(order: str) -> None:
    def ours(model: Any) -> None:
        if order == "compiled first":
            for block in model.blocks:
                compile_in_place(block)
        shard(model)
        if order == "sharded first":
            for block in model.blocks:
                compile_in_place(block)

    pair = WithFsdp2(_Deep, shard, batch, cross_entropy, ours=ours)
    with gathered_by_hooks() as titles:
        pair.train(steps=3)
    assert "blocks.2" not in titles[12:]
    assert _pipeline(pair)._forward.next


@pytest.mark.parametrize("order", ["compiled first", "sharded first"])
def test_loops_of_users_over_blocks(order: str) -> None:
    run_ranks(_loops, order)


def _counts() -> tuple[int, int]:
    counts = []
    for regions in ("blocks", "whole"):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        pair = pair_of(_Deep)
        pair.compiled(fullgraph=False, regions=regions)
        pair.train(steps=3)
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return counts[0], counts[1]


def test_like_blocks_share_one_graph() -> None:
    """One for the embedding, one for blocks, one for the head."""
    assert run_ranks(_counts) == [(3, 1)] * 2


def _plain() -> None:
    model = Decoder()
    call = compile_eagerly(model, regions="blocks", mp_policy=BF16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        loss = cross_entropy(call, batch(0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    taken = model_of(model)
    assert taken is not None
    assert {region.number for unit in taken.units for region in unit.compiled_regions.values()} == {0, 1, 2}


def test_a_plain_model() -> None:
    run_ranks(_plain)


def _refused() -> list[str]:
    said = []

    def attempt(call: Callable[[], object]) -> None:
        with pytest.raises((ConfigError, torch._dynamo.exc.BackendCompilerFailed)) as caught:
            call()
        said.append(str(caught.value))

    sharded = Decoder()
    shard(sharded)
    function = compile_eagerly(lambda tokens: sharded(tokens).square(), regions="blocks")
    attempt(lambda: function(batch(0)))
    alone = Block()
    fully_shard(alone)
    attempt(lambda: compile_eagerly(alone, regions="blocks")(torch.randn(2, 16)))
    attempt(lambda: compile_eagerly(Decoder(), regions="blocks", memory_budget_gb=1.0)(batch(0)))
    attempt(lambda: compile_eagerly(Decoder(), regions="layers")(batch(0)))
    return said


def test_what_is_refused() -> None:
    for function, alone, budget, unknown in run_ranks(_refused):
        assert "blocks are compiled one by one by torch.compile(model)" in function
        assert "no unit below its root" in alone
        assert "is a part of its model" in budget
        assert "regions" in unknown


@contextlib.contextmanager
def _profiled() -> Iterator[Any]:
    with torch.profiler.profile() as profiler:
        yield profiler


def _ranges() -> set[str]:
    pair = _by_blocks(pair_of(_Deep))
    pair.train(steps=2)
    with _profiled() as profiler:
        pair.backward()
    return {event.name for event in profiler.events() if event.name.startswith("FSDP::") and "blocks.2" in event.name}


def test_ranges_of_the_profiler() -> None:
    names = {"FSDP::all_gather (blocks.2)", "FSDP::all_gather_copy_out (blocks.2)"}
    names |= {"FSDP::post_backward_reduce (blocks.2)", "FSDP::post_backward_rs_wait (blocks.2)"}
    assert all(names <= found for found in run_ranks(_ranges))


class _Wide(nn.Module):
    """Of weights that are large enough for messages of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(128, 128) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def _quantized() -> None:
    """In 8 bits, numbers are those of the whole graph."""
    sides = []
    for regions in ("blocks", "whole"):
        torch._dynamo.reset()
        model = made(_Wide)
        policy = fsdp_compile.MixedPrecision(gather_dtype=torch.int8)
        for module in (*model.blocks, model):
            fsdp_compile.fully_shard(module, mp_policy=policy)
        call = compile_eagerly(model, regions=regions)
        for step in range(3):
            model.zero_grad()
            call(torch.randn(4, 128, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        taken = model_of(model)
        assert taken is not None
        assert {p.spec.gather_format for group in taken.groups for p in group.params} == {"", "int8"}
        sides.append([parameter.grad.to_local() for parameter in model.parameters()])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*sides, strict=True))


def test_gathers_in_8_bits() -> None:
    run_ranks(_quantized)
