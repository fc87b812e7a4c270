"""`dp_mesh_dims`, compiled: parameters that are DTensors over a whole mesh, bit for bit what FSDP2 makes of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp_compile.backend import fsdp
from tests import long
from tests.models.spmd import WIDTH, Spmd
from tests.ranks import run_ranks

STEPS = 3
Dims: Any = getattr(torch.distributed.fsdp, "DataParallelMeshDims", None)
pytestmark = pytest.mark.skipif(Dims is None, reason="torch has no DataParallelMeshDims")


def _last_dimension(parameter: torch.nn.Parameter) -> Shard:
    return Shard(parameter.ndim - 1)


@dataclasses.dataclass(frozen=True)
class _Case:
    """A mesh, what its dimensions are for, and how the model is sharded.

    Attributes:
        shape: Of the mesh.
        names: Of its dimensions; "tp" splits hidden units.
        shard: As in `DataParallelMeshDims`.
        replicate: The same.
        given: Whether the model is called with DTensors.
        micro_batches: Of which all but the last are not reduced.
        hidden: Units of the layers.
        tolerance: By which numbers may differ.
        arguments: Of `fully_shard`.
    """

    shape: tuple[int, ...] = (2, 2)
    names: tuple[str, ...] = ("data", "tp")
    shard: str | tuple[str, ...] | None = "data"
    replicate: str | tuple[str, ...] | None = None
    given: bool = False
    micro_batches: int = 1
    hidden: int = 16  # an even number of elements for each of four ranks: else gloo adds in another order
    tolerance: float = 0.0
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
CASES = {
    "data and tensor": _Case(),
    "tensor first": _Case(names=("tp", "data")),
    "one dimension": _Case((4,), ("anything",), "anything"),
    "two flattened": _Case((2, 2, 1), ("data", "context", "tp"), ("data", "context")),
    "replicas and two flattened": _Case((1, 2, 2), ("copies", "data", "context"), ("data", "context"), "copies"),
    "replicas": _Case((2, 1, 2), ("copies", "data", "tp"), "data", "copies"),
    "replicas alone": _Case((2, 2), ("copies", "tp"), None, "copies"),
    "two dimensions of replicas": _Case((2, 1, 2), ("pods", "copies", "data"), "data", ("pods", "copies")),
    "given DTensors": _Case(given=True),
    "bf16, uneven rows": _Case(hidden=6, arguments={"mp_policy": BF16}),
    "the last dimension": _Case((4, 1), arguments={"shard_placement_fn": _last_dimension}),
    "unsharded until backward": _Case(arguments={"reshard_after_forward": False}),
    "accumulated": _Case((4, 1), micro_batches=2),
    # FSDP2 adds the gradients of norms up before it sums them over "tp".
    "accumulated, split": _Case(micro_batches=2, tolerance=1e-6),
}


def _trained(case: _Case, mesh: DeviceMesh, *, is_compiled: bool) -> list[torch.Tensor]:
    """Losses, parameters and gradients of this rank; layouts are compared, too."""
    torch._dynamo.reset()
    dims = Dims(shard=case.shard, replicate=case.replicate)
    rows_over = (*dims.shard_names, *dims.replicate_names)
    torch.manual_seed(0)
    model = Spmd(hidden=case.hidden).spread(mesh, "tp" if "tp" in case.names else None, rows_over)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, dp_mesh_dims=dims, **case.arguments)
    call: Any = model
    if is_compiled:
        call = torch.compile(model, backend=fsdp, options={"lower": "eager"}, fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, foreach=False)
    place = 0  # ranks that differ in other dimensions see the same rows
    for i, name in enumerate(case.names):
        place = place * case.shape[i] + mesh.get_local_rank(name) if name in rows_over else place
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for i in range(case.micro_batches):
            if case.micro_batches > 1:
                model.set_requires_gradient_sync(i == case.micro_batches - 1)  # type: ignore[operator]
            seed = torch.Generator().manual_seed(1000 * step + 10 * i + place)
            x: Any = torch.randn(3, WIDTH, generator=seed)
            if case.given:
                x = DTensor.from_local(x, mesh, [Shard(0) if n in rows_over else Replicate() for n in case.names])
            out: Any = call(x)
            loss = out.to_local().float().square().mean()
            loss.backward()
            found.append(loss.detach())
        optimizer.step()
    parameters: list[Any] = list(model.parameters())
    layout = [(p.device_mesh.mesh_dim_names, p.device_mesh.mesh.tolist(), p.placements, p.shape) for p in parameters]
    found.append(torch.tensor(list(str(layout).encode())))
    return [*found, *(part.to_local() for p in parameters for part in (p.detach(), p.grad))]


def _differences(name: str) -> list[int]:
    """The places of what is not FSDP2's."""
    case = CASES[name]
    # One mesh: DTensor's caches give equal ones for each other, and FSDP2 wants the very one.
    mesh = init_device_mesh("cpu", case.shape, mesh_dim_names=case.names)
    ours = _trained(case, mesh, is_compiled=True)
    theirs = _trained(case, mesh, is_compiled=False)
    assert len(ours) == len(theirs)
    both = enumerate(zip(ours, theirs, strict=True))
    return [i for i, (a, b) in both if not torch.allclose(a, b, rtol=case.tolerance, atol=case.tolerance)]


@long.parametrize("name", CASES, always=["data and tensor", "two flattened", "accumulated"])
def test_compiled(name: str) -> None:
    assert run_ranks(_differences, name, world_size=4) == [[]] * 4
