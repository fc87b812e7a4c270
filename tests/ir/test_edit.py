"""Whatever is moved wherever, a node comes behind what it needs: its inputs, and what writes and effects say.

A collective of the program's own reads its input until its wait: nothing writes there before.
"""

from __future__ import annotations

from operator import getitem

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from fsdp_compile.ir.edit import move, sink, with_needs
from fsdp_compile.ir.graph import KEY, Phase, Record, Role
from fsdp_compile.ir.queries import readers
from fsdp_compile.ops.effects import POISON, RESHARD, UPDATE
from fsdp_compile.ops.host_copy import START_COPY, WAIT_COPY
from fsdp_compile.passes.poison import poison_freed_messages
from tests.cost.graphs import Sketch

aten = torch.ops.aten
collectives = torch.ops._c10d_functional


def names(graph: fx.Graph) -> str:
    return " ".join(node.name for node in graph.nodes if node.op == "call_function")


def named(s: Sketch, name: str, op: object, *args: object) -> fx.Node:
    node = s.call(op, *args)
    node._rename(name)
    return node


def test_what_is_needed_later_is_waited_for_and_what_reads_goes_along() -> None:
    s = Sketch()
    x = s.input("x", 4)
    a = named(s, "a", aten.relu.default, x)
    b = named(s, "b", aten.relu.default, a)
    c = named(s, "c", aten.relu.default, x)
    d = named(s, "d", aten.add.Tensor, b, c)
    step = s.done(d)
    move(step.graph, [([d], a)])  # up, but no further than to what it needs
    assert names(step.graph) == "a b c d"
    move(step.graph, [([a], step.output)])  # down, with all that reads it
    assert names(step.graph) == "c a b d"
    move(step.graph, [([c], step.output), ([a, b], c)])
    assert names(step.graph) == "a b c d"


def test_a_group_keeps_its_order_in_front_of_an_anchor_that_is_one_of_it() -> None:
    s = Sketch()
    x = s.input("x", 4)
    a, b, c = (named(s, name, aten.relu.default, x) for name in "abc")
    step = s.done(a, b, c)
    move(step.graph, [([b, a], a)])
    assert names(step.graph) == "b a c"


@pytest.mark.parametrize("sent", [False, True])
def test_nothing_moves_past_a_write_to_memory_that_it_reads(*, sent: bool) -> None:
    s = Sketch(Phase.BACKWARD)
    x, scale = s.input("x", 4), s.input("scale", 4)
    view = named(s, "view", aten.view.default, scale, [2, 2])
    old = view
    if sent:  # until it is waited for, a collective reads what it sends
        started = named(s, "started", collectives.all_gather_into_tensor_coalesced.default, [view], 2, "0")
        old = named(s, "old", collectives.wait_tensor.default, named(s, "item", getitem, started, 0))
    read = named(s, "read", aten.relu.default, old)
    write = named(s, "write", aten.copy_.default, scale, x)
    new = named(s, "new", aten.relu.default, scale)
    step = s.done(read, write, new)
    before = names(step.graph)
    move(step.graph, [([new], write)])
    assert names(step.graph) == before
    move(step.graph, [([write], view)])
    assert names(step.graph) == (before.replace("read write", "write read") if sent else before)


@pytest.mark.parametrize("grouped", [False, True])
def test_freed_messages_become_nan_behind_the_wait_of_what_sends_them(*, grouped: bool) -> None:
    s = Sketch(Phase.BACKWARD)
    message = s.input("message", 4)
    seen = s.call(aten.view.default, message, [2, 2])
    if grouped:
        started = s.call(getitem, s.call(collectives.all_gather_into_tensor_coalesced.default, [seen], 2, "0"), 0)
    else:
        started = s.call(collectives.all_gather_into_tensor.default, seen, 2, "0")
    s.call(RESHARD, [message])
    wait = s.call(collectives.wait_tensor.default, started)
    step = s.done(s.call(aten.relu.default, wait))
    assert wait in readers([message])
    poison_freed_messages(step)
    (poison,) = [node for node in message.users if node.target is POISON]
    assert poison.prev is wait


def test_an_update_stays_behind_reads_and_reads_in_front_of_it() -> None:
    s = Sketch(Phase.BACKWARD)
    flat, gradient = s.input("flat", 4), s.input("gradient", 4)
    part = named(s, "part", aten.slice.Tensor, flat, 0, 0, 2)
    read = named(s, "read", aten.relu.default, part)
    update = named(s, "update", UPDATE, flat, gradient, [0])
    update.meta[KEY] = Record(Role.UPDATE, "unit", (), (), Phase.BACKWARD)
    other = named(s, "other", aten.relu.default, gradient)
    step = s.done(read, other)
    move(step.graph, [([update], part)])
    assert names(step.graph) == "part read update other"
    move(step.graph, [([read], step.output)])
    assert names(step.graph) == "part other read update"


def test_draws_and_the_programs_collectives_keep_their_order() -> None:
    s = Sketch()
    x = s.input("x", 4)
    first = named(s, "first", aten.rand_like.default, x)
    sent = named(s, "sent", collectives.all_reduce.default, x, "sum", "0")
    wait = named(s, "wait", collectives.wait_tensor.default, sent)
    second = named(s, "second", aten.rand_like.default, x)
    step = s.done(first, wait, second)
    move(step.graph, [([first], second)])
    assert names(step.graph) == "first sent wait second"


def test_a_start_takes_along_what_it_needs_but_no_copy_that_is_under_way() -> None:
    s = Sketch()
    x = s.input("x", 4)
    top = named(s, "top", aten.relu.default, x)
    part = named(s, "part", aten.slice.Tensor, x, 0, 0, 2)
    copy = named(s, "copy", START_COPY, part, "cpu")
    copy.meta[KEY] = Record(Role.OFFLOAD_IN, "unit", (), (), Phase.FORWARD)
    between = named(s, "between", aten.relu.default, top)
    wait = named(s, "wait", WAIT_COPY, copy)
    cast = named(s, "cast", torch.ops.prims.convert_element_type.default, wait, torch.bfloat16)
    s.done(cast, between)
    assert with_needs(cast, between) == [wait, cast]
    assert with_needs(cast, top) == [part, copy, wait, cast]


def test_what_is_used_later_sinks_to_its_first_user() -> None:
    s = Sketch()
    x = s.input("x", 4)
    a = named(s, "a", aten.relu.default, x)
    b = named(s, "b", aten.relu.default, a)
    c = named(s, "c", aten.relu.default, x)
    step = s.done(named(s, "d", aten.add.Tensor, c, b), named(s, "e", aten.relu.default, a))
    sink(step.graph, [a, b])
    assert names(step.graph) == "c a b d e"


@given(st.data())
def test_any_moves_leave_an_order_that_can_run(data: st.DataObject) -> None:
    s = Sketch()
    made = [s.input("x", 4)]
    for _ in range(data.draw(st.integers(1, 8))):
        sources = data.draw(st.lists(st.sampled_from(made), min_size=1, max_size=2))
        one_input = data.draw(st.sampled_from((aten.relu.default, aten.rand_like.default)))
        made.append(s.call(aten.add.Tensor if len(sources) > 1 else one_input, *sources))
    step = s.done(*made)
    drawn = [node for node in step.graph.nodes if node.target is aten.rand_like.default]
    groups = st.lists(st.sampled_from(made[1:]), unique=True, max_size=4)
    moves = data.draw(st.lists(st.tuples(groups, st.sampled_from([*made[1:], step.output])), max_size=4))
    move(step.graph, moves)
    step.graph.lint()
    assert [node for node in step.graph.nodes if node.target is aten.rand_like.default] == drawn
