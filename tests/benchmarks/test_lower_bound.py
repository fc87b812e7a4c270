"""Lower bounds: of all schedules of small steps, played one by one, none is below them, and no plan of a model is."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from benchmarks.lower_bound import Made, Part, Read, Step, lower_bound
from fsdp_compile import MixedPrecision
from fsdp_compile.cost.hardware import hardware
from fsdp_compile.explain.plan import Plan
from tests import long
from tests.fake_world import fake_world
from tests.models.round_sizes import WIDTH, Broken, Partial, Stack, explained

NAMES = ("a", "b")
Sending = tuple[str, str]
"""("once", name), ("again", name), or ("reduce", number of the gradients)."""


@st.composite
def parts(draw: st.DrawFn, *, trained: bool) -> Part:
    """Two operators behind the parameters that they read; in backward each may compute a gradient."""
    names = draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=2))
    reads = tuple(Read(name, i, size_bytes=4, sent_bytes=float(3 + ord(name) % 2)) for i, name in enumerate(names))
    times = [0.0] * len(reads)
    inputs: list[tuple[int, ...]] = [()] * len(reads)
    for node in (len(reads), len(reads) + 1):
        times.append(float(draw(st.integers(0, 9))))
        inputs.append(tuple(draw(st.lists(st.sampled_from(range(node)), unique=True)) if node else ()))
    unread = set(range(len(reads))) - {*inputs[-2], *inputs[-1]}
    inputs[-1] = (*inputs[-1], *unread)
    computing = (len(reads), len(reads) + 1)
    makers = draw(st.lists(st.sampled_from([computing[:1], computing[1:], computing]), max_size=2)) if trained else []
    made = tuple(Made(nodes, float(draw(st.integers(0, 9)))) for nodes in sorted(makers, key=max))
    return Part(tuple(times), tuple(inputs), reads, made)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    room_bytes = draw(st.sampled_from((0, 3, 4, 8)))
    return Step((draw(parts(trained=False)),), (draw(parts(trained=True)),), room_bytes, bytes_per_us=1.0)


@given(steps())
@settings(max_examples=60, deadline=None)
def test_no_schedule_is_faster_or_sends_less(step: Step) -> None:
    played = list(_played(step))
    assert played, "there is one"
    assert step.least_us <= min(end_us for end_us, _ in played) + 1e-9
    assert step.least_bytes <= min(sent for _, sent in played) + 1e-9


def _played(step: Step) -> Iterator[tuple[float, float]]:
    """Times and bytes of all schedules: what is kept, in which order is computed and in which order is sent."""
    (forward,), (backward,) = step.forward, step.backward
    first, second = ({read.name: read for read in part.reads} for part in (forward, backward))
    for count in range(len(second) + 1):
        for kept in itertools.combinations(sorted(map(str, second)), count):
            if sum(second[name].size_bytes for name in kept) > step.room_bytes:
                continue
            sent = {("once", str(name)): read.sent_bytes for name, read in first.items()}
            # What forward does not read may still be gathered before the seam and held.
            sent |= {("once", name): second[name].sent_bytes for name in kept if name not in first}
            sent |= {("again", str(n)): read.sent_bytes for n, read in second.items() if n not in kept}
            sent |= {("reduce", str(i)): made.sent_bytes for i, made in enumerate(backward.made)}
            for orders in itertools.product(_orders(forward), _orders(backward)):
                for queue in itertools.permutations(sent):
                    end_us = _play(step, orders, queue, sent)
                    if end_us is not None:
                        yield end_us, sum(sent.values())


def _orders(part: Part) -> Iterator[Sequence[int]]:
    one, two = range(len(part.reads), len(part.inputs))
    yield one, two
    if one not in part.inputs[two]:
        yield two, one


def _play(
    step: Step, orders: Sequence[Sequence[int]], queue: Sequence[Sending], sent: dict[Sending, float]
) -> float | None:
    """When computing and the link are done; `None` for an order in which one waits for the other forever."""
    todo = [(phase, node) for phase, order in enumerate(orders) for node in order]
    ends: dict[object, float] = {}
    now_us = link_us = 0.0
    waiting = list(queue)
    while todo or waiting:
        ready = _ready_us(step, ends, waiting[0]) if waiting else None
        if ready is not None:
            link_us = max(link_us, ready) + sent[waiting[0]] / step.bytes_per_us
            ends[waiting.pop(0)] = link_us
            continue
        if not todo:
            return None
        phase, node = todo[0]
        part = (*step.forward, *step.backward)[phase]
        needed = [_gather(read, phase, sent) for read in part.reads if read.value in part.inputs[node]]
        if any(gather not in ends for gather in needed):
            return None
        now_us = max([now_us, *(ends[gather] for gather in needed)]) + part.times_us[node]
        ends[phase, node] = now_us
        todo.pop(0)
    return max(now_us, link_us)


def _gather(read: Read, phase: int, sent: dict[Sending, float]) -> Sending:
    """The gather that a graph waits for; what is gathered again was freed at the seam."""
    again = ("again", str(read.name))
    return again if phase and again in sent else ("once", str(read.name))


def _ready_us(step: Step, ends: dict[object, float], sending: Sending) -> float | None:
    """When a collective may start, as far as is known."""
    (forward,), (backward,) = step.forward, step.backward
    kind, name = sending
    nodes = {
        "once": [],
        "again": [(0, node) for node in range(len(forward.reads), len(forward.inputs))],
        "reduce": [(1, node) for node in backward.made[int(name)].nodes] if kind == "reduce" else [],
    }[kind]
    return None if any(node not in ends for node in nodes) else max((ends[node] for node in nodes), default=0.0)


def test_the_first_gather_and_the_last_reduction_hide_behind_nothing() -> None:
    """A table that everything reads, and whose gradient needs everything: gather, computing, reduction."""
    table = Read("table", 0, size_bytes=8, sent_bytes=7.0)
    forward = Part((0.0, 10.0), ((), (0,)), (table,))
    backward = Part((20.0, 5.0), ((), (0,)), made=(Made((1,), 7.0),))
    assert Step((forward,), (backward,), room_bytes=0, bytes_per_us=1.0).least_us == 7 + 10 + 25 + 7


def test_a_weight_gradient_is_computed_beside_the_last_reduction() -> None:
    forward = Part((10.0,), ((),))
    # Node 1 is a weight gradient, node 2 the table's: only the one before both must come before its reduction.
    backward = Part((20.0, 4.0, 5.0), ((), (0,), (0,)), made=(Made((1,), 1.0), Made((2,), 7.0)))
    assert Step((forward,), (backward,), room_bytes=0, bytes_per_us=1.0).least_us == 10 + 20 + 5 + 7


def test_the_link_stands_still_while_forward_ends_and_has_no_room_for_more() -> None:
    """Forward's last parameter has arrived, and what is read in backward would have to be dropped before the seam."""
    table, block, head = (Read(name, node, size_bytes=8, sent_bytes=20.0) for node, name in enumerate("tbh"))
    forward = Part((0.0, 0.0, 0.0, 1.0, 1.0, 5.0), ((), (), (), (0,), (1, 3), (2, 4)), (table, block, head))
    last, early = (dataclasses.replace(read, value=node) for node, read in enumerate((head, block)))
    backward = Part((0.0, 0.0, 5.0, 1.0), ((), (), (0,), (1, 2)), (last, early), (Made((2,), 20.0), Made((3,), 20.0)))
    assert Step((forward,), (backward,), room_bytes=8, bytes_per_us=1.0).least_us == (60 + 5) + 20 + 40
    assert Step((forward,), (backward,), room_bytes=0, bytes_per_us=1.0).least_us == (60 + 5) + 40 + 40


def test_what_has_room_is_not_sent_again() -> None:
    read = Read("a", 0, size_bytes=8, sent_bytes=6.0)
    part = Part((0.0, 1.0), ((), (0,)), (read,))
    sent = [Step((part,), (part,), room_bytes, 1.0).least_bytes for room_bytes in (0, 4, 8, 100)]
    assert sent == [12.0, 9.0, 6.0, 6.0]
    assert Step((part,), (), 0, 1.0).least_bytes == 6.0


def test_backward_waits_for_what_could_not_be_held() -> None:
    read = Read("a", 0, size_bytes=8, sent_bytes=6.0)
    part = Part((0.0, 1.0), ((), (0,)), (read,))
    assert Step((part,), (part,), 0, 1.0).least_us == pytest.approx(6 + 6 + 1)


LINKS = (0.05, 1.0, 50.0)
"""GB/s: the link decides, neither does, computing does."""


class _Looked(nn.Module):
    """Everything depends on a large table, and so does nothing before its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16 * WIDTH, WIDTH)
        self.body = Stack(4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.body(self.table(rows))


def _check(plan: Plan, *, sent: float = 0.6, time: float = 0.0) -> None:
    """The bound of a plan is not above it, and more than such shares of its bytes and time."""
    bound = lower_bound(plan)
    assert time < bound.time_us / plan.step_us <= 1
    assert sent < bound.sent_bytes / plan.volume.total_bytes <= 1


def _plan(model: type[nn.Module], gb_per_s: float, **options: object) -> Plan:
    x = torch.zeros(512, dtype=torch.long) if model is _Looked else 64
    return explained(model, 4, hardware(link=gb_per_s), x, **options)


@long.parametrize(
    "options",
    [
        {},
        {"prefetch": 0},
        {"prefetch": "BACKWARD_PRE"},
        {"reshard_after_forward": False},
        {"reshard_after_forward": "auto"},
        {"reshard_after_forward": 2},
        {"embedding": "sharded"},
        {"bucket_mb": 0},
    ],
    always=[{"reshard_after_forward": "auto"}],
    ids=str,
)
def test_no_plan_is_below_it(options: dict[str, Any]) -> None:
    for gb_per_s in LINKS:
        _check(_plan(_Looked, gb_per_s, **options), sent=0.0)


@pytest.mark.parametrize("model", [Broken, Partial])
def test_graph_breaks_and_what_is_frozen_or_not_read(model: type[nn.Module]) -> None:
    _check(_plan(model, 0.05), time=0.6)


def test_bytes_are_those_of_the_shapes() -> None:
    """Biases are not needed in backward; what a plan holds in forward need not be gathered again."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    bound = lower_bound(explained(Stack, 4, mp_policy=policy, bucket_mb=0))
    matrix, block = WIDTH * WIDTH, WIDTH * WIDTH + 2 * WIDTH
    assert 2 * matrix < bound.room_bytes < 3 * 2 * block
    again = max(0, 2 * 3 * (matrix + WIDTH) - bound.room_bytes)
    assert bound.sent_bytes == pytest.approx(((2 + 4) * 3 * block + again) * 3 / 4, rel=0.01)


def test_replicas_have_a_link_of_their_own() -> None:
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        _check(explained(Stack, None, hardware(link=0.05), mesh=mesh))


def test_what_hides_behind_nothing_is_in_it() -> None:
    """At first the table must come, at last its gradient must go; a floor of computing alone says nothing of either."""
    plan = _plan(_Looked, 1.0)
    table_us = 16 * WIDTH * WIDTH * 4 * 3 / 4 / 1e3 / 0.9  # 0.9 of 1 GB/s
    bound_us = lower_bound(plan).time_us
    assert bound_us > sum(graph.compute_us for graph in plan.forward) + 2 * table_us
    assert lower_bound(_plan(_Looked, 1.0, embedding="sharded")).time_us < bound_us


def test_more_memory_lowers_it() -> None:
    sent = [lower_bound(_plan(Stack, 0.05, prefetch=distance)).sent_bytes for distance in (0, 1, 3)]
    assert sent == sorted(sent, reverse=True)
    assert sent[0] > sent[-1]


@long.parametrize("gather", [torch.int8, "nvfp4"], always=["nvfp4"])
def test_fewer_bits_are_counted_as_they_are_sent(gather: torch.dtype | str) -> None:
    policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, gather_dtype=gather)
    for context in (contextlib.nullcontext(), torch.no_grad()):
        with context:
            plan = _plan(Stack, 0.05, mp_policy=policy, prefetch=0)
        _check(plan)
    for reshard in (True, 2):
        volume = _plan(Stack, 0.05, mp_policy=policy, reshard_after_forward=reshard).volume
        assert 0.95 < volume.full_sharding_bytes / volume.total_bytes < 1.05
