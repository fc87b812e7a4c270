"""What is refused, and what the message says."""

from __future__ import annotations

import pytest
import torch

from fsdp_compile.errors import ConfigError
from fsdp_compile.ir.graph import Phase, Role, require
from fsdp_compile.ir.text.parser import parse_graph
from fsdp_compile.ir.text.printer import format_graph, format_node

FLAT = """\
graph forward on cpu
%w = input(role=flat, unit=layers.0) : f32[64]
  .weight: offset=0 extent=32 shape=6x5 dim=0 over=fsdp.shard.0/2 param=float32 reduce=float32 reshard=after_forward
%x = input() : f32[3, 5]
"""


def refused(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_graph(text)
    return str(caught.value)


def test_a_graph_is_read() -> None:
    step = parse_graph(
        FLAT
        + """
# the reader looks past comments, empty lines and spaces
%read = fsdp_compile.unshard ( %w,slot= .weight) : f32 [6,5]
%y = aten.mul.Tensor(%read, 2.5) : f32[6, 5]
return (%y, None)
"""
    )
    assert step.phase is Phase.FORWARD
    flat, x, read, y = list(step.graph.nodes)[:-1]
    record = require(flat)
    assert (record.role, record.unit, record.parameters) == (Role.FLAT, "layers.0", ("layers.0.weight",))
    assert read.args == (flat, record.specs[0].text)
    assert read.target is torch.ops.fsdp_compile.unshard.default
    assert y.args == (read, 2.5)
    assert x.meta["val"].shape == (3, 5)
    assert step.output.args == ((y, None),)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("%y = aten.mm(%x, %x)", "line 5: expected a node"),
        ("aten.relu(%x) : f32[3, 5]", "line 5: expected a node"),
        ("%y = aten.mn(%x, %x) : f32[3]", "line 5: there is no operator aten.mn"),
        ("%y = all_gathr(%x) : f32[3]", "instead: all_gather"),
        ("%y = aten.sum.dims(%x) : f32[]", "aten.sum has no overload dims"),
        ("%y = aten.relu(%z) : f32[3]", "line 5: %z is used before it is made"),
        ("%x = aten.relu(%x) : f32[3, 5]", "%x is made twice"),
        ("%y = aten.relu(%x) : f32[4, 99]", "line 5: declared f32[4, 99], but aten.relu gives f32[3, 5]"),
        ("%y = aten.t(%x) : f32[5, 3]", "aten.t gives f32[5, 3] strides [1, 5]"),
        ("%y = aten.mm(%x, %x) : f32[3, 3]", "aten.mm cannot take these arguments"),
        ("%y = aten.mm(%x, [) : f32[3, 3]", "expected values, not %x, ["),
        ("%y = aten.relu(%x), aten.relu(%x) : f32[3, 5]", "expected the arguments of one call"),
        ("%y = aten.relu(%x + 1) : f32[3, 5]", "sizes cannot be computed so"),
        ("%y = attribute('a.b') : f32[3]", "an attribute has a name"),
        ("%y = input() : f32[8 // 0]", "sizes cannot be computed so"),
        ("%y = input() : f33[3]", "line 5: expected a type"),
        ("%y = input() : f32[s0]", "s0 is no constant"),
        ("%y = input() : f32[3, 5", "expected a type"),
        ("%y = input() : f32[3, 5] strides [1]", "2 sizes have 1 strides"),
        ("%y = input() : f32[3] and more", "expected a type, not f32[3] and more"),
        ("%y = input() : <DeviceMesh>", "<DeviceMesh> stands for something that text cannot hold"),
        ("%y = input(role=flat, unit=a) : f32[3]", "with a line for each parameter below it"),
        ("%y = input(role=full, unit=a) : f32[3]", "with a line for each parameter below it"),
        ("%y = input() : f32[3]\n  .weight: offset=0", "line 6: an indented line belongs below an input"),
        ("%y = input(role=flat, unit=a) : f32[3]\n  .weight: offset=0", "line 6: not the text of a read"),
        ("%y = input(role=flat, unit=a) : f32[3]\n  .weight offset=0", "line 6: expected the place of a parameter"),
        ("%y = aten.relu(%x, role=fulll, unit=layers.0, of=[.weight]) : f32[3, 5]", "there is no role fulll"),
        ("%y = aten.relu(%x, role=full, unit=layers.0, of=[.bias]) : f32[3, 5]", "instead: layers.0.weight"),
        ("%y = aten.relu(%x, role=full) : f32[3, 5]", "a record has a role, a unit and parameters"),
        (
            "%y = fsdp_compile.unshard(%x, slot=.weight) : f32[6, 5]",
            "slot= needs a flat parameter as the first argument",
        ),
        ("%y = aten.add.Tensor(%x, float) : f32[3, 5]", "line 5: float is no constant"),
        ("%y = aten.add.Tensor(%x, <Thing>) : f32[3, 5]", "<Thing> stands for something that text cannot hold"),
        ("%sum = aten.relu(%x) : f32[3, 5]", "%sum cannot be the name of a node"),
        ("return (%x,)\n%y = aten.relu(%x) : f32[3, 5]", "line 6: nothing may follow `return`"),
        ("%y = aten.relu(%x) : f32[3, 5]", "the graph does not end"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(body: str, message: str) -> None:
    text = refused(FLAT + body + "\n")
    assert message in text
    assert text.startswith("line ")


@pytest.mark.parametrize(
    "text", ["", "# nothing\n", "%x = input() : f32[3]\nreturn (%x,)\n", "graph sideways on cpu\n"]
)
def test_a_graph_has_a_header(text: str) -> None:
    assert "instead: graph forward on cpu" in refused(text)


def test_an_unknown_operator_is_not_executed() -> None:
    assert "there is no operator" in refused(FLAT + "%y = os.system('true') : none\n")
    assert "there is no operator" in refused(FLAT + "%y = torch.load('file') : none\n")
    assert 'expected a value, not "__import__' in refused(FLAT + "%y = input() : f32[__import__('os').getpid()]\n")


def canonical(text: str) -> None:
    assert format_graph(parse_graph(text)) == text


def test_symbols_have_ranges() -> None:
    canonical(
        """\
graph backward on cpu
symbol s0 in [2, oo]
symbol s1 in [8, 64]
%n = input() : sym(s0)
%x = input() : f32[s0, s1, 3]
%y = input() : f32[Max(s0, s1), ((s1//2)) + 1] strides [2*s1, 1]
%z = input() : f32[Max(8, s0, s1)]
%double = operator.mul(%n, 2) : sym(2*s0)
%flat = aten.view(%x, [-1]) : f32[3*s0*s1]
return (%flat, %y, %double)
"""
    )


def test_sizes_that_only_the_data_tell_are_taken_as_declared() -> None:
    canonical(
        """\
graph forward on cpu
symbol u3 in [0, oo]
%x = input() : f32[8]
%rows = aten.nonzero(%x) : i64[u3, 1]
%count = aten.sym_size.int(%rows, 0) : sym(u3)
%y = aten.index.Tensor(%x, [%rows]) : f32[u3, 1]
%norm = aten.native_layer_norm(%y, [1], None, None, 1e-05) : (f32[u3, 1], none, sym(u3), [int(3), f32[u3, 1]])
return (%y, %count)
"""
    )


def test_other_devices_are_told_by_kind() -> None:
    canonical(
        """\
graph forward on cuda
%x = input() : f32[8]
%host = input() : i64[] on cpu
%y = aten.full([8], 0, dtype=f32, device=cuda) : f32[8]
%z = aten._to_copy(%x, dtype=f16, device=cpu) : f16[8] on cpu
return (%y, %z)
"""
    )


def test_every_kind_of_constant_is_read() -> None:
    canonical(
        """\
graph forward on cpu
%x = input() : f32[2, 3, 4, 4]
%i = input() : i64[2]
%c = input() : c64[2]
%b = input() : bool[2]
%e = input() : f8e4m3fn[2]
%a = attribute('_tensor_constant0') : f32[2]
%y = aten.clone(%x, memory_format=channels_last) : f32[2, 3, 4, 4] strides [48, 1, 12, 3]
%m = aten.mean.dim(%x, [-1, -2], True, dtype=f64) : f64[2, 3, 1, 1]
%g = aten.gelu(%x, approximate='tanh') : f32[2, 3, 4, 4]
%k = aten.clamp(%x, -inf, 1e-05) : f32[2, 3, 4, 4]
%v = aten.var_mean.correction(%x, [1], correction=0, keepdim=True) : (f32[2, 1, 4, 4], f32[2, 1, 4, 4])
%v_1 = getitem(%v, 1) : f32[2, 1, 4, 4]
%s = aten.split.Tensor(%x, 2, 2) : [f32[2, 3, 2, 4] strides [48, 16, 4, 1], f32[2, 3, 2, 4] strides [48, 16, 4, 1]]
%p = aten.full([2], nan, dtype=f32, layout=strided, device=cpu, pin_memory=False) : f32[2]
return (%y, None)
"""
    )


def test_names_with_other_characters_are_quoted() -> None:
    canonical(
        """\
graph forward on cpu
%w = input(role=flat, unit='my layer') : f32[32]
  .weight: offset=0 extent=32 shape=6x5 dim=0 over=fsdp.shard.0/2 param=float32 reduce=float32 reshard=after_forward
  "it's": offset=32 extent=32 shape=scalar dim=none over=fsdp/2 param=float32 reduce=float32 reshard=after_forward
  '.w[0]': offset=64 extent=32 shape=scalar dim=none over=fsdp/2 param=float32 reduce=float32 reshard=after_forward
%read = fsdp_compile.unshard(%w, slot=.weight) : f32[6, 5]
%ag = all_gather(%w, 2, 'fsdp.shard.0', role=gather, unit='my layer', of=[.weight, "it's", '.w[0]']) : f32[64]
return (%read, %ag)
"""
    )


def test_what_text_cannot_hold_is_shown() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.get_attr("body")
    y = graph.call_function(torch.ops.higher_order.cond, (x, graph))  # type: ignore[arg-type]
    y.meta["val"] = graph
    assert format_node(x, "cpu") == ["%x = input() : ?"]
    assert format_node(x.next, "cpu") == ["%body = attribute('body') : ?"]
    assert format_node(y, "cpu") == ["%cond = higher_order.cond(%x, <Graph>) : <Graph>"]
