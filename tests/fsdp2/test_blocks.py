"""Blocks that are compiled one by one: FSDP2's bits, however they come to be."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import fsdp_compile
from fsdp_compile import backend
from fsdp_compile._torch.dynamo import traced_module
from fsdp_compile.errors import ConfigError, UnsupportedModelError
from fsdp_compile.lower.eager import compile_eagerly as compile_eagerly_of_ours
from fsdp_compile.lower.region import regions_of
from fsdp_compile.optim.step_in_backward import step_in_backward
from tests import long
from tests.fsdp2.decoder import (
    Block,
    Decoder,
    Deep,
    Tied,
    batch,
    by_blocks,
    cross_entropy,
    gathered_by_hooks,
    pair_of,
    shard,
    shard_lists,
)
from tests.models.layers import InARow
from tests.ranks import on_ranks
from tests.two_sides import (
    MIXED,
    REDUCED_TWICE,
    Averaging,
    WithFsdp2,
    compile_eagerly,
    compile_in_place,
    made,
    mesh_of,
    shard_blocks,
    taken_over,
    unique_graphs,
)

pytestmark = pytest.mark.core


class _Checkpointed(Deep):
    """With reentrant checkpoints the backward of each block runs inside of the model's."""

    reentrant = False

    def call(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, x, use_reentrant=self.reentrant)


class _Reentrant(_Checkpointed):
    reentrant = True


# Bits of FSDP2.

LAYOUTS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "fp32": (Deep, {}),
    "bf16": (Deep, {"mp_policy": MIXED}),
    "kept": (Deep, {"reshard_after_forward": False}),
    "checkpointed": (_Checkpointed, {"mp_policy": MIXED}),
    "reentrant": (_Reentrant, {"mp_policy": MIXED}),
    "tied": (Tied, {}),
    "host": (Deep, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
}
DISTANCES = (1, 3, "BACKWARD_POST+forward_prefetch")  # others: tests/numerics/fsdp2/test_options.py
CASES: list[tuple[str, tuple[int, ...], dict[str, Any]]] = [
    *((layout, (2,), {}) for layout in LAYOUTS),
    *((layout, (2, 2), {}) for layout in ("fp32", "bf16", "checkpointed")),
    ("fp32", (4,), {}),
    *(("fp32", (2,), {"prefetch": distance}) for distance in DISTANCES),
]


@long.parametrize(("layout", "mesh", "options"), CASES, always=[("bf16", (2,), {})])
@on_ranks(world_size=lambda mesh, **_: torch.Size(mesh).numel())
def test_numbers_are_those_of_fsdp2(layout: str, mesh: tuple[int, ...], options: dict[str, Any]) -> None:
    make, settings = LAYOUTS[layout]
    pair = by_blocks(pair_of(make, mesh=mesh_of(mesh), **settings), reduce_layout="fsdp2", **options)
    with gathered_by_hooks() as titles:
        pair.train(steps=2)
        pair.train(pair.call, pair.call, pair.call, steps=1)  # microbatches
    units = {unit.title for unit in taken_over(pair.model).units}
    assert set(titles) == ({"(root)", "embedding+head"} if layout == "tied" else {"(root)"}) & units
    with torch.no_grad():
        mine, theirs = (call.eval()(batch(9)) for call in (pair.call, pair.other))
    assert torch.equal(mine, theirs)
    pair.change(lambda model: model.train())
    pair.train(steps=1)


@pytest.mark.long
@on_ranks(world_size=4)
def test_numbers_of_shards_over_neighbours() -> None:
    by_blocks(pair_of(Deep, reshard_after_forward=2), reduce_layout="fsdp2").train(steps=3)


@on_ranks()
def test_numbers_of_updates_in_backward() -> None:
    pair = by_blocks(pair_of(Deep))
    pair.optimize()
    step_in_backward(pair.optimizers[0][0])
    for _ in range(3):
        pair.backward()
        pair.update()
        pair.compare_parameters()


@on_ranks()
def test_reentrant_blocks_reduce_gradients_of_microbatches_once() -> None:
    """Not at the end of each backward that runs inside of the model's."""
    pair = by_blocks(pair_of(_Reentrant))
    got: list[nn.Parameter] = []
    for parameter in pair.model.parameters():
        parameter.register_post_accumulate_grad_hook(got.append)
    pair.train(pair.call, pair.call, steps=2)
    assert len(got) == 2 * len(list(pair.model.parameters()))


# How blocks come to be compiled one by one.


@pytest.mark.parametrize("order", ["compiled first", "sharded first", "no root"])
@on_ranks()
def test_loops_of_users_over_blocks(order: str) -> None:
    def theirs(model: Any) -> None:
        if order == "no root":
            for block in model.blocks:
                fully_shard(block)
        else:
            shard(model)

    def ours(model: Any) -> None:
        for do in (compile_in_place, theirs) if order == "compiled first" else (theirs, compile_in_place):
            for part in model.blocks if do is compile_in_place else [model]:
                do(part)

    pair = WithFsdp2(Deep, theirs, batch, cross_entropy, ours=ours)
    with gathered_by_hooks() as titles:
        pair.train(steps=3)
    assert not [title for title in titles[12:] if title.startswith("blocks")]
    assert order == "no root" or taken_over(pair.model).pipeline._forward.next


@pytest.mark.long
@on_ranks()
def test_like_blocks_share_one_graph() -> None:
    """One for the embedding, one for blocks, one for the head."""
    counts = []
    for regions in ("blocks", "whole"):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        pair = pair_of(Deep)
        pair.compiled(fullgraph=False, regions=regions)
        pair.train(steps=3)
        counts.append(unique_graphs())
    assert counts == [3, 1]


@on_ranks()
def test_units_of_other_kinds_make_no_size_vary() -> None:
    """Dynamo takes a size for a symbol where code of one name was called with another size before."""
    pair = pair_of(Decoder)
    by_blocks(pair)
    pair.train(steps=2)
    graphs = [step.graph for region in regions_of(taken_over(pair.model).units) for step in region.steps]
    inputs = [node.meta["val"] for graph in graphs for node in graph.find_nodes(op="placeholder")]
    assert torch.SymInt not in set(map(type, inputs))


@on_ranks()
def test_inductor_compiles_no_embedding_or_head_alone_unless_it_has_settings() -> None:
    compiled: list[str] = []

    def compile_one(gm: fx.GraphModule, inputs: Any, region: Any, _settings: Any) -> Any:
        compiled.append(type(traced_module()).__name__)
        return compile_eagerly_of_ours(gm, inputs, region)

    every = ["FSDPEmbedding", "FSDPBlock", "FSDPLinear"]
    given: list[tuple[dict[str, Any], list[str]]] = [({}, every[1:2]), ({"inductor": {"max_autotune": False}}, every)]
    for options, expected in given:
        torch._dynamo.reset()
        compiled.clear()
        with mock.patch.object(backend, "compile_with_inductor", compile_one):
            pair = pair_of(Deep)
            pair.call = torch.compile(pair.model, backend="fsdp", options={"regions": "blocks", **options})
            pair.train(steps=2)
        assert compiled == expected


@on_ranks()
def test_what_is_refused() -> None:
    sharded, alone = Decoder(), Block()
    shard(sharded)
    fully_shard(alone)
    function = compile_eagerly(lambda tokens: sharded(tokens).square(), regions="blocks")
    refused: dict[str, Callable[[], object]] = {
        r"blocks are compiled one by one by torch\.compile\(model\)": lambda: function(batch(0)),
        "no unit below its root": lambda: compile_eagerly(alone, regions="blocks")(torch.randn(2, 16)),
        "is a part of its model": lambda: compile_eagerly(Decoder(), regions="blocks", memory_budget_gb=1.0)(batch(0)),
        "regions": lambda: compile_eagerly(Decoder(), regions="layers")(batch(0)),
    }
    for says, call in refused.items():
        with pytest.raises((ConfigError, torch._dynamo.exc.BackendCompilerFailed), match=says):
            call()


def _wide() -> nn.Module:
    """Of weights that are large enough for messages of their own."""
    return InARow(nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(3))


class _Selective(nn.Module):
    """Blocks that are computed again, but for their products."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        save = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, context_fn=save)
        return x


def _checkpointed() -> tuple[_Selective, Any, Any, torch.Tensor]:
    """Like models, one plain, one sharded, the latter compiled; and a batch."""
    torch.manual_seed(0)
    plain = _Selective()
    sharded = copy.deepcopy(plain)
    for block in sharded.blocks:
        fully_shard(block)
    fully_shard(sharded)
    compiled = torch.compile(sharded, backend="fsdp", options={"regions": "blocks", "lower": "eager"})
    return plain, sharded, compiled, torch.randn(4, 8)


@on_ranks()
def test_selective_checkpointing_around_blocks() -> None:
    plain, sharded, compiled, x = _checkpointed()
    for _ in range(3):
        for model in (plain, compiled):
            model.zero_grad()
            model(x).square().sum().backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(sharded.get_parameter(name).grad.full_tensor(), parameter.grad)


@on_ranks()
def test_given_values_after_blocks_were_computed_again() -> None:
    plain, _, compiled, x = _checkpointed()
    compiled(x).sum().backward()
    given = {name: torch.randn_like(parameter) for name, parameter in plain.named_parameters()}
    with torch.no_grad():
        found = torch.func.functional_call(compiled, {f"_orig_mod.{name}": each for name, each in given.items()}, x)
        torch.testing.assert_close(found, torch.func.functional_call(plain, given, x))


@on_ranks()
def test_gradients_of_gradients_are_refused() -> None:
    _, sharded, compiled, x = _checkpointed()
    with pytest.raises(UnsupportedModelError, match="double backward"):
        compiled(x).square().sum().backward(create_graph=True)
    assert all(parameter.grad is None for parameter in sharded.parameters())


@on_ranks()
def test_gathers_in_8_bits() -> None:
    sides = []
    for regions in ("blocks", "whole"):
        torch._dynamo.reset()
        model = shard_blocks(made(_wide), mp_policy=fsdp_compile.MixedPrecision(gather_dtype=torch.int8))
        call = compile_eagerly(model, regions=regions)
        for step in range(3):
            model.zero_grad()
            call(torch.randn(4, 128, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        params = [param for group in taken_over(model).groups for param in group.params]
        assert {param.spec.gather_format for param in params} == {"", "int8"}
        sides.append([parameter.grad.to_local() for parameter in model.parameters()])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*sides, strict=True))


@on_ranks()
def test_a_reduction_of_the_users() -> None:
    """It is called for each of the six units that are compiled, and averages as FSDP2 does for two ranks."""
    pair, average = pair_of(Deep), Averaging()
    fsdp_compile.register_comm_hook(pair.model, average)
    by_blocks(pair).train(steps=3)
    assert len(average.calls) >= 3 * 6


@on_ranks()
def test_a_unit_of_several_modules() -> None:
    pair = by_blocks(pair_of(Deep, sharded=shard_lists))
    with gathered_by_hooks() as titles:
        pair.train(steps=3)
    assert set(titles) == {"(root)"}


def _gathers_late(call: Any, tokens: torch.Tensor) -> torch.Tensor:
    loss = cross_entropy(call, tokens)
    call.blocks[0].unshard(async_op=True)
    return loss


@on_ranks()
def test_a_gather_that_only_the_end_of_the_backward_waits_for() -> None:
    by_blocks(pair_of(Deep), reduce_layout="fsdp2").train(steps=2, loss=_gathers_late)


@on_ranks()
def test_a_list_of_a_unit_that_the_user_has_gathered_says_nothing() -> None:
    pair = by_blocks(pair_of(Deep), reduce_layout="fsdp2")
    for each in pair:
        each.blocks[0].set_modules_to_forward_prefetch([each.blocks[2]])
        each.blocks[0].unshard()
    pair.train(steps=2)


class _Headless(Deep):
    """Its head is called outside of it, and so begins each backward."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.norm(self.hidden(tokens))


def _of_its_head(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model.head(model(tokens)).flatten(0, 1), tokens.flatten())


@on_ranks()
def test_a_block_outside_of_the_root() -> None:
    """Gradients of microbatches of the root's own unit, which FSDP2's hooks gather, are reduced once."""
    pair = by_blocks(pair_of(_Headless, loss=_of_its_head), reduce_layout="fsdp2")
    pair.train(pair.call, pair.call, steps=2)


class _Broken(Deep):
    """Its root's code has graph breaks: it prints, looks at a value, and calls what no compiler knows."""

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            if x.detach().sum().item() > 1e9 or number < 0:
                break
            torch._dynamo.graph_break()
            x = self.call(block, x)
        return x


@on_ranks()
def test_graph_breaks_in_the_root() -> None:
    torch._dynamo.utils.counters.clear()
    pair = by_blocks(pair_of(_Broken))
    with gathered_by_hooks() as titles:
        pair.train(steps=3)
    assert set(titles) == {"(root)"}
    assert unique_graphs() == 3


@pytest.mark.long
@on_ranks()
def test_lengths_that_change_compile_no_more_than_with_fsdp2() -> None:
    """Block by block the embedding and the head are compiled, too, for each number of dimensions that changes."""
    counts = []
    for compiles in (compile_in_place, lambda block: block.compile(backend="aot_eager"), None):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()

        def ours(model: Any, compiles: Any = compiles) -> None:
            shard(model)
            for block in model.blocks if compiles is not None else ():
                compiles(block)

        pair = WithFsdp2(Deep, shard, lambda step: batch(step, (2, 5 + 3 * (step % 6))), cross_entropy, ours=ours)
        if compiles is None:
            by_blocks(pair)
        pair.train(steps=12, within=REDUCED_TWICE)
        counts.append(unique_graphs())
    looped, theirs, one_by_one = counts
    assert looped <= theirs
    assert one_by_one <= theirs + 2 * theirs


@pytest.mark.long
@on_ranks()
def test_blocks_of_one_unit_that_are_computed_again() -> None:
    """The model is taken over within the first forward, after FSDP2 has begun to gather that unit."""

    def sharded(model: Any) -> None:
        fully_shard(list(model.blocks))
        fully_shard([model.norm, model.head])
        fully_shard(model)

    def compiled(model: Any) -> None:
        sharded(model)
        for block in model.blocks:
            compile_in_place(block, reduce_layout="fsdp2")

    WithFsdp2(_Checkpointed, sharded, batch, cross_entropy, ours=compiled).train(steps=2)
