"""Tensor and context parallelism and grouped experts, compiled: bit for bit what FSDP2 makes of the same model."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor, Shard

import fsdp_compile
from fsdp_compile.ir.graph import StepGraph
from fsdp_compile.passes.follow_order import NewOrder
from fsdp_compile.passes.hide_own_collectives import HideOwnCollectives
from tests import long
from tests.models.context_parallel import (
    LENGTH,
    PositionedLlama,
    cpu_kernels,
    sequences,
    split_attention,
    split_by_context,
    split_by_modules,
)
from tests.models.grouped_experts import MixtureOfExperts, deepseek, mixtral
from tests.models.tensor_parallel import VOCABULARY, Llama, split
from tests.numerics.one_process.measure import adamw_with_eps
from tests.ranks import on_ranks
from tests.two_sides import BITS, MIXED, WithFsdp2, Within, close, compile_eagerly, made, mean_over_ranks, sgd, whole

STEPS = 2


def _other_dimension(parameter: torch.nn.Parameter) -> Shard:
    """Shards a matrix over the dimension that tensor parallelism has left."""
    placements = parameter.placements if isinstance(parameter, DTensor) and parameter.ndim == 2 else ()
    return next((Shard(1 - p.dim) for p in placements if isinstance(p, Shard)), Shard(0))


@dataclasses.dataclass(frozen=True)
class _Case:
    """How the model is split and sharded."""

    mesh: tuple[int, ...] = (2, 2)  # its shape: (dp, tp), or (replicate, shard, tp)
    sequence: bool = False  # whether norms are split over tokens
    hidden: int = 24  # units of the feed-forward layers
    layers: int = 1  # how many
    micro_batches: int = 1  # of which all but the last are not reduced
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)  # of `fully_shard`


CASES = {
    "two layers": _Case(layers=2),
    "split tokens, bf16": _Case(sequence=True, arguments={"mp_policy": MIXED}),
    "uneven rows": _Case(hidden=6),
    "the other dimension": _Case(arguments={"shard_placement_fn": _other_dimension}),
    "replicas": _Case(mesh=(2, 1, 2)),
    "unsharded until backward": _Case(arguments={"reshard_after_forward": False}),
    "accumulated": _Case(micro_batches=2),
    "offloaded": _Case(arguments={"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "tensor parallel alone": _Case(mesh=(1, 4)),
    "data parallel alone": _Case(mesh=(4, 1)),
}


ROUNDED = Within((1e-3, 1e-5), (1e-3, 1e-5), (1e-3, 1e-5))


def _pair(name: str, ours: Any) -> WithFsdp2:
    """FSDP2 on one side, and what `ours` has sharded on the other."""
    case = CASES[name]
    names = ("dp", "tp") if len(case.mesh) == 2 else ("replicate", "dp", "tp")
    # One mesh: DTensor's caches give equal ones for each other, and FSDP2 wants the very one.
    world = init_device_mesh("cpu", case.mesh, mesh_dim_names=names)
    mesh = world["dp"] if len(case.mesh) == 2 else world["replicate", "dp"]
    place = dist.get_rank() // world["tp"].size()  # ranks that split a model see one batch

    def shard(model: Any, fully_shard: Any = fsdp2) -> None:
        for module in (*model.layers, model):
            fully_shard(module, mesh=mesh, **case.arguments)

    def batch(step: int) -> torch.Tensor:
        return torch.randint(0, VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(10 * step + place))

    return WithFsdp2(
        lambda: split(Llama(case.layers, case.hidden), world["tp"], sequence=case.sequence),
        shard,
        batch,
        lambda call, tokens: call(tokens),
        ours=lambda model: shard(model, ours),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3),
    )


def _clipped(name: str, within: Within, lower: str = "eager") -> None:
    pair = _pair(name, fsdp_compile.fully_shard)
    call = pair.compiled(fullgraph=False, lower=lower)
    for _ in range(STEPS):
        pair.accumulate(*[call] * CASES[name].micro_batches, within=within)
        # torch's own does not mix the meshes of split and whole parameters.
        norm, expected = (fsdp_compile.clip_grad_norm_(model, 1.0) for model in pair)
        close(norm, expected, "norm", within.loss)
        pair.update()
        pair.compare_parameters(within)


@pytest.mark.long
@pytest.mark.inductor
@pytest.mark.parametrize("name", ["two layers", "uneven rows"])
@on_ranks(world_size=4, timeout_s=500)
def test_inductor(name: str) -> None:
    _clipped(name, ROUNDED, "inductor")


@pytest.mark.core
@long.parametrize("name", CASES, always=["split tokens, bf16"])
@on_ranks(world_size=4, timeout_s=500)
def test_compiled(name: str) -> None:
    """The order of a backward is changed to hide collectives of tensor parallelism where there are such."""
    orders: list[int] = []
    apply = HideOwnCollectives.apply

    def noted(self: HideOwnCollectives, step: StepGraph, plan: NewOrder) -> None:
        orders.append(len(plan.order))
        apply(self, step, plan)

    with mock.patch.object(HideOwnCollectives, "apply", noted):
        _clipped(name, BITS)
    assert any(orders) == (CASES[name].mesh[-1] > 1)


MICROBATCHES: list[tuple[str, tuple[bool, ...]]] = [
    *((name, (True,) * case.micro_batches) for name, case in CASES.items()),
    ("accumulated", (False, True)),
    ("accumulated", (True, False)),
]


@long.parametrize(("name", "compiled"), MICROBATCHES, always=[])
@on_ranks(world_size=4)
def test_under_torchs_fully_shard(name: str, compiled: tuple[bool, ...]) -> None:
    """Torch's `fully_shard` on both sides; `compiled` says it of each microbatch."""
    pair = _pair(name, fsdp2)
    call = pair.compiled()
    pair.train(*(call if each else pair.model for each in compiled), steps=STEPS)


# Context parallelism: over the flattened (data, context) mesh, with torch's ring attention.


class _ContextCase(NamedTuple):
    """How many ranks have batches of their own, how many share each, and which way of torch's splits attention."""

    mesh: tuple[int, int]
    layers: int = 2
    by_modules: bool = False


Trained = tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]
"""Losses of this rank's tokens, its shards and gradients of the last step, and the full parameters."""


CONTEXTS = {
    "cp 2": _ContextCase((1, 2), layers=1),
    "dp 2 x cp 2": _ContextCase((2, 2)),
    "cp 4": _ContextCase((1, 4)),
    "cp 2, by modules": _ContextCase((1, 2), by_modules=True),
}


def _trained(case: _ContextCase, fully_shard: Any, lower: str | None) -> Trained:
    torch._dynamo.reset()
    world = init_device_mesh("cpu", case.mesh, mesh_dim_names=("dp", "cp"))
    everyone, context = world["dp", "cp"]._flatten("dp_cp"), world["cp"]
    model: Any = made(lambda: PositionedLlama(case.layers))
    if case.by_modules:
        split_attention(model, context)
    for module in (*model.layers, model):
        fully_shard(module, mesh=everyone)
    call = model if lower is None else compile_eagerly(model, lower=lower)
    optimizer = adamw_with_eps(model.parameters())
    split = split_by_modules if case.by_modules else split_by_context
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        with split(context, sequences(10 * step + world["dp"].get_local_rank())) as batch:
            loss = call(*batch)
            loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    shards = [part.to_local() for p in model.parameters() for part in (p.detach(), p.grad)]
    return losses, shards, [p.detach().full_tensor() for p in model.parameters()]


def _check_one_process(case: _ContextCase, trained: Trained) -> None:
    losses, _, whole = trained
    model = made(lambda: PositionedLlama(case.layers))
    optimizer = adamw_with_eps(model.parameters())
    for step, mine in enumerate(losses):
        optimizer.zero_grad()
        parts = [sequences(10 * step + place) for place in range(case.mesh[0])]
        loss = model(*(torch.cat(each) for each in zip(*parts, strict=True)))
        loss.backward()
        optimizer.step()
        close(mean_over_ranks(mine), loss, "loss", (1e-5, 1e-6))  # all ranks have equally many tokens
    for found, expected in zip(whole, model.parameters(), strict=True):
        close(found, expected, "parameter", (1e-4, 1e-5))


@pytest.mark.long
@pytest.mark.inductor
@on_ranks()
def test_context_parallel_through_inductor() -> None:
    with cpu_kernels():
        _check_one_process(CONTEXTS["cp 2"], _trained(CONTEXTS["cp 2"], fsdp_compile.fully_shard, "inductor"))


@pytest.mark.core
@long.parametrize("name", CONTEXTS, always=["cp 2"])
@on_ranks(world_size=lambda name: torch.Size(CONTEXTS[name].mesh).numel())
def test_context_parallel(name: str) -> None:
    """Bit for bit FSDP2's, and near one process."""
    case = CONTEXTS[name]
    with cpu_kernels():
        ours = _trained(case, fsdp_compile.fully_shard, "eager")
        theirs = _trained(case, torch.distributed.fsdp.fully_shard, None)
    _check_one_process(case, ours)
    for mine, expected in zip(ours, theirs, strict=True):
        assert all(map(torch.equal, mine, expected))


@on_ranks()
def test_graphs_of_whole_and_of_split_sequences_are_not_mixed_up() -> None:
    """Losses of the same tokens: before, in and after the block in which torch replaces attention."""
    torch.manual_seed(0)
    world = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
    model = PositionedLlama(layers=1)
    call = torch.compile(model, backend="fsdp", options={"lower": "eager"})
    whole = [each[:, : LENGTH // 2].contiguous() for each in sequences(5)]  # as long as a rank's part
    with cpu_kernels(), torch.no_grad():
        losses = [call(*whole).item()]
        with split_by_context(world["cp"], sequences(5)) as batch:
            losses.append(call(*batch).item())
            losses.append(model(*batch).item())
        losses.append(call(*whole).item())
    before, split, expected, after = losses
    assert before == after
    assert split == expected != before


# Experts of one grouped matmul, sharded within each expert.

RANKS, STEPS = 4, 2
_GROUPED = ", grouped"
"""End of the name of a model in bfloat16, in which torch has grouped matmuls that it can trace."""
MODELS = {"mixtral": mixtral, "deepseek": deepseek}


def _within_experts(parameter: torch.nn.Parameter) -> Shard:
    """There are as few experts as ranks, or fewer: each rank has a part of every one."""
    return Shard(1) if parameter.ndim == 3 else Shard(0)


def _trained_experts(
    name: str, fully_shard: Any = None, lower: str | None = None, *, one_sided: bool
) -> list[torch.Tensor]:
    """Losses, whole parameters and gradients; of one process without `fully_shard`.

    `one_sided` routes all tokens to two experts, so that the others have none.
    """
    torch._dynamo.reset()
    model = made(MODELS[name.removesuffix(_GROUPED)])
    for layer in model.layers if one_sided else ():
        if isinstance(layer.feed_forward, MixtureOfExperts):
            with torch.no_grad():
                layer.feed_forward.router.weight.zero_()
    policy = MIXED if name.endswith(_GROUPED) else MixedPrecisionPolicy()
    if fully_shard is not None:
        for module in (*model.layers, model):
            fully_shard(module, mp_policy=policy, shard_placement_fn=_within_experts)
    call = model if lower is None else compile_eagerly(model, lower=lower)
    optimizer = sgd(model.parameters())
    found = []
    for step in range(STEPS):
        tokens = torch.randint(0, VOCABULARY, (RANKS, 2, 8), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = call(tokens.flatten(0, 1) if fully_shard is None else tokens[dist.get_rank()])
        loss.backward()
        optimizer.step()
        found.append(loss.detach() if fully_shard is None else mean_over_ranks(loss))
    return found + [whole(v) for p in model.parameters() for v in (p.detach(), p.grad) if v is not None]


EXPERTS = [(f"{name}{end}", one_sided) for name in MODELS for end in ("", _GROUPED) for one_sided in (False, True)]


@long.parametrize(("name", "one_sided"), EXPERTS, always=[("mixtral, grouped", False)])
@on_ranks(world_size=RANKS)
def test_grouped_experts(name: str, *, one_sided: bool) -> None:
    ours = _trained_experts(name, fsdp_compile.fully_shard, "eager", one_sided=one_sided)
    within = (5e-2, 2e-2) if name.endswith(_GROUPED) else (1e-4, 1e-6)
    for a, b in zip(ours, _trained_experts(name, one_sided=one_sided), strict=True):
        close(a, b, "in one process", within)
    theirs = _trained_experts(name, torch.distributed.fsdp.fully_shard, one_sided=one_sided)
    assert len(ours) == len(theirs)
    assert all(map(torch.equal, ours, theirs))
