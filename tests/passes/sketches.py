"""Graphs of small models before any pass, drawn: which unit each parameter is in, and how it is kept and trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from itertools import pairwise

import torch
from hypothesis import strategies as st
from torch import fx

from fsdp_compile._torch.distributed import collectives
from fsdp_compile.ir.graph import KEY, Phase, Record, Role, StepGraph, require
from fsdp_compile.layout.flat_layout import shard_numel
from fsdp_compile.layout.spec import ROOT, UnshardSpec, Update
from fsdp_compile.ops.embedding import LOOK_UP, REDUCE_ROWS
from fsdp_compile.ops.unshard import REDUCE_GRAD, UNSHARD
from tests.cost.graphs import Sketch

aten = torch.ops.aten
ROWS, WIDTH, VOCAB = 4, 16, 32
_SETTINGS = (-1, False)
"""No row without a gradient, and none that is scaled by how often it is looked up."""
TABLE, NORM, HEAD = "tok.weight", "norm.weight", "head.weight"


@dataclasses.dataclass(frozen=True)
class Model:
    units: Mapping[str, str]  # of each parameter; the table is the head's weight if there is no `HEAD`
    frozen: frozenset[str] = frozenset()  # parameters without gradients
    offloaded: frozenset[str] = frozenset()  # units whose shards are on the host
    size: int = 2  # ranks that share parameters, of which there are `replicas`
    replicas: int = 1
    sent: torch.dtype = torch.float32  # in all-gathers
    looked_up: bool = False  # the table stays sharded
    updated: bool = False  # parameters are updated in backward, where they can be
    held: frozenset[str] = frozenset()  # units with unreduced gradients of earlier microbatches
    lists: bool = False  # each layer's unit prefetches that of the layer behind it
    twice: bool = False  # the norm is in front of the layers, too
    late: bool = False  # gradients of weights are computed behind those of their inputs
    draws: bool = False  # gradients of weights are rounded at random
    scaled: bool = False  # they are scaled by a number which the graph counts up at its end
    summed: bool = False  # gradients of inputs are summed by a collective of the program's own

    @property
    def depth(self) -> int:
        return sum(name.startswith("layers.") for name in self.units) // 2

    @property
    def head(self) -> str:
        return HEAD if HEAD in self.units else TABLE

    def prefetched(self, unit: str, step: int) -> tuple[str, ...]:
        """What the unit of a layer's weight prefetches."""
        layers = [self.units[f"layers.{i}.weight"] for i in range(self.depth)][::step]
        following = dict(reversed([pair for pair in pairwise(layers) if len(set(pair)) > 1]))
        return (following[unit],) if self.lists and unit in following else ()


def _shape(name: str) -> tuple[int, ...]:
    if name in (TABLE, HEAD):
        return (VOCAB, WIDTH)
    return (WIDTH,) if name.endswith("bias") or name == NORM else (WIDTH, WIDTH)


def _in_units(layout: str, name: str) -> str:
    """The unit of a parameter in one of the usual layouts."""
    module, _, _ = name.rpartition(".")
    match layout:
        case "one unit":
            return ROOT
        case "by hand":
            return module if module.startswith("layers") else ROOT
        case "nested":
            return name if name.endswith("bias") else module if module.startswith("layers") else ROOT
        case "lists":
            return "tok" if name in (TABLE, NORM, HEAD) else "layers.0"
    return module


LAYOUTS = ("one unit", "by hand", "nested", "lists", "each module")


@st.composite
def models(draw: st.DrawFn) -> Model:
    depth, layout, tied = draw(st.integers(1, 3)), draw(st.sampled_from(LAYOUTS)), draw(st.booleans())
    names = [TABLE, *(f"layers.{i}.{kind}" for i in range(depth) for kind in ("weight", "bias")), NORM]
    units = {name: _in_units(layout, name) for name in (names if tied else [*names, HEAD])}
    some = st.frozensets(st.sampled_from(sorted(set(units.values()))), max_size=2)
    size, looked_up = draw(st.sampled_from((2, 2, 1))), not tied and draw(st.booleans())
    can_update = draw(st.booleans())
    return Model(
        units,
        frozen=draw(st.just(frozenset()) | st.frozensets(st.sampled_from(sorted(units)), max_size=3)),
        offloaded=draw(st.just(frozenset()) | some) - ({units[TABLE]} if looked_up else set()),
        size=size,
        replicas=draw(st.sampled_from((1, 1, 2))),
        sent=draw(st.sampled_from((torch.float32, torch.bfloat16))),
        looked_up=looked_up and size > 1,
        updated=can_update,
        held=frozenset() if can_update or looked_up else draw(some),
        **{name: draw(st.booleans()) for name in ("lists", "twice", "late", "draws", "scaled", "summed")},
    )


class _Writer(Sketch):
    def __init__(self, model: Model, phase: Phase) -> None:
        super().__init__(phase)
        self.model = model
        self.device = "cuda" if model.offloaded else "cpu"
        self.flats: dict[tuple[str, bool], fx.Node] = {}
        for name, unit in model.units.items():
            if (unit, name in model.frozen) not in self.flats:
                self.flats[unit, name in model.frozen] = self._flat(unit, frozen=name in model.frozen)
        self.ids = self.tensor("ids", ROWS, dtype=torch.int64)
        self.sums: dict[fx.Node, fx.Node] = {}
        self.held = {flat: self._held(flat) for (unit, _), flat in self.flats.items() if unit in model.held}

    def tensor(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> fx.Node:
        return self.input(name, *shape, dtype=dtype, device=self.device)

    def _flat(self, unit: str, *, frozen: bool) -> fx.Node:
        model, offset, specs = self.model, 0, []
        names = [name for name in model.units if model.units[name] == unit and (name in model.frozen) is frozen]
        for name in names:
            extent = -(-shard_numel(_shape(name), 0, model.size) // 64) * 64
            specs.append(
                UnshardSpec(
                    offset=offset,
                    extent=extent,
                    shape=_shape(name),
                    dim=0,
                    size=model.size,
                    group="fsdp.shard.0" if model.size > 1 else "",
                    replicas=model.replicas,
                    replicate_group="fsdp.replicate.0" if model.replicas > 1 else "",
                    replicate_stride=model.size if model.replicas > 1 else 1,
                    param_dtype=model.sent,
                    reduce_dtype=torch.float32,
                    compute="cuda" if unit in model.offloaded else "",
                    forward_prefetch=model.prefetched(unit, 1),
                    backward_prefetch=model.prefetched(unit, -1),
                    update=Update.IN_BACKWARD if model.updated and not frozen else Update.AFTER_BACKWARD,
                )
            )
            offset += extent
        device = "cpu" if unit in model.offloaded else self.device
        node = self.input(f"flat_{len(self.flats)}", offset, device=device)
        node.meta[KEY] = Record(Role.FLAT, unit, tuple(names), tuple(specs), Phase.FORWARD)
        return node

    def _held(self, flat: fx.Node) -> fx.Node:
        node = self.tensor(f"held_{flat}", flat.meta["val"].shape[0] * self.model.size)
        node.meta[KEY] = dataclasses.replace(require(flat), role=Role.UNREDUCED_GRAD)
        return node

    def _place(self, name: str) -> tuple[fx.Node, str]:
        flat = self.flats[self.model.units[name], name in self.model.frozen]
        record = require(flat)
        return flat, record.specs[record.parameters.index(name)].text

    def read(self, name: str) -> fx.Node:
        return self.as_f32(self.call(UNSHARD, *self._place(name)))

    def as_f32(self, x: fx.Node) -> fx.Node:
        if x.meta["val"].dtype is torch.float32:
            return x
        return self.call(torch.ops.prims.convert_element_type.default, x, torch.float32)

    def table(self) -> fx.Node:
        if not self.model.looked_up:
            return self.call(aten.embedding.default, self.read(TABLE), self.ids)
        flat, text = self._place(TABLE)
        return self.as_f32(self.call(LOOK_UP, flat, self.ids, text, *_SETTINGS))

    def reduce_table(self, grad: fx.Node) -> None:
        if TABLE in self.model.frozen:
            return
        if self.model.looked_up:
            flat, text = self._place(TABLE)
            self._add(flat, self.call(REDUCE_ROWS, flat, grad, self.ids, text, *_SETTINGS))
        else:
            full = self.call(aten.embedding_dense_backward.default, grad, self.ids, VOCAB, *_SETTINGS)
            self.reduce(TABLE, full)

    def reduce(self, name: str, grad: fx.Node) -> None:
        if name in self.model.frozen:
            return
        flat, text = self._place(name)
        held = (self.held[flat],) if flat in self.held else ()
        self._add(flat, self.call(REDUCE_GRAD, flat, grad, text, *held))

    def _add(self, flat: fx.Node, marker: fx.Node) -> None:
        self.sums[flat] = self.call(aten.add.Tensor, self.sums[flat], marker) if flat in self.sums else marker

    def finished(self, *outputs: fx.Node) -> StepGraph:
        flats = self.flats.values() if self.phase is Phase.BACKWARD else ()
        self.graph.output((*outputs, *(self.sums.get(flat) for flat in flats)))
        return StepGraph(fx.GraphModule({}, self.graph), self.phase)

    def summed(self, x: fx.Node) -> fx.Node:
        """The sum of a value over ranks, as tensor parallelism makes it."""
        if not self.model.summed:
            return x
        start = self.call(collectives.all_reduce.default, x, "sum", "0")
        return self.call(collectives.wait_tensor.default, start)


class _Backward(_Writer):
    def __init__(self, model: Model) -> None:
        super().__init__(model, Phase.BACKWARD)
        self.saved = [self.tensor(f"saved_{i}", ROWS, WIDTH) for i in range(model.depth + 2)]
        self.scale = self.tensor("scale", 1) if model.scaled else None
        self.tangents = self.tensor("tangents_1", ROWS, VOCAB)

    def weight_grad(self, name: str, x: fx.Node, dy: fx.Node) -> None:
        grad = self.call(aten.mm.default, self.call(aten.t.default, x), dy)
        if name == self.model.head:
            grad = self.call(aten.t.default, grad)
        if self.model.draws:
            grad = self.call(aten.add.Tensor, grad, self.call(aten.rand_like.default, grad))
        if self.scale is not None:
            grad = self.call(aten.mul.Tensor, grad, self.scale)
        self.reduce(name, grad)

    def matmul(self, name: str, x: fx.Node, dy: fx.Node) -> fx.Node:
        if not self.model.late:
            self.weight_grad(name, x, dy)
        weight = self.read(name)
        if name != self.model.head:
            weight = self.call(aten.t.default, weight)
        dx = self.call(aten.mm.default, dy, weight)
        if self.model.late:
            self.weight_grad(name, x, dy)
        return dx

    def norm(self, x: fx.Node, dy: fx.Node) -> fx.Node:
        self.reduce(NORM, self.call(aten.sum.dim_IntList, self.call(aten.mul.Tensor, dy, x), [0]))
        return self.call(aten.mul.Tensor, dy, self.read(NORM))


def forward_of(model: Model) -> StepGraph:
    w = _Writer(model, Phase.FORWARD)
    x = w.table()
    if model.twice:
        x = w.call(aten.mul.Tensor, x, w.read(NORM))
    for i in range(model.depth):
        x = w.call(aten.mm.default, x, w.read(f"layers.{i}.weight"))
        x = w.call(aten.tanh.default, w.call(aten.add.Tensor, x, w.read(f"layers.{i}.bias")))
        x = w.summed(x)
    x = w.call(aten.mul.Tensor, x, w.read(NORM))
    return w.finished(w.call(aten.mm.default, x, w.call(aten.t.default, w.read(model.head))))


def backward_of(model: Model) -> StepGraph:
    w = _Backward(model)
    dx = w.norm(w.saved[-1], w.matmul(model.head, w.saved[-1], w.tangents))
    for i in reversed(range(model.depth)):
        dx = w.summed(dx)
        w.reduce(f"layers.{i}.bias", w.call(aten.sum.dim_IntList, dx, [0]))
        dx = w.matmul(f"layers.{i}.weight", w.saved[i + 1], dx)
    if model.twice:
        dx = w.norm(w.saved[0], dx)
    w.reduce_table(dx)
    if w.scale is not None:
        w.call(aten.copy_.default, w.scale, w.call(aten.mul.Tensor, w.scale, 2))
    return w.finished(*[dx] * (model.looked_up or TABLE in model.frozen))
