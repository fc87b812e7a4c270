"""Tensor parallelism below, compiled: bit for bit what FSDP2 makes of the same DTensors uncompiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from fsdp_compile.backend import fsdp
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


def _trained(case: _Case, world: Any, compiled: Callable[[int], bool]) -> list[torch.Tensor]:
    """Losses, parameters and gradients of this rank; `compiled` says it of each forward."""
    torch._dynamo.reset()
    mesh = world["dp"] if len(case.mesh) == 2 else world["replicate", "dp"]
    torch.manual_seed(0)
    model: Any = split(Llama(case.layers, case.hidden), world["tp"], sequence=case.sequence)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, **case.arguments)
    calls = (model, torch.compile(model, backend=fsdp, options={"lower": "eager"}, fullgraph=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    place = dist.get_rank() // world["tp"].size()  # ranks that split a model see one batch
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for i in range(case.micro_batches):
            model.set_requires_gradient_sync(i == case.micro_batches - 1)
            seed = torch.Generator().manual_seed(1000 * step + 10 * i + place)
            loss = calls[compiled(i)](torch.randint(0, VOCABULARY, (2, 8), generator=seed))
            loss.backward()
            found.append(loss.detach())
        optimizer.step()
    parameters: list[Any] = list(model.parameters())
    assert [n for n, p in model.named_parameters() if p.grad is None or p.grad.placements != p.placements] == []
    return [*found, *(part.to_local() for p in parameters for part in (p.detach(), p.grad))]


def _differences(name: str, *, first_is_compiled: bool = True) -> list[int]:
    """The places of what is not FSDP2's, bit for bit."""
    case = CASES[name]
    names = ("dp", "tp") if len(case.mesh) == 2 else ("replicate", "dp", "tp")
    world = init_device_mesh("cpu", case.mesh, mesh_dim_names=names)
    theirs = _trained(case, world, lambda _: False)
    ours = _trained(case, world, lambda number: number > 0 or first_is_compiled)
    assert len(ours) == len(theirs)
    return [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if not torch.equal(a, b)]


@long.parametrize("name", CASES, always=["split tokens, bf16", "the other dimension", "accumulated"])
def test_compiled(name: str) -> None:
    assert run_ranks(_differences, name, world_size=4) == [[]] * 4


def test_after_an_uncompiled_microbatch() -> None:
    assert run_ranks(_differences, "accumulated", first_is_compiled=False, world_size=4) == [[]] * 4


def _uncompiled_after_compiled() -> list[int]:
    case = CASES["accumulated"]
    world = init_device_mesh("cpu", case.mesh, mesh_dim_names=("dp", "tp"))
    theirs, ours = _trained(case, world, lambda _: False), _trained(case, world, lambda number: number == 0)
    return [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if not torch.equal(a, b)]


def test_before_an_uncompiled_microbatch() -> None:
    assert run_ranks(_uncompiled_after_compiled, world_size=4) == [[]] * 4
