"""Parameters of one model on several meshes, or over a whole one, compiled: what FSDP2 makes of them, or one process.

By `dp_mesh_dims`, by `ShardPlacementResult`, and by calls of their own for experts.
"""

from __future__ import annotations

import functools
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests import long
from tests.fsdp2.mlp import only_hooks, pair_of
from tests.models.experts import WIDTH, MixtureOfExperts
from tests.models.spmd import WIDTH as SPMD_WIDTH
from tests.models.spmd import Spmd
from tests.ranks import on_ranks
from tests.two_sides import MIXED, WithFsdp2, Within, WithOneProcess, loss_of, sgd

RANKS, TOKENS, STEPS = 4, 10, 3
Dims: Any = getattr(torch.distributed.fsdp, "DataParallelMeshDims", None)
Result: Any = getattr(_fsdp_common, "ShardPlacementResult", None)


def _within(rtol: float, atol: float) -> Within:
    return Within(*[(rtol, atol)] * 3)


# A whole mesh.


def _last_dimension(parameter: nn.Parameter) -> Shard:
    return Shard(parameter.ndim - 1)


DATA_AND_TP: tuple[Any, ...] = ((2, 2), ("data", "tp"), "data", None)
MESHES: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "data and tensor": (DATA_AND_TP, {}),
    "tensor first": (((2, 2), ("tp", "data"), "data", None), {}),
    "one dimension": (((4,), ("anything",), "anything", None), {}),
    "two flattened": (((2, 2, 1), ("data", "context", "tp"), ("data", "context"), None), {}),
    "replicas and two flattened": (
        ((1, 2, 2), ("copies", "data", "context"), ("data", "context"), "copies"),
        {},
    ),
    "replicas": (((2, 1, 2), ("copies", "data", "tp"), "data", "copies"), {}),
    "replicas alone": (((2, 2), ("copies", "tp"), None, "copies"), {}),
    "two dimensions of replicas": (((2, 1, 2), ("pods", "copies", "data"), "data", ("pods", "copies")), {}),
    "given DTensors": (DATA_AND_TP, {"given": True}),
    "bf16, uneven rows": (DATA_AND_TP, {"hidden": 6, "mp_policy": MIXED}),
    "the last dimension": (((4, 1), ("data", "tp"), "data", None), {"shard_placement_fn": _last_dimension}),
    "unsharded until backward": (DATA_AND_TP, {"reshard_after_forward": False}),
    "accumulated": (((4, 1), ("data", "tp"), "data", None), {"micro_batches": 2}),
    # FSDP2 adds the gradients of norms up before it sums them over "tp".
    "accumulated, split": (DATA_AND_TP, {"micro_batches": 2, "tolerance": 1e-6}),
}
"""Shape and names of a mesh, of which "tp" splits hidden units; what shards, and what replicates; other settings."""


@pytest.mark.skipif(Dims is None, reason="torch has no DataParallelMeshDims")
@long.parametrize("name", MESHES, always=["data and tensor"])
@on_ranks(world_size=RANKS)
def test_dimensions_of_a_whole_mesh(name: str) -> None:
    (shape, names, shards, replicates), settings = MESHES[name]
    arguments = dict(settings)
    given, micro_batches = arguments.pop("given", False), arguments.pop("micro_batches", 1)
    # An even number of elements for each of four ranks: else gloo adds in another order.
    hidden, tolerance = arguments.pop("hidden", 16), arguments.pop("tolerance", 0.0)
    # One mesh: DTensor's caches give equal ones for each other, and FSDP2 wants the very one.
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    dims = Dims(shard=shards, replicate=replicates)
    rows_over = (*dims.shard_names, *dims.replicate_names)
    place = 0  # ranks that differ in other dimensions see the same rows
    for size, dimension in zip(shape, names, strict=True):
        place = place * size + mesh.get_local_rank(dimension) if dimension in rows_over else place

    def shard(model: Any) -> None:
        for module in (*model.layers, model):
            fully_shard(module, mesh=mesh, dp_mesh_dims=dims, **arguments)

    def batch(step: int) -> torch.Tensor:
        x = torch.randn(3, SPMD_WIDTH, generator=torch.Generator().manual_seed(10 * step + place))
        placements = [Shard(0) if n in rows_over else Replicate() for n in names]
        return DTensor.from_local(x, mesh, placements) if given else x

    pair = WithFsdp2(
        lambda: Spmd(hidden=hidden).spread(mesh, "tp" if "tp" in names else None, rows_over),
        shard,
        batch,
        lambda call, x: loss_of(call(x).to_local()),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3, foreach=False),
    )
    pair.train(*[pair.compiled()] * micro_batches, steps=STEPS, within=_within(tolerance, tolerance))


# Experts.


def _meshes() -> tuple[DeviceMesh, DeviceMesh]:
    """Of experts, and of all else: over (dp, ep), and over all ranks."""
    experts = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    return experts, init_device_mesh("cpu", (RANKS,), mesh_dim_names=("every",))


def _shard_experts(model: MixtureOfExperts) -> None:
    mesh, every = _meshes()
    for layer in model.layers:
        experts: Any = layer.experts
        experts.split(mesh["ep"])
        fully_shard(experts, mesh=mesh["dp"], shard_placement_fn=lambda _: Shard(1))
        experts.set_gradient_divide_factor(RANKS)  # they see the tokens of all ranks
        experts.set_force_sum_reduction_for_comms(True)  # gloo has no other
        fully_shard(layer, mesh=every)
    fully_shard(model, mesh=every)


@pytest.mark.long
@pytest.mark.parametrize("one_expert", [False, True])
@on_ranks(world_size=RANKS)
def test_experts_on_a_mesh_of_their_own(*, one_expert: bool) -> None:
    def make() -> MixtureOfExperts:
        model = MixtureOfExperts()
        if one_expert:  # the others, and the ranks that have them, get no tokens
            with torch.no_grad():
                for layer in model.layers:
                    layer.gate.weight.zero_()  # type: ignore[union-attr, operator]
        return model

    pair = WithOneProcess(make, shard=_shard_experts, shape=WIDTH, rows=TOKENS, twice=False)
    pair.train(steps=STEPS, within=_within(1.3e-6, 1e-5))


CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "unsharded until backward": {"reshard_after_forward": False},
    "two neighbours": {"reshard_after_forward": 2},
    "replicas": {"experts": "replicas"},
    "plain experts": {"experts": "plain"},
}


def _shard_layers(model: MixtureOfExperts, experts: str = "split", **arguments: Any) -> None:
    """Each layer in one call: its experts over the ranks that have the same ones, the rest over all ranks."""
    mesh, every = _meshes()
    info: Any = _fsdp_common.FSDPMeshInfo(mesh["dp"], shard_mesh_dim=0)
    if experts == "replicas":
        info = _fsdp_common.HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    for layer in model.layers:
        part: Any = layer.experts
        if experts != "replicas":
            part.split(mesh["ep"])
        if experts == "plain":  # as DeepSeek's and Megatron's models have them: each rank its own, of smaller shape
            for name in ("up", "down"):
                setattr(part, name, nn.Parameter(getattr(part, name).to_local().detach().clone()))
        own = {id(p) for p in part.parameters()}

        def place(parameter: nn.Parameter, own: set[int] = own) -> Any:
            return Result(Shard(1), info) if id(parameter) in own else None

        fully_shard(layer, mesh=every, shard_placement_fn=place, **arguments)
    fully_shard(model, mesh=every, **arguments)


def _short_model() -> MixtureOfExperts:
    model = MixtureOfExperts()
    del model.layers[1:]  # four ranks compile at the same time, on few cores
    model.last = nn.Linear(WIDTH, WIDTH)  # an even number of elements for each rank: else gloo adds in another order
    return model


def _tokens(step: int) -> torch.Tensor:
    return torch.randn(RANKS, TOKENS, WIDTH, generator=torch.Generator().manual_seed(step))[dist.get_rank()]


@pytest.mark.skipif(Result is None, reason="torch has no ShardPlacementResult")
@long.parametrize("name", CASES, always=["defaults"])
@on_ranks(world_size=RANKS)
def test_parameters_of_one_call_on_two_meshes(name: str) -> None:
    pair = WithFsdp2(_short_model, functools.partial(_shard_layers, **CASES[name]), _tokens, optimizer=sgd)
    # Compiled, AOTAutograd adds the gradients of several experts in another order.
    pair.train(pair.compiled(fullgraph=False), steps=STEPS, within=_within(1e-6, 1e-6))


HAS_TYPES = find_spec("spmd_types") is not None and hasattr(FSDPParam, "_resolve_spmd_types_for_storage")


@pytest.mark.optional
@pytest.mark.skipif(not HAS_TYPES, reason="FSDP2 knows spmd_types since torch 2.14")
@on_ranks(world_size=4)
def test_parameters_with_spmd_types_go_by_fsdp2s_hooks() -> None:
    import spmd_types as spmd

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def shard(model: Any) -> None:
        # Both ranks of "tp" use the whole layer for tokens of their own: the sum over them is FSDP2's.
        for parameter in model.layers[1].parameters():
            spmd.assert_type(parameter, {mesh.get_group("tp"): spmd.R, mesh.get_group("dp"): spmd.R})
        for module in (*model.layers, model):
            if module is model.layers[1]:
                fully_shard(module, mesh=mesh, dp_mesh_dims=Dims(shard="dp"))
            else:
                fully_shard(module, mesh=mesh["dp"])

    pair = pair_of(sharded=shard)
    for _ in range(2):
        pair.backward()
        grad = pair.model.layers[1].weight.grad
        over_tp = [torch.empty_like(grad.to_local()) for _ in range(2)]
        dist.all_gather(over_tp, grad.to_local(), mesh.get_group("tp"))
        assert torch.equal(*over_tp)
        pair.compare_gradients()
        pair.zero_grad()
    assert only_hooks(pair.model) == ["", "", "spmd_types of a parameter"]
