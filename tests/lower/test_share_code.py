"""Graphs that are compiled in segments give the numbers of one process, and layers that are alike share their code."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fsdp_compile import ConfigError, fully_shard
from fsdp_compile._torch.distributed import collectives
from fsdp_compile.cost.fusion import WRITTEN
from fsdp_compile.lower import inductor, segments
from fsdp_compile.lower.segments import Segment, cut, graph_of, has_open_sizes, text_of
from fsdp_compile.lower.share_code import can_share_code, compile_segments
from tests import long
from tests.fake_world import fake_world
from tests.models.kinds import KINDS
from tests.models.round_sizes import Stack
from tests.numerics.one_process.measure import Differences, train_pair
from tests.numerics.one_process.test_model_kinds import assert_equal_training
from tests.ranks import run_ranks

OPTIONS: dict[str, Any] = {"share_code": True, "bucket_mb": 0}


def _two_layers(*, factor: float = 2.0, size: int = 4) -> fx.Graph:
    """Two like layers, each of which waits for a message; `factor` and `size` are those of the second one."""
    graph = fx.Graph()

    def typed(node: fx.Node, length: int) -> fx.Node:
        node.meta["val"] = torch.empty(length, device="meta")
        return node

    x = typed(graph.placeholder("x"), 4)
    for number, (times, length) in enumerate(((2.0, 4), (factor, size))):
        shard = typed(graph.placeholder(f"shard_{number}"), length // 2)
        gather = collectives.all_gather_into_tensor.default
        started = typed(graph.call_function(gather, (shard, 2, "fsdp.shard.0")), length)
        waited = typed(graph.call_function(collectives.wait_tensor.default, (started,)), length)
        product = typed(graph.call_function(torch.ops.aten.mul.Tensor, (x, times)), 4)
        x = typed(graph.call_function(torch.ops.aten.add.Tensor, (product, waited)), 4)
    graph.output((x,))
    return graph


def _segments(graph: fx.Graph) -> list[Segment]:
    return [part for part in cut(graph) if isinstance(part, Segment)]


def test_a_graph_is_cut_where_communication_starts_and_is_waited_for() -> None:
    parts = cut(_two_layers())
    kinds = ["segment" if isinstance(part, Segment) else part.name.removesuffix("_1") for part in parts]
    assert kinds == ["all_gather_into_tensor_default", "wait_tensor_default", "segment"] * 2
    first, second = _segments(_two_layers())
    assert [node.name for node in first.inputs] == ["x", "wait_tensor_default"]
    assert [node.name for node in second.inputs] == ["add_tensor", "wait_tensor_default_1"]
    assert [node.name for node in (*first.outputs, *second.outputs)] == ["add_tensor", "add_tensor_1"]


@pytest.mark.parametrize(("changes", "alike"), [({}, True), ({"factor": 3.0}, False), ({"size": 1}, False)])
def test_segments_are_alike_if_they_compute_the_same_from_the_same_types(changes: dict[str, Any], alike: bool) -> None:  # noqa: FBT001
    owner = fx.GraphModule({}, _two_layers(**changes))
    parts = _segments(owner.graph)
    first, second = (text_of(graph_of(each, owner), [node.meta["val"] for node in each.inputs]) for each in parts)
    assert (first == second) is alike


def test_a_value_that_is_to_be_written_to_memory_makes_a_segment_another_one() -> None:
    owner = fx.GraphModule({}, _two_layers())
    first, second = _segments(owner.graph)
    first.nodes[0].meta[WRITTEN] = True
    assert text_of(graph_of(first, owner), []) != text_of(graph_of(second, owner), [])


def test_views_alone_are_no_segment() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.ops.aten.view.default, (x, [4])),))
    assert [type(part) for part in cut(graph)] == [fx.Node]


def test_writes_are_no_part_of_a_segment() -> None:
    graph = fx.Graph()
    buffer, x = graph.placeholder("buffer"), graph.placeholder("x")
    mean = graph.call_function(torch.ops.aten.add.Tensor, (buffer, x))
    written = graph.call_function(torch.ops.aten.copy_.default, (buffer, mean))
    graph.output((mean,))
    segment, write = cut(graph)
    assert isinstance(segment, Segment)
    assert segment.nodes == (mean,)
    assert write is written


def test_open_sizes_are_seen() -> None:
    graph = _two_layers()
    assert not has_open_sizes(graph)
    assert can_share_code(graph)
    next(iter(graph.nodes)).meta["val"] = ShapeEnv().create_unbacked_symint()
    assert has_open_sizes(graph)
    assert not can_share_code(graph)


class _Watched:
    """Code of segments that notes which of its inputs it holds alone."""

    def __init__(self, segment: fx.GraphModule) -> None:
        self.segment = segment
        self.freed: list[bool] = []

    def __call__(self, args: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        result = self.segment(*args)
        watched = weakref.ref(args[0])
        args.clear()
        self.freed.append(watched() is None)
        return result


def test_a_value_is_dropped_before_its_last_reader_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = _two_layers()
    for node in graph.nodes:  # nothing to wait for, and no group
        if node.target is collectives.wait_tensor.default:
            node.target = torch.ops.aten.neg.default
        if node.target is collectives.all_gather_into_tensor.default:
            node.target, node.args = torch.ops.aten.repeat.default, (node.args[0], [2])
    apart = (torch.ops.aten.neg.default, torch.ops.aten.repeat.default)
    monkeypatch.setattr(segments, "_is_run_as_it_is", lambda node: node.target in apart)
    watched: list[_Watched] = []

    def compile_one(segment: fx.GraphModule, _: Sequence[Any]) -> _Watched:
        watched.append(_Watched(segment))
        return watched[-1]

    run = compile_segments(fx.GraphModule({}, graph), compile_one)
    args = [torch.ones(4), torch.ones(2), torch.ones(2)]
    (made,) = run(args)
    assert args == []
    assert made.tolist() == [1.0] * 4  # 2 * (2 * 1 - 1) - 1
    assert [each.freed for each in watched] == [[True, True]]


TRAINED = ("odd-shapes", "tied", "convolution", "frozen", "checkpointed", "repeated")


def _numbers(kind: str) -> Differences:
    return train_pair(KINDS[kind], options={"lower": "inductor", **OPTIONS})


@pytest.mark.inductor
@long.parametrize("kind", TRAINED, always=["odd-shapes", "checkpointed"])
def test_numbers_are_those_of_one_process(kind: str) -> None:
    assert_equal_training(run_ranks(_numbers, kind))


def _compiled_segments(depth: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many graphs Inductor is given for a step of a stack; they run as they are."""
    compiled = []

    def counted(gm: fx.GraphModule, *_: Any, **__: Any) -> Callable[[list[Any]], Any]:
        compiled.append(gm)
        return lambda args: gm(*args)

    torch._dynamo.reset()
    with fake_world(4), monkeypatch.context() as patched:
        patched.setattr(inductor, "compile_fx_inner", counted)
        model = Stack(depth)
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        torch.compile(model, backend="fsdp", options=OPTIONS)(torch.randn(2, 256)).sum().backward()
    return len(compiled)


def test_more_layers_compile_no_more_code(monkeypatch: pytest.MonkeyPatch) -> None:
    # Two are the whole graphs of forward and backward.
    assert 2 < _compiled_segments(7, monkeypatch) == _compiled_segments(9, monkeypatch) < 20


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"lower": "eager"}, "has no effect"),
        ({"memory_budget_gb": 1.0}, "budget counts on whole graphs"),
        ({"inductor": {"triton.cudagraphs": True}}, "CUDA graphs"),
    ],
)
def test_what_does_not_go_with_it_is_refused(options: dict[str, Any], says: str) -> None:
    with fake_world(2), pytest.raises(Exception, match=says) as caught:
        torch.compile(nn.Linear(4, 4), backend="fsdp", options={"share_code": True, **options})(torch.ones(2, 4))
    assert isinstance(getattr(caught.value, "inner_exception", caught.value), ConfigError)
