"""Copies between host and device, and which operators CUDA graphs record."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

import fsdp_compile.backend  # noqa: F401  defines the operators
from fsdp_compile._torch.dynamo import compile_fx_inner
from fsdp_compile.ir.text.parser import parse_graph
from fsdp_compile.lower.inductor import KEEP_OUR_ORDER
from fsdp_compile.ops import host_copy
from tests.delayed_copies import delayed_copies

START, WAIT = torch.ops.fsdp_compile.start_copy.default, torch.ops.fsdp_compile.wait_copy.default


@dataclasses.dataclass
class _Streams:
    """Stands for `torch.cuda`: notes what is queued, in order, as (stream, what)."""

    queued: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    current: str = "compute"

    def current_stream(self, _device: object = None) -> mock.Mock:
        return self.stream_of(self.current)

    def stream_of(self, name: str) -> mock.Mock:
        stream = mock.Mock(device=torch.device("cuda", 0), label=name)
        stream.wait_stream = lambda other: self.queued.append((name, f"wait for {other.label}"))
        stream.record_event = lambda: self._event(name)
        return stream

    def _event(self, name: str) -> mock.Mock:
        self.queued.append((name, "record"))
        return mock.Mock(wait=lambda stream: self.queued.append((stream.label, f"wait for the event of {name}")))

    @contextmanager
    def stream(self, stream: mock.Mock) -> Iterator[None]:
        before, self.current = self.current, stream.label
        yield
        self.current = before


@pytest.mark.core
def test_a_copy_is_queued_behind_what_was_computed_and_before_who_waits_for_it() -> None:
    streams = _Streams()
    source, result = torch.arange(4.0), torch.zeros(4)
    copied = mock.patch.object(
        torch.Tensor, "copy_", lambda *_, non_blocking: streams.queued.append((streams.current, f"copy {non_blocking}"))
    )
    with mock.patch.object(torch, "get_device_module", return_value=streams), copied:
        event = host_copy._copy_on(source, result, streams.stream_of("side"))
        host_copy._running[result.data_ptr()] = event
        streams.queued.append(("compute", "another kernel"))
        assert WAIT(result, source).data_ptr() == result.data_ptr()
    assert streams.queued == [
        ("side", "wait for compute"),
        ("side", "copy True"),
        ("side", "record"),
        ("compute", "another kernel"),
        ("compute", "wait for the event of side"),
    ]
    assert not host_copy._running


@pytest.mark.core
def test_without_an_accelerator_a_copy_is_a_copy() -> None:
    source = torch.arange(4.0)
    copied = START(source, "cpu")
    waited = WAIT(copied, source)
    assert copied.data_ptr() != source.data_ptr()
    assert waited.data_ptr() == copied.data_ptr()
    source.zero_()
    assert waited.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert not host_copy._running


@pytest.mark.core
def test_an_event_that_a_failed_graph_left_is_not_waited_for() -> None:
    left = mock.Mock()
    copied = torch.empty(4)
    with mock.patch.dict(host_copy._running, {copied.data_ptr(): left}):  # it raised, and its memory was given away
        with mock.patch.object(torch.Tensor, "clone", return_value=copied):
            started = START(torch.arange(4.0), "cpu")
        WAIT(started)
        assert not host_copy._running
    left.wait.assert_not_called()


GRAPH = """graph forward on cpu
%x = input() : f32[8, 8]
%y = input() : f32[8, 8]
%source = aten.mm(%x, %y) : f32[8, 8]
%copied = fsdp_compile.start_copy(%source, 'cpu') : f32[8, 8]
%a = aten.mm(%y, %y) : f32[8, 8]
%waited = fsdp_compile.wait_copy(%copied, %source) : f32[8, 8]
%b = aten.mm(%a, %y) : f32[8, 8]
%c = aten.mm(%b, %y) : f32[8, 8]
%d = aten.mm(%c, %y) : f32[8, 8]
%r = aten.mm(%waited, %d) : f32[8, 8]
%flat = aten.view(%waited, [64]) : f32[64]
return (%r, %flat)
"""


@pytest.mark.core
def test_inductor_reuses_no_memory_that_is_being_copied() -> None:
    """Neither what is copied from before the wait, nor what is copied to while the wait's result is used."""
    step = parse_graph(GRAPH)
    fakes = [node.meta["val"] for node in step.graph.find_nodes(op="placeholder")]
    with (
        torch._inductor.config.patch(KEEP_OUR_ORDER),
        torch._guards.tracing(torch._guards.TracingContext(fakes[0].fake_mode)),
    ):
        compiled = compile_fx_inner(step.gm, fakes)
    x, y = torch.randn(2, 8, 8).unbind()
    expected = [(x @ y) @ (y @ y @ y @ y @ y), (x @ y).view(64)]
    with delayed_copies() as sizes:
        torch.testing.assert_close(list(compiled([x, y])), expected)
    assert sizes == [256]


RECORDED = {
    *("block_scales", "quantize", "dequantize", "post_forward_part", "poison"),
    # Graphs have something else in their place when they are compiled.
    *("unshard", "reduce_grad", "reduce_rows", "reshard"),
    *("shard_post_forward", "unshard_post_forward"),
}
UNRECORDED = {
    # The host waits for numbers of the device.
    *("look_up", "average_rows", "check_message"),
    # Code of the user's, and optimizers, whose settings change.
    *("hook_scatter", "hook_scatter_coalesced", "hook_reduce", "hook_reduce_coalesced", "update"),
    # An event that the host keeps.
    *("start_copy", "wait_copy"),
}


def test_every_operator_is_known_here() -> None:
    defined = {
        name.partition("::")[2] for name in torch._C._dispatch_get_all_op_names() if name.startswith("fsdp_compile::")
    }
    of_torch = {"all_gather_copy_in", "chunk_cat", "copy_", "split_with_sizes_copy"}  # FSDP2's are under the same name
    assert defined - of_torch == RECORDED | UNRECORDED


@pytest.mark.parametrize("name", sorted(RECORDED | UNRECORDED))
def test_what_the_host_takes_part_in_is_not_recorded(name: str) -> None:
    operator = getattr(torch.ops.fsdp_compile, name).default
    assert (torch.Tag.cudagraph_unsafe in operator.tags) == (name in UNRECORDED)
