"""Blocks that are compiled one by one: FSDP2's bits, however they come to be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import fsdp_compile
from fsdp_compile import backend
from fsdp_compile._torch.dynamo import traced_module
from fsdp_compile.errors import ConfigError
from fsdp_compile.fsdp2.take_over import model_of
from fsdp_compile.lower.eager import compile_eagerly as compile_eagerly_of_ours
from fsdp_compile.optim.step_in_backward import step_in_backward
from tests import long
from tests.fsdp2.blocks import Deep, by_blocks, pipeline_of
from tests.fsdp2.decoder import Block, Decoder, Tied, batch, cross_entropy, gathered_by_hooks, pair_of, shard
from tests.ranks import run_ranks
from tests.two_sides import WithFsdp2, compile_eagerly, compile_in_place, made

pytestmark = pytest.mark.core
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class _Checkpointed(Deep):
    def call(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, x, use_reentrant=False)


class _Reentrant(Deep):
    """The backward of each block runs inside of the model's."""

    def call(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, x, use_reentrant=True)


# Bits of FSDP2.

LAYOUTS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "fp32": (Deep, {}),
    "bf16": (Deep, {"mp_policy": BF16}),
    "kept": (Deep, {"reshard_after_forward": False}),
    "checkpointed": (_Checkpointed, {"mp_policy": BF16}),
    "reentrant": (_Reentrant, {"mp_policy": BF16}),
    "tied": (Tied, {}),
    "host": (Deep, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
}


def _trains(layout: str, mesh: tuple[int, ...], options: dict[str, Any]) -> None:
    make, settings = LAYOUTS[layout]
    names = ("replicate", "shard")[-len(mesh) :]
    of = {"mesh": init_device_mesh("cpu", mesh, mesh_dim_names=names), **settings}
    pair = by_blocks(pair_of(make, **of), reduce_layout="fsdp2", **options)
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


@long.parametrize("layout", LAYOUTS, always=["bf16"])
def test_numbers_are_those_of_fsdp2(layout: str) -> None:
    run_ranks(_trains, layout, (2,), {})


@long.parametrize("layout", ["fp32", "bf16", "checkpointed"], always=[])
def test_numbers_of_hybrid_sharding(layout: str) -> None:
    run_ranks(_trains, layout, (2, 2), {}, world_size=4)


def _trains_neighbours() -> None:
    _trains("fp32", (4,), {})
    pair = by_blocks(pair_of(Deep, reshard_after_forward=2), reduce_layout="fsdp2")
    pair.train(steps=3)


@pytest.mark.long
def test_numbers_of_shards_over_neighbours() -> None:
    run_ranks(_trains_neighbours, world_size=4)


@long.parametrize("prefetch", [0, 1, 3, "BACKWARD_PRE", "BACKWARD_POST+forward_prefetch", "none"], always=[])
def test_numbers_do_not_depend_on_the_distance(prefetch: Any) -> None:
    run_ranks(_trains, "fp32", (2,), {"prefetch": prefetch})


def _updates_in_backward() -> None:
    pair = by_blocks(pair_of(Deep))
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

    pair = WithFsdp2(Deep, shard, batch, cross_entropy, ours=ours)
    with gathered_by_hooks() as titles:
        pair.train(steps=3)
    assert "blocks.2" not in titles[12:]
    assert pipeline_of(pair)._forward.next


@pytest.mark.parametrize("order", ["compiled first", "sharded first"])
def test_loops_of_users_over_blocks(order: str) -> None:
    run_ranks(_loops, order)


def _counts() -> tuple[int, int]:
    counts = []
    for regions in ("blocks", "whole"):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        pair = pair_of(Deep)
        pair.compiled(fullgraph=False, regions=regions)
        pair.train(steps=3)
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return counts[0], counts[1]


@pytest.mark.long
def test_like_blocks_share_one_graph() -> None:
    """One for the embedding, one for blocks, one for the head."""
    assert run_ranks(_counts) == [(3, 1)] * 2


def _of_inductor(options: dict[str, Any]) -> list[str]:
    """What Inductor compiles of a model's blocks."""
    compiled: list[str] = []

    def compile_one(gm: fx.GraphModule, inputs: Any, region: Any, _settings: Any) -> Any:
        compiled.append(type(traced_module()).__name__)
        return compile_eagerly_of_ours(gm, inputs, region)

    with mock.patch.object(backend, "compile_with_inductor", compile_one):
        pair = pair_of(Deep)
        pair.call = torch.compile(pair.model, backend="fsdp", options={"regions": "blocks", **options})
        pair.train(steps=2)
    return compiled


def test_inductor_compiles_no_embedding_or_head_alone_unless_it_has_settings() -> None:
    assert run_ranks(_of_inductor, {}) == [["FSDPBlock"]] * 2
    settings = {"inductor": {"max_autotune": False}}
    assert run_ranks(_of_inductor, settings) == [["FSDPEmbedding", "FSDPBlock", "FSDPLinear"]] * 2


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


class _Summed:
    """A user's reduction, which no graph knows: it counts its calls."""

    calls = 0

    def __call__(self, _state: object, gradient: torch.Tensor, output: torch.Tensor) -> None:
        self.calls += 1
        dist.reduce_scatter_tensor(output, gradient)
        output.div_(dist.get_world_size())


def _with_comm_hook() -> int:
    pair, hook = pair_of(Deep), _Summed()
    fsdp_compile.register_comm_hook(pair.model, hook)
    by_blocks(pair).train(steps=3)
    return hook.calls


def test_a_reduction_of_the_users() -> None:
    """It is called for each of the six units that are compiled, and averages as FSDP2 does for two ranks."""
    assert all(calls >= 3 * 6 for calls in run_ranks(_with_comm_hook))


def _list_unit() -> None:
    def listed(model: Any) -> None:
        for block in model.blocks:
            fully_shard(block)
        fully_shard([model.norm, model.head])
        fully_shard(model)

    pair = by_blocks(pair_of(Deep, sharded=listed))
    with gathered_by_hooks() as titles:
        pair.train(steps=3)
    assert set(titles) == {"(root)"}


def test_a_unit_of_several_modules() -> None:
    run_ranks(_list_unit)


def _without_root() -> None:
    def blocks_alone(model: Any) -> None:
        for block in model.blocks:
            fully_shard(block)

    def compiled_alone(model: Any) -> None:
        blocks_alone(model)
        for block in model.blocks:
            compile_in_place(block)

    pair = WithFsdp2(Deep, blocks_alone, batch, cross_entropy, ours=compiled_alone)
    with gathered_by_hooks() as titles:
        pair.train(steps=3)
    assert not titles[8:]


def test_blocks_without_a_root() -> None:
    run_ranks(_without_root)
