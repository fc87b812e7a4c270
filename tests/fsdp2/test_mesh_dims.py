"""`dp_mesh_dims`, compiled: parameters that are DTensors over a whole mesh, bit for bit what FSDP2 makes of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests import long
from tests.models.spmd import WIDTH, Spmd
from tests.ranks import on_ranks
from tests.two_sides import WithFsdp2, Within, loss_of

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


@long.parametrize("name", CASES, always=["data and tensor"])
@on_ranks(world_size=4)
def test_compiled(name: str) -> None:
    case = CASES[name]
    # One mesh: DTensor's caches give equal ones for each other, and FSDP2 wants the very one.
    mesh = init_device_mesh("cpu", case.shape, mesh_dim_names=case.names)
    dims = Dims(shard=case.shard, replicate=case.replicate)
    rows_over = (*dims.shard_names, *dims.replicate_names)
    place = 0  # ranks that differ in other dimensions see the same rows
    for i, dimension in enumerate(case.names):
        place = place * case.shape[i] + mesh.get_local_rank(dimension) if dimension in rows_over else place

    def shard(model: Any) -> None:
        for module in (*model.layers, model):
            fully_shard(module, mesh=mesh, dp_mesh_dims=dims, **case.arguments)

    def batch(step: int) -> torch.Tensor:
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + place))
        placements = [Shard(0) if n in rows_over else Replicate() for n in case.names]
        return DTensor.from_local(x, mesh, placements) if case.given else x

    pair = WithFsdp2(
        lambda: Spmd(hidden=case.hidden).spread(mesh, "tp" if "tp" in case.names else None, rows_over),
        shard,
        batch,
        lambda call, x: loss_of(call(x).to_local()),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3, foreach=False),
    )
    bound = (case.tolerance, case.tolerance)
    pair.train(*[pair.compiled()] * case.micro_batches, steps=STEPS, within=Within(bound, bound, bound))
