"""Tensor parallelism below, compiled: bit for bit what FSDP2 makes of the same DTensors; its collectives are hidden."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor, Shard

import fsdp_compile
from fsdp_compile.ir.graph import StepGraph
from fsdp_compile.passes.hide_own_collectives import HideOwnCollectives, HidePlan
from tests import long
from tests.models.tensor_parallel import VOCABULARY, Llama, split
from tests.ranks import on_ranks
from tests.two_sides import BITS, MIXED, WithFsdp2, Within, close

STEPS = 2


def _other_dimension(parameter: torch.nn.Parameter) -> Shard:
    """Shards a matrix over the dimension that tensor parallelism has left."""
    placements = parameter.placements if isinstance(parameter, DTensor) and parameter.ndim == 2 else ()
    return next((Shard(1 - p.dim) for p in placements if isinstance(p, Shard)), Shard(0))


@dataclasses.dataclass(frozen=True)
class _Case:
    """How the model is split and sharded.

    Attributes:
        mesh: Its shape: (dp, tp), or (replicate, shard, tp).
        sequence: Whether norms are split over tokens.
        hidden: Units of the feed-forward layers.
        layers: How many.
        micro_batches: Of which all but the last are not reduced.
        arguments: Of `fully_shard`.
    """

    mesh: tuple[int, ...] = (2, 2)
    sequence: bool = False
    hidden: int = 24
    layers: int = 1
    micro_batches: int = 1
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)


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

    def noted(self: HideOwnCollectives, step: StepGraph, plan: HidePlan) -> None:
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
