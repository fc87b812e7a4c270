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
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

import fsdp_compile
from fsdp_compile.ir.graph import StepGraph
from fsdp_compile.passes.hide_own_collectives import HideOwnCollectives, HidePlan
from tests import long
from tests.models.tensor_parallel import VOCABULARY, Llama, split
from tests.ranks import run_ranks

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


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
CASES = {
    "two layers": _Case(layers=2),
    "split tokens, bf16": _Case(sequence=True, arguments={"mp_policy": BF16}),
    "uneven rows": _Case(hidden=6),
    "the other dimension": _Case(arguments={"shard_placement_fn": _other_dimension}),
    "replicas": _Case(mesh=(2, 1, 2)),
    "unsharded until backward": _Case(arguments={"reshard_after_forward": False}),
    "accumulated": _Case(micro_batches=2),
    "offloaded": _Case(arguments={"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "tensor parallel alone": _Case(mesh=(1, 4)),
    "data parallel alone": _Case(mesh=(4, 1)),
}


def _trained(case: _Case, fully_shard: Any, lower: str | None) -> list[torch.Tensor]:
    """Losses, norms, parameters and gradients of this rank; layouts are compared, too."""
    torch._dynamo.reset()
    names = ("dp", "tp") if len(case.mesh) == 2 else ("replicate", "dp", "tp")
    world = init_device_mesh("cpu", case.mesh, mesh_dim_names=names)
    mesh = world["dp"] if len(case.mesh) == 2 else world["replicate", "dp"]
    torch.manual_seed(0)
    model = split(Llama(case.layers, case.hidden), world["tp"], sequence=case.sequence)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, **case.arguments)
    call = model if lower is None else torch.compile(model, backend="fsdp", options={"lower": lower})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    place = dist.get_rank() // world["tp"].size()  # ranks that split a model see one batch
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for i in range(case.micro_batches):
            if case.micro_batches > 1:
                model.set_requires_gradient_sync(i == case.micro_batches - 1)  # type: ignore[operator]
            seed = torch.Generator().manual_seed(1000 * step + 10 * i + place)
            loss = call(torch.randint(0, VOCABULARY, (2, 8), generator=seed))
            loss.backward()
            found.append(loss.detach())
        # torch's own does not mix the meshes of split and whole parameters.
        found.append(fsdp_compile.clip_grad_norm_(model, 1.0))
        optimizer.step()
    parameters: list[Any] = list(model.parameters())
    layout = [(p.device_mesh.mesh_dim_names, p.placements, p.shape) for p in parameters]
    found.append(torch.tensor(list(str(layout).encode())))
    return [*found, *(part.to_local() for p in parameters for part in (p.detach(), p.grad))]


def _differences(name: str, lower: str | None) -> list[int]:
    """The places of what is not FSDP2's, bit for bit."""
    ours = _trained(CASES[name], fsdp_compile.fully_shard, lower)
    theirs = _trained(CASES[name], torch.distributed.fsdp.fully_shard, None)
    assert len(ours) == len(theirs)
    return [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if not torch.equal(a, b)]


def _check_close(name: str) -> None:
    ours = _trained(CASES[name], fsdp_compile.fully_shard, "inductor")
    theirs = _trained(CASES[name], torch.distributed.fsdp.fully_shard, None)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.long
@pytest.mark.inductor
@pytest.mark.parametrize("name", ["two layers", "uneven rows"])
def test_inductor(name: str) -> None:
    run_ranks(_check_close, name, world_size=4, timeout_s=500)


def _compiled_differences(name: str) -> tuple[list[int], bool]:
    """The same, and whether the order of a backward was changed to hide collectives of tensor parallelism."""
    orders: list[int] = []
    apply = HideOwnCollectives.apply

    def noted(self: HideOwnCollectives, step: StepGraph, plan: HidePlan) -> None:
        orders.append(len(plan.order))
        apply(self, step, plan)

    with mock.patch.object(HideOwnCollectives, "apply", noted):
        return _differences(name, "eager"), any(orders)


@pytest.mark.core
@long.parametrize("name", CASES, always=["split tokens, bf16"])
def test_compiled(name: str) -> None:
    is_split = CASES[name].mesh[-1] > 1
    assert run_ranks(_compiled_differences, name, world_size=4, timeout_s=500) == [([], is_split)] * 4
