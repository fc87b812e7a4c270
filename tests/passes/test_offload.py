"""Graphs of units that live on the host, on a GPU that is not there: copies, their order, and the rule about them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx

from fsdp_compile.ir.graph import KEY, Role, StepGraph, require, role_of
from fsdp_compile.ir.text.parser import parse_graph
from fsdp_compile.lower.compiled_step import CompiledStep
from fsdp_compile.options import FSDPOptions
from fsdp_compile.pipeline import passes
from fsdp_compile.verify.check import check, complaints

SLOTS = """
  .bias: offset=0 extent=64 shape=64 dim=0 over=fsdp.shard.0/2 param=bfloat16 reduce=float32 reshard=after_forward{}
  .weight: offset=64 extent=4096 shape=128x64 dim=0 over=fsdp.shard.0/2 param=bfloat16 reduce=float32 reshard=after_forward{}
"""  # noqa: E501
FORWARD = """graph forward on cpu
%one = input(role=flat, unit=one) : f32[4160]{slots}
%two = input(role=flat, unit=two) : f32[4160]{slots}
%x = input() : bf16[3, 128] on cuda
%w1 = fsdp_compile.unshard(%one, slot=.weight) : bf16[128, 64] on cuda
%b1 = fsdp_compile.unshard(%one, slot=.bias) : bf16[64] on cuda
%y = aten.addmm(%b1, %x, %w1) : bf16[3, 64] on cuda
%w2 = fsdp_compile.unshard(%two, slot=.weight) : bf16[128, 64] on cuda
%b2 = fsdp_compile.unshard(%two, slot=.bias) : bf16[64] on cuda
%z = aten.addmm(%b2, %x, %w2) : bf16[3, 64] on cuda
%r = aten.add.Tensor(%y, %z) : bf16[3, 64] on cuda
return (%r,)
"""
THREE = FORWARD.replace("%x = input", "%three = input(role=flat, unit=three) : f32[4160]{slots}\n%x = input").replace(
    "%r = aten.add.Tensor(%y, %z)",
    """%w3 = fsdp_compile.unshard(%three, slot=.weight) : bf16[128, 64] on cuda
%t = aten.mm(%x, %w3) : bf16[3, 64] on cuda
%r = aten.add.Tensor(%z, %t)""",
)
BACKWARD = """graph backward on cpu
%one = input(role=flat, unit=one) : f32[4160]{slots}
%two = input(role=flat, unit=two) : f32[4160]{slots}
%dw = input() : bf16[128, 64] on cuda
%db = input() : bf16[64] on cuda
%g1 = fsdp_compile.reduce_grad(%two, %dw, slot=.weight) : f32[4160]
%g2 = fsdp_compile.reduce_grad(%two, %db, slot=.bias) : f32[4160]
%s1 = aten.add.Tensor(%g1, %g2) : f32[4160]
%g3 = fsdp_compile.reduce_grad(%one, %dw, slot=.weight) : f32[4160]
return (%g3, %s1)
"""
COPIED_AND_GATHERED = (Role.OFFLOAD_IN, Role.OFFLOAD_IN_WAIT, Role.GATHER, Role.GATHER_WAIT)
REDUCED_AND_COPIED = (Role.REDUCE, Role.OFFLOAD_OUT, Role.OFFLOAD_OUT_WAIT)


def transformed(text: str, *, slots: str = SLOTS.format(*[" compute=cuda"] * 2)) -> StepGraph:
    step = parse_graph(text.format(slots=slots.rstrip()))
    for graph_pass in passes(FSDPOptions(prefetch=1)):
        graph_pass.apply(step, graph_pass.plan(step))
    return step


def roles(step: StepGraph) -> list[Role]:
    return [role for node in step.graph.nodes if (role := role_of(node)) is not None]


def device_and_dtype(node: fx.Node) -> tuple[str, torch.dtype]:
    return node.meta["val"].device.type, node.meta["val"].dtype


@pytest.mark.core
def test_each_message_is_copied_as_stored_and_cast_on_the_device() -> None:
    step = transformed(FORWARD)
    check(step)
    copies = list(step.nodes(Role.OFFLOAD_IN))
    assert len(copies) == 4  # two messages of two units: the bias, and the weight, of 16 KiB
    for copy in copies:
        assert device_and_dtype(copy.all_input_nodes[0]) == ("cpu", torch.float32)
        assert device_and_dtype(copy) == ("cuda", torch.float32)
        (wait,) = copy.users
        (cast,) = wait.users
        assert device_and_dtype(cast) == ("cuda", torch.bfloat16)
        assert [role_of(user) for user in cast.users] == [Role.GATHER]


def test_copies_start_one_bucket_before_their_gather() -> None:
    step = transformed(THREE, slots=SLOTS.format(*[" compute=cuda"] * 2))
    check(step)
    steps = [(role.value, require(n).unit) for n in step.graph.nodes if (role := role_of(n)) in COPIED_AND_GATHERED]
    assert list(dict.fromkeys(steps)) == [
        ("offload_in", "one"),
        ("offload_in", "two"),
        ("offload_in_wait", "one"),
        ("gather", "one"),
        ("offload_in", "three"),
        ("offload_in_wait", "two"),
        ("gather", "two"),
        ("gather_wait", "one"),  # `one` computes while `two` is on the wire and `three` on the bus
        ("offload_in_wait", "three"),
        ("gather", "three"),
        ("gather_wait", "two"),
        ("gather_wait", "three"),
    ]


@pytest.mark.core
def test_one_copy_per_flat_shard_goes_back_after_its_reduction() -> None:
    step = transformed(BACKWARD)
    check(step)
    copies = list(step.nodes(Role.OFFLOAD_OUT))
    assert [device_and_dtype(copy) for copy in copies] == [("cpu", torch.float32)] * 2
    assert all(device_and_dtype(copy.all_input_nodes[0]) == ("cuda", torch.float32) for copy in copies)
    ours = [node for node in step.graph.nodes if role_of(node) in REDUCED_AND_COPIED]
    assert [(require(n).role.value, require(n).unit) for n in ours] == [
        ("reduce", "two"),
        ("offload_out", "two"),
        ("reduce", "one"),
        ("offload_out_wait", "two"),  # the stream that computes waits for a copy once the next one can start
        ("offload_out", "one"),
        ("offload_out_wait", "one"),
    ]
    for copy in copies:
        (wait,) = (user for user in copy.users if role_of(user) is Role.OFFLOAD_OUT_WAIT)
        assert wait.args == (copy, copy.args[0])  # what is copied is nobody else's memory before
    assert CompiledStep.of(step).host_copies_from == "cuda"


def test_shards_on_the_device_are_not_copied() -> None:
    for text in (FORWARD, BACKWARD):
        step = transformed(text.replace("f32[4160]", "f32[4160] on cuda"), slots=SLOTS.format("", ""))
        check(step)
        assert not {Role.OFFLOAD_IN, Role.OFFLOAD_OUT} & set(roles(step))
        assert CompiledStep.of(step).host_copies_from == ""


def _without(role: Role, source: int = 0) -> Callable[[StepGraph], None]:
    """Lets the readers of the first node of a role read one of its inputs instead."""

    def edit(step: StepGraph) -> None:
        node = next(step.nodes(role))
        node.replace_all_uses_with(node.all_input_nodes[source])
        step.graph.erase_node(node)

    return edit


def _copied_twice(step: StepGraph) -> None:
    copy = next(step.nodes(Role.OFFLOAD_IN))
    with step.graph.inserting_after(copy):
        again = step.graph.node_copy(copy)
    copy.replace_all_uses_with(again)
    again.args = (copy, "cuda")


def _to_the_host(step: StepGraph) -> None:
    next(step.nodes(Role.OFFLOAD_IN)).update_arg(1, "cpu")


def _blocking(step: StepGraph) -> None:
    copy = next(step.nodes(Role.OFFLOAD_OUT))
    with step.graph.inserting_after(copy):
        blocking = step.graph.call_function(torch.ops.aten._to_copy.default, (copy.args[0],))
    blocking.kwargs, blocking.meta = {"device": torch.device("cpu")}, copy.meta
    copy.replace_all_uses_with(blocking)
    step.graph.erase_node(copy)


def _source_let_go(step: StepGraph) -> None:
    wait = next(step.nodes(Role.OFFLOAD_OUT_WAIT))
    wait.args = wait.args[:1]


def _gradient_read_on_its_way(step: StepGraph) -> None:
    wait = next(step.nodes(Role.OFFLOAD_OUT_WAIT))
    with step.graph.inserting_before(step.output):
        step.graph.call_function(torch.ops.aten.mul.Tensor, (wait, 2)).meta["val"] = wait.meta["val"]


def _copy_recorded_as_a_shard(step: StepGraph) -> None:
    copy = next(step.nodes(Role.OFFLOAD_IN))
    copy.meta[KEY] = dataclasses.replace(require(copy), role=Role.SHARD)


@pytest.mark.parametrize(
    ("text", "edit", "says"),
    [
        (FORWARD, _without(Role.OFFLOAD_IN), "after 0 copies from the host"),
        (FORWARD, _copied_twice, "after 2 copies from the host"),
        (FORWARD, _to_the_host, "copies to 'cpu'"),
        (FORWARD, _without(Role.OFFLOAD_IN_WAIT), "while it may still be on its way"),
        (FORWARD, _copy_recorded_as_a_shard, "is recorded as shard and does something else"),
        (BACKWARD, _blocking, "is recorded as offload_out and does something else"),
        (BACKWARD, _source_let_go, "while it may still be copied"),
        (BACKWARD, _gradient_read_on_its_way, "on its way to the host"),
        (BACKWARD, _without(Role.OFFLOAD_OUT_WAIT, 1), "is not copied to the host"),
    ],
)
def test_a_broken_graph_is_noticed(text: str, edit: Callable[[StepGraph], None], says: str) -> None:
    step = transformed(text)
    edit(step)
    found = [complaint for complaint in complaints(step) if complaint.rule == "host-copies"]
    assert any(says in str(complaint) for complaint in found), found


def test_the_host_waits_once_after_all_copies_are_queued() -> None:
    events: list[str] = []
    stream = mock.Mock(synchronize=lambda: events.append("wait"))
    device = mock.Mock(current_stream=lambda: stream)

    def compiled(args: list[Any]) -> list[Any]:
        events.append("run")
        return args

    with mock.patch.object(torch, "get_device_module", return_value=device) as asked:
        step = dataclasses.replace(CompiledStep.of(transformed(FORWARD)), flats={}, host_copies_from="cuda")
        run: Any = step.around(compiled)
        assert run([1, 2]) == [1, 2]
    asked.assert_called_once_with("cuda")
    assert events == ["run", "wait"]
