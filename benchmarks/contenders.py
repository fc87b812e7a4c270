"""Who is compared: each takes a plain model and returns what is called in its place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

import fsdp_compile
from benchmarks.bound import Held


@dataclasses.dataclass(frozen=True)
class Setup:
    """What a contender may know.

    Attributes:
        block: Class of the model's repeated blocks.
        device: "cpu" or "cuda".
        param_dtype: Dtype in which parameters are gathered and used; `None` for the one they have.
        options: Further options of the backend "fsdp".
        reshard_after_forward: As for our `fully_shard`.
        mesh: Over which parameters are sharded; `None` for all ranks.
    """

    block: type[nn.Module]
    device: str = "cpu"
    param_dtype: torch.dtype | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    reshard_after_forward: bool | int | Literal["auto"] | None = None
    mesh: dist.DeviceMesh | None = None

    @property
    def policy(self) -> MixedPrecisionPolicy:
        """The dtypes, as `fully_shard` takes them."""
        return MixedPrecisionPolicy(param_dtype=self.param_dtype)


@dataclasses.dataclass(frozen=True)
class Contender:
    """One way to train.

    Attributes:
        name: In results.
        about: One line.
        prepare: Makes a plain model ready; the first call may compile.
        held: What it holds of parameters besides its shards.
    """

    name: str
    about: str
    prepare: Callable[[nn.Module, Setup], Any]
    held: Held


def unsharded(model: nn.Module, setup: Setup) -> Any:
    """Plain `torch.compile`."""
    return torch.compile(model if setup.param_dtype is None else model.to(setup.param_dtype))


def ddp(model: nn.Module, setup: Setup) -> Any:
    """DistributedDataParallel with each block compiled by itself, so that all-reduces start while backward goes on."""
    if setup.param_dtype is not None:
        model = model.to(setup.param_dtype)
    _compile_blocks(model, setup)
    return DistributedDataParallel(model)


def fsdp1(model: nn.Module, setup: Setup) -> Any:
    """FullyShardedDataParallel, eager."""
    precision = MixedPrecision(param_dtype=setup.param_dtype) if setup.param_dtype else None
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({setup.block}),
        mixed_precision=precision,
        device_id=torch.device(setup.device, 0) if setup.device == "cuda" else torch.device("cpu"),
        use_orig_params=True,
    )


def fsdp2(model: nn.Module, setup: Setup) -> Any:
    """`torch.distributed.fsdp.fully_shard`, eager."""
    mesh = mesh_of(setup)
    for module in model.modules():
        if isinstance(module, setup.block):
            torch_fully_shard(module, mesh=mesh, mp_policy=setup.policy)
    return torch_fully_shard(model, mesh=mesh, mp_policy=setup.policy)


def fsdp2_compiled(model: nn.Module, setup: Setup) -> Any:
    """`fully_shard` with each block compiled by itself."""
    _compile_blocks(model, setup)
    return fsdp2(model, setup)


def inductor_passes(settings: Mapping[str, Any]) -> Callable[[nn.Module, Setup], Any]:
    """DTensor parameters that are gathered on read, and torch's own passes over the collectives.

    Gathered weights that backward needs are saved, as the default partitioner decides.
    """

    def prepare(model: nn.Module, setup: Setup) -> Any:
        mesh = mesh_of(setup)
        for module in list(model.modules()):
            for name, parameter in list(module.named_parameters(recurse=False)):
                sharded = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
                module.register_parameter(name, nn.Parameter(sharded))
                parametrize.register_parametrization(module, name, _Gather(setup.param_dtype), unsafe=True)
        return torch.compile(model, options=dict(settings))

    return prepare


def ours(model: nn.Module, setup: Setup) -> Any:
    """`torch.compile(backend="fsdp")`, as a whole if no option says otherwise."""
    kept = setup.reshard_after_forward
    fsdp_compile.fully_shard(model, mesh=mesh_of(setup), mp_policy=setup.policy, reshard_after_forward=kept)
    return torch.compile(model, backend="fsdp", options={"regions": "whole", **setup.options})


class _Gather(nn.Module):
    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self._dtype = dtype

    def forward(self, parameter: DTensor) -> torch.Tensor:
        full = parameter.redistribute(placements=[Replicate()], forward_dtype=self._dtype)
        return full.to_local(grad_placements=[Partial("avg")])


def _compile_blocks(model: nn.Module, setup: Setup) -> None:
    for module in model.modules():
        if isinstance(module, setup.block):
            module.compile()


def mesh_of(setup: Setup) -> dist.DeviceMesh:
    """The given one, or all ranks in one dimension."""
    return setup.mesh or init_device_mesh(setup.device, (dist.get_world_size(),), mesh_dim_names=("shard",))


_BUCKETING = {"bucket_all_gathers_fx": "all", "bucket_reduce_scatters_fx": "all"}
_REORDERING = {
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": [
        "reorder_communication_preserving_peak_memory",
        "sink_waits_iterative",
        "reorder_communication_preserving_peak_memory",
    ],
}
_SCHEDULING = {
    "aten_distributed_optimizations.enable_overlap_scheduling": True,
    "aten_distributed_optimizations.collective_bucketing": True,
    "aten_distributed_optimizations.insert_overlap_deps": True,
}

_CUDA_GRAPHS = {"inductor": {"triton.cudagraphs": True}}

UNSHARDED = Contender("unsharded", "plain torch.compile: the compute alone", unsharded, Held.WHOLE)
OURS = Contender("fsdp_compile", 'torch.compile(backend="fsdp"), {"regions": "whole"}', ours, Held.TWO)
OURS_BLOCKS = Contender(
    "fsdp_compile_blocks",
    'options={"regions": "blocks"}: one compile for like blocks',
    lambda model, setup: ours(model, dataclasses.replace(setup, options={**setup.options, "regions": "blocks"})),
    Held.TWO,
)
OURS_SHARDED = Contender(
    "fsdp_compile_sharded_embedding",
    'options={"embedding": "sharded"}: rows that are looked up travel, and not the table',
    lambda model, setup: ours(model, dataclasses.replace(setup, options={**setup.options, "embedding": "sharded"})),
    Held.TWO_NO_INPUT,
)
OURS_CUDA_GRAPHS = Contender(
    "fsdp_compile_cuda_graphs",
    "the same with CUDA graphs; what they repeat is not counted as sent",
    lambda model, setup: ours(model, dataclasses.replace(setup, options={**setup.options, **_CUDA_GRAPHS})),
    Held.TWO,
)
FSDP2 = Contender("fsdp2", "torch's fully_shard, eager", fsdp2, Held.ROOT_AND_TWO)
FSDP2_COMPILED = Contender(
    "fsdp2_compiled_blocks", "torch's fully_shard, blocks compiled", fsdp2_compiled, Held.ROOT_AND_TWO
)
ALL: tuple[Contender, ...] = (
    UNSHARDED,
    Contender("ddp", "DistributedDataParallel, blocks compiled", ddp, Held.SUMMED),
    Contender("fsdp1", "FullyShardedDataParallel, eager", fsdp1, Held.ROOT_AND_TWO),
    FSDP2,
    FSDP2_COMPILED,
    Contender(
        "inductor_reordering",
        "DTensor reads, Inductor's reordering of collectives; keeps gathered weights",
        inductor_passes(_REORDERING),
        Held.GATHERED,
    ),
    Contender(
        "inductor_bucketing",
        "DTensor reads, Inductor's bucketing and reordering; keeps gathered weights",
        inductor_passes({**_BUCKETING, **_REORDERING}),
        Held.GATHERED,
    ),
    Contender(
        "inductor_overlap",
        "DTensor reads, Inductor's overlap scheduling; keeps gathered weights",
        inductor_passes(_SCHEDULING),
        Held.GATHERED,
    ),
    OURS,
    OURS_BLOCKS,
    OURS_SHARDED,
)
ON_GPUS = (*ALL, OURS_CUDA_GRAPHS)
"""With those that are something else on a GPU alone."""


def chosen(names: Sequence[str] | None) -> tuple[Contender, ...]:
    """Contenders by name, in the order of the names; those of `ALL` for `None`."""
    if names is None:
        return ALL
    by_name = {contender.name: contender for contender in ON_GPUS}
    return tuple(by_name[name] for name in names)
