"""Graphs of every kind run under the model of streams without a complaint, and broken ones are caught by name."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx, nn

from fsdp_compile import MixedPrecision, fully_shard, no_sync, step_in_backward
from fsdp_compile.lower import eager
from fsdp_compile.lower.compiled_step import Compiled
from fsdp_compile.ops.host_copy import WAIT_COPY
from tests import long
from tests.delayed_copies import ON_SUCH_A_HOST, host_apart
from tests.models.kinds import WIDTH, Slim
from tests.numerics.one_process.strategies import STRATEGIES
from tests.ranks import on_ranks
from tests.streams.model import StreamError, StreamInterpreter, StreamModel
from tests.two_sides import compile_eagerly, loss_of

_C10D = torch.ops._c10d_functional
_GATHER = _C10D.all_gather_into_tensor_coalesced.default
_REDUCE = _C10D.reduce_scatter_tensor_coalesced.default
Edit = Callable[[fx.Graph], None]


def _nothing(graph: fx.Graph) -> None:
    """Leaves a graph as it is."""


@contextlib.contextmanager
def _under_the_model(edit: Edit) -> Iterator[StreamModel]:
    """Graphs that are compiled inside of it are edited, and run under one model of streams."""
    model, real = StreamModel(), eager.boxed

    def boxed(interpreter: fx.Interpreter) -> Compiled:
        gm = interpreter.module
        assert isinstance(gm, fx.GraphModule)
        edit(gm.graph)
        gm.recompile()
        return real(StreamInterpreter(gm, model))

    with mock.patch.object(eager, "boxed", boxed), host_apart():
        yield model
        model.finish()


def _train(arguments: dict[str, Any], options: dict[str, Any], edit: Edit, *, in_backward: bool = False) -> list[str]:
    """Two steps of two backwards, of which the first does not reduce; names of what ran on other streams."""
    torch._dynamo.reset()
    model: nn.Module = Slim()
    fully_shard(model, **arguments)
    optimizer = torch.optim.AdamW(model.parameters())
    if in_backward:
        optimizer = step_in_backward(optimizer)
    with _under_the_model(edit) as streams:
        compiled = compile_eagerly(model, **options)
        for _ in range(2):
            with contextlib.nullcontext() if in_backward else no_sync(model):
                loss_of(compiled(torch.randn(4, WIDTH))).backward()
            loss_of(compiled(torch.randn(4, WIDTH))).backward()
            optimizer.step()
            optimizer.zero_grad()
    return streams.started


_CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "offloaded, kept by neighbours": ("integer", {"offload_policy": ON_SUCH_A_HOST}, {}),
    "offloaded replicas in bfloat16": (
        "hybrid-zero2",
        {"offload_policy": ON_SUCH_A_HOST, "mp_policy": MixedPrecision(param_dtype=torch.bfloat16)},
        {"prefetch": "BACKWARD_PRE"},
    ),
    "replicas alone, two buckets ahead": ("no-shard", {}, {"prefetch": 2}),
    "FSDP2's messages": ("hybrid", {"offload_policy": ON_SUCH_A_HOST}, {"prefetch": 0, "reduce_layout": "fsdp2"}),
    "8-bit gathers": ("full", {"mp_policy": MixedPrecision(gather_dtype=torch.int8)}, {"prefetch": 1}),
    "kept for backward": ("grad-op", {}, {}),
}
"""Strategy, other arguments of `fully_shard`, and options."""


@long.parametrize("name", _CASES, always=["offloaded, kept by neighbours"])
@on_ranks(world_size=4)
def test_no_stream_uses_what_another_may_use(name: str) -> None:
    strategy, arguments, options = _CASES[name]
    started = _train({**STRATEGIES[strategy](), **arguments}, options, _nothing)
    assert any("reduce" in one for one in started), started
    assert any("start_copy" in one for one in started) == ("offload_policy" in _CASES[name][1])


@pytest.mark.long
@on_ranks()
def test_no_stream_uses_what_an_update_in_backward_may_write() -> None:
    started = _train({}, {}, _nothing, in_backward=True)
    assert any("reduce_scatter" in one for one in started), started


def _without_waits(target: Any) -> Edit:
    def edit(graph: fx.Graph) -> None:
        for wait in graph.find_nodes(op="call_function", target=_C10D.wait_tensor.default):
            started = wait.args[0].args[0] if wait.args[0].target is not target else wait.args[0]
            if started.target is target:
                wait.replace_all_uses_with(wait.args[0])
                graph.erase_node(wait)

    return edit


def _write_to_a_gradient_that_is_reduced(graph: fx.Graph) -> None:
    for start in graph.find_nodes(op="call_function", target=_REDUCE)[:1]:
        with graph.inserting_after(start):
            graph.call_function(torch.ops.aten.zero_.default, (start.args[0][0],))


def _reduce_before_the_gradient_is_there(graph: fx.Graph) -> None:
    for start in graph.find_nodes(op="call_function", target=_REDUCE)[:1]:
        gradients = start.args[0]
        with graph.inserting_before(start):
            empty = graph.call_function(torch.ops.aten.empty_like.default, (gradients[0],))
        start.update_arg(0, [empty, *gradients[1:]])
        with graph.inserting_after(start):
            graph.call_function(torch.ops.aten.copy_.default, (empty, gradients[0]))


def _write_over_what_is_gathered(graph: fx.Graph) -> None:
    for start in graph.find_nodes(op="call_function", target=_GATHER)[:1]:
        with graph.inserting_after(next(iter(start.users))):
            graph.call_function(torch.ops.aten.zero_.default, (next(iter(start.users)),))


def _free_what_is_copied(graph: fx.Graph) -> None:
    for wait in graph.find_nodes(op="call_function", target=WAIT_COPY):
        wait.args = wait.args[:1]


_BROKEN: dict[str, tuple[Edit, str]] = {
    "a gather's wait is missing": (_without_waits(_GATHER), "reads bytes .* while .*all_gather.* writes"),
    "a reduction's wait is missing": (_without_waits(_REDUCE), "while .*reduce_scatter.* writes|nobody waits"),
    "a gradient is overwritten while it is reduced": (
        _write_to_a_gradient_that_is_reduced,
        "zero_.* writes bytes .* while .*reduce_scatter.* reads",
    ),
    "a reduction starts too early": (_reduce_before_the_gradient_is_there, "reduce_scatter.* nothing was written to"),
    "a gathered message is overwritten": (
        _write_over_what_is_gathered,
        "zero_.* writes bytes .* while .*all_gather.* writes",
    ),
    "a copied gradient is freed": (
        _free_what_is_copied,
        "source of fsdp_compile.start_copy.* is freed .* while it is in use",
    ),
}


@pytest.mark.long
@on_ranks()
def test_every_wrong_order_is_named() -> None:
    said = {}
    for name, (edit, _) in _BROKEN.items():
        arguments = {"offload_policy": ON_SUCH_A_HOST} if "copied" in name else {}
        try:
            _train(arguments, {"prefetch": 1}, edit)
        except StreamError as error:
            said[name] = str(error)
    for name, (_, words) in _BROKEN.items():
        assert re.search(words, said.get(name, "")), (name, said)
