"""Nested regions: traced once, inlined, and the bits of the same model without regions."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, distribute_module
from torch.utils.checkpoint import checkpoint

from fsdp_compile import backend, fully_shard
from fsdp_compile._torch.tensors import memory_id
from fsdp_compile.ir.graph import Role, StepGraph, record_of
from fsdp_compile.ir.queries import is_alias, module_of
from fsdp_compile.lower.compiled_regions import regions_of
from fsdp_compile.modules.eager_reads import GatheredParameter
from fsdp_compile.runtime.module_state import state_of
from tests import long
from tests.fake_world import fake_world
from tests.ranks import run_ranks

WIDTH = 8
LAYERS = 4


class Block(nn.Module):
    """A residual layer of two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, 2 * WIDTH)
        self.b = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(torch.relu(self.a(x)))


class _ReadTwice(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(torch.relu(self.a(x))) + (self.a.weight * self.a.weight).sum() * self.b.weight.sum()


class _Frozen(Block):
    def __init__(self) -> None:
        super().__init__()
        self.a.requires_grad_(False)  # noqa: FBT003  torch's


class _Drops(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.dropout(self.b(torch.relu(self.a(x))), 0.5, self.training)


class _Counts(Block):
    """Writes into a buffer, which no region that stays may do."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return super().forward(x) * self.calls


class _Ignores(_Counts):
    """Its region reads no parameter, and writes into a buffer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(x.detach().sum())
        return x * self.calls.sigmoid()


class _Normalizes(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(super().forward(x))


class _Activates(Block):
    """Its activation writes into the region's input: torch's modules say so by position."""

    def __init__(self) -> None:
        super().__init__()
        self.activation = nn.LeakyReLU(0.1, inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.activation(x))


class _Checkpoints(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return result


class _Branches(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.cond(x.sum() > 0, lambda v: self.b(torch.relu(self.a(v))), lambda v: self.b(self.a(v)), (x,))


class _Autocasts(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return x + self.b(torch.relu(self.a(x))).float()


class _CastsItself(Block):
    """A cast of the parameter, which moves to the other side of its all-gather."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.a.weight.to(torch.bfloat16)
        return x + self.b(torch.relu(x.to(torch.bfloat16) @ weight.t()).float())


class _Pair(Block):
    """Takes and returns two values."""

    def forward(self, x: Any) -> Any:
        value, other = x if isinstance(x, tuple) else (x, x.sin())
        return super().forward(value) * other, other.cos()


class _WithoutGradient(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = self.a.weight.abs().amax()
        return super().forward(x) / scale


class _ReturnsAParameter(Block):
    def forward(self, x: Any) -> Any:
        value = x[0] if isinstance(x, tuple) else x
        return super().forward(value), self.a.bias


class _Complex(Block):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.polar(torch.ones(WIDTH), torch.arange(WIDTH) / WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward((x * self.turn).real)


class _TakesLocal(Block):
    """Computes with what this rank has of parameters that are DTensors."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = (weight.to_local() for weight in (self.a.weight, self.b.weight) if isinstance(weight, DTensor))
        return x + torch.relu(x @ a.t()) @ b.t()


class Model(nn.Module):
    """Blocks of a class between two layers; with `shared`, one block is called again and again."""

    def __init__(self, block: type[Block], *, shared: bool = False, layers: int = LAYERS) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([block()] * layers if shared else [block() for _ in range(layers)])
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value: Any = self.first(x)
        for layer in self.layers:
            value = layer(value)
        result: torch.Tensor = self.last(value[0] if isinstance(value, tuple) else value)
        return result


def marked(block: type[Block]) -> type[Block]:
    """A block whose forward is a region."""
    region = torch.compiler.nested_compile_region(block.forward)
    return type(f"Marked{block.__name__}", (block,), {"forward": region})


@dataclasses.dataclass(frozen=True)
class How:
    """How a model is sharded, compiled and trained."""

    sharding: dict[str, Any] = dataclasses.field(default_factory=dict)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    microbatches: int = 1
    is_shared: bool = False
    replicas: int = 0
    dynamic: bool | None = None
    gathers_dtensors: bool = False


EAGER: dict[str, Any] = {"lower": "eager"}


@dataclasses.dataclass(frozen=True)
class _Trained:
    """What came of some steps on one rank.

    Attributes:
        numbers: Losses, then all parameters.
        sent: The collectives of each graph: operator, and the inputs that it takes.
        once: How many calls of regions were traced once.
    """

    numbers: list[torch.Tensor]
    sent: list[list[str]]
    once: int


def _steps(model: nn.Module) -> list[StepGraph]:
    state = state_of(model)
    assert state is not None
    assert state.model is not None
    return [step for region in regions_of(state.model.units) for step in region.steps]


def _sent(model: nn.Module) -> list[list[str]]:
    return [
        [
            f"{node.target} {[_type(given.meta['val']) for given in node.all_input_nodes]}"
            for node in step.nodes(Role.GATHER, Role.REDUCE, Role.REPLICATE)
        ]
        for step in _steps(model)
    ]


def _type(value: torch.Tensor) -> str:
    return f"{value.dtype} {tuple(value.shape)}"


def _trained(block: type[Block], how: How) -> _Trained:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any = Model(block, shared=how.is_shared)
    sharding = dict(how.sharding)
    if how.replicas:
        shape = (how.replicas, dist.get_world_size() // how.replicas)
        sharding["mesh"] = dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    if how.gathers_dtensors:
        mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
        for layer in model.layers:
            distribute_module(layer, mesh["tp"])
        sharding["mesh"] = mesh["dp"]
    for layer in dict.fromkeys(model.layers):
        fully_shard(layer, **sharding)
    fully_shard(model, **sharding)
    compiled = torch.compile(model, backend="fsdp", options={**EAGER, **how.options}, dynamic=how.dynamic)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found: list[torch.Tensor] = []
    stayed = 0
    find = backend.traced_once

    def counted(graph: fx.Graph) -> frozenset[fx.Node]:
        nonlocal stayed
        calls = find(graph)
        stayed += len(calls)
        return calls

    backend.traced_once = counted
    try:
        for step in range(3):
            for micro in range(how.microbatches):
                torch.manual_seed(100 * dist.get_rank() + 10 * step + micro)
                model.set_requires_gradient_sync(micro == how.microbatches - 1)
                loss = compiled(torch.randn(4, WIDTH)).square().mean()
                loss.backward()
                found.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            found.append(compiled(torch.ones(4, WIDTH)))
    finally:
        backend.traced_once = find
    found += [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return _Trained([value.detach().clone() for value in found], _sent(model), stayed)


def _both(block: type[Block], how: How) -> int:
    """Asserts that regions change no bit; returns how many calls of regions were traced once."""
    expected, actual = _trained(block, how), _trained(marked(block), how)
    assert expected.once == 0
    assert actual.sent == expected.sent or block is _Checkpoints
    for one, other in zip(expected.numbers, actual.numbers, strict=True):
        assert torch.equal(one, other), (one - other).abs().max()
    return actual.once


STAYS: dict[str, tuple[type[Block], How]] = {
    "plain": (Block, How()),
    "reads a parameter twice": (_ReadTwice, How()),
    "frozen": (_Frozen, How()),
    "casts itself": (_CastsItself, How()),
    "pairs": (_Pair, How()),
    "without a gradient": (_WithoutGradient, How()),
    "sharded gradients alone": (Block, How({"reshard_after_forward": False})),
    "bfloat16": (Block, How({"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)})),
    "accumulates": (Block, How(microbatches=2)),
    "hybrid": (Block, How(replicas=2)),
    "complex": (_Complex, How()),
    "offloads": (Block, How({"offload_policy": CPUOffloadPolicy()})),
    "one by one": (Block, How(options={"bucket_mb": 0, "prefetch": 1})),
    "drops": (_Drops, How()),
    "autocasts": (_Autocasts, How()),
}
INLINED: dict[str, tuple[type[Block], How]] = {
    "open sizes": (Block, How(dynamic=True)),
    "writes": (_Counts, How()),
    "writes and reads nothing": (_Ignores, How()),
    "normalizes": (_Normalizes, How()),
    "activates in place": (_Activates, How()),
    "checkpoints": (_Checkpoints, How()),
    "branches": (_Branches, How()),
    "shares one block": (Block, How(is_shared=True)),
    "post-forward shards": (Block, How({"reshard_after_forward": 2})),
    "a budget": (Block, How(options={"memory_budget_gb": 1.0})),
    "sharded embeddings": (Block, How(options={"embedding": "sharded"})),
    "gathers DTensors": (_TakesLocal, How(gathers_dtensors=True)),
}


@long.parametrize("name", [*STAYS, *INLINED], always=["plain", "casts itself", "writes", "activates in place"])
def test_regions_change_no_bit(name: str) -> None:
    """Also what is sent is the same, unless the program says itself what is recomputed."""
    block, how = {**STAYS, **INLINED}[name]
    world = 4 if how.replicas or how.gathers_dtensors or how.sharding.get("reshard_after_forward") == 2 else 2
    once = set(run_ranks(_both, block, how, world_size=world))
    assert (min(once) >= LAYERS) if name in STAYS else (once == {0})


@pytest.mark.long
def test_regions_share_their_code() -> None:
    how = How(options={"lower": "inductor", "share_code": True})
    assert min(run_ranks(_both, Block, how)) >= LAYERS


class _Ticks(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(_tick(x))


_ticks = 0


@torch.library.custom_op("fsdp_test_regions::tick", mutates_args=())
def _tick(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@_tick.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    global _ticks  # noqa: PLW0603  counts traces
    _ticks += 1
    return torch.empty_like(x)


torch.library.register_autograd("fsdp_test_regions::tick", lambda _ctx, grad: grad)


def _count(block: type[Block], layers: int) -> int:
    """How often the layers of a model are traced, by Dynamo and by AOTAutograd, in one training step."""
    before = _ticks
    torch._dynamo.reset()
    model = Model(block, layers=layers)
    compiled = torch.compile(model, backend="fsdp", options=EAGER)
    with fake_world(2):
        compiled(torch.randn(4, WIDTH)).sum().backward()
    return _ticks - before


def test_a_region_is_traced_once() -> None:
    """However many layers there are: without regions, each layer is traced."""
    assert _count(marked(_Ticks), 7) == _count(marked(_Ticks), 3)
    assert _count(_Ticks, 7) > _count(_Ticks, 3)


def test_nodes_belong_to_the_layer_that_is_called() -> None:
    with fake_world(2):
        model = Model(marked(Block))
        torch.compile(model, backend="fsdp", options=EAGER)(torch.randn(4, WIDTH)).sum().backward()
        steps = _steps(model)
    for step in steps:
        modules = {module_of(node) for node in step.graph.nodes if node.op == "call_function"}
        assert {f"layers.{number}.{name}" for number in range(LAYERS) for name in "ab"} <= modules


def test_views_of_what_a_call_passes_are_known_as_such() -> None:
    """Inductor and AOTAutograd ask the memory of fake values which of them they may overwrite."""
    with fake_world(2):
        model = Model(marked(_Views))
        torch.compile(model, backend="fsdp", options=EAGER)(torch.randn(4, WIDTH)).sum().backward()
        steps = _steps(model)
    for step in steps:
        views = {node: node.all_input_nodes[0] for node in step.graph.nodes if is_alias(node)}
        own = {node: source for node, source in views.items() if record_of(node) is record_of(source) is None}
        assert own
        for node, source in own.items():
            assert memory_id(node.meta["val"]) == memory_id(source.meta["val"]), node.format_node()


class _Views(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.view(2, -1, WIDTH)
        return super().forward(rows.transpose(0, 1).reshape(-1, WIDTH)) * rows.flatten(0, 1)


def test_a_parameter_that_a_region_returns_is_one() -> None:
    with fake_world(2):
        model = _ReturnsLast(marked(_ReturnsAParameter))
        compiled = torch.compile(model, backend="fsdp", options=EAGER)
        _, bias = compiled(torch.randn(4, WIDTH))
    assert isinstance(bias, GatheredParameter)


class _ReturnsLast(Model):
    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


class _TakesDTensor(Block):
    def forward(self, x: Any) -> torch.Tensor:
        return super().forward(x.to_local())


class _PassesDTensors(Model):
    def __init__(self, block: type[Block]) -> None:
        super().__init__(block)
        self.mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(DTensor.from_local(x, self.mesh))
        return x


def test_a_region_that_is_called_with_dtensors_is_inlined(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[frozenset[fx.Node]] = []
    find = backend.traced_once

    def noted(graph: fx.Graph) -> frozenset[fx.Node]:
        found.append(find(graph))
        return found[-1]

    monkeypatch.setattr(backend, "traced_once", noted)
    x, losses = torch.randn(4, WIDTH), []
    with fake_world(1):
        for block in (_TakesDTensor, marked(_TakesDTensor)):
            torch._dynamo.reset()
            torch.manual_seed(0)
            loss = torch.compile(_PassesDTensors(block), backend="fsdp", options=EAGER)(x).sum()
            loss.backward()
            losses.append(loss.detach())
    assert torch.equal(*losses)
    assert set(found) == {frozenset()}


class _Later(Block):
    """Its class gets another forward when models of it are sharded."""


@pytest.mark.parametrize("compiles", [False, True])
def test_a_class_may_be_patched_when_models_of_it_are_sharded(compiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: FBT001
    """Also the forward of models that have been called; marked later, it is a region."""
    own = _Later.forward
    x = torch.randn(4, WIDTH)
    with fake_world(1):
        model = nn.Sequential(_Later())
        fully_shard(model[0])
        fully_shard(model)
        run = torch.compile(model, backend="fsdp", options=EAGER) if compiles else model
        once = run(x)
        monkeypatch.setattr(_Later, "forward", lambda self, x: 2 * own(self, x))
        assert torch.equal(run(x), 2 * once)
        monkeypatch.setattr(_Later, "forward", torch.compiler.nested_compile_region(own))
        assert torch.equal(run(x), once)
    with fake_world(2):
        assert _trained(_Later, How()).once >= LAYERS
