"""Parameters that are DTensors already: sharded over further ranks, on the mesh of both.

    mesh ("dp", "tp") of 2 x 2, weight [8, 4] with Shard(0) over "tp", fully_shard(mesh=mesh["dp"])

    in a forward      DTensor over mesh["tp"]            [Shard(0)]                     local [4, 4], gathered over "dp"
    between steps     DTensor over mesh["dp", "tp"]      [_StridedShard(0), Shard(0)]   local [2, 4]

The mesh and the placements are FSDP2's. "Tensor parallel" stands for all that a parameter may be split for.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from fsdp_compile._torch.distributed import joined_mesh
from fsdp_compile._torch.tensors import local_tensor, part_shape, strided_shard
from fsdp_compile.comm.mesh import MeshPlacement
from fsdp_compile.errors import ConfigError, UnsupportedModelError

_MOST_DIMENSIONS = 2


@dataclasses.dataclass(frozen=True)
class TensorParallel:
    """How a parameter was laid out before it was sharded.

    Attributes:
        mesh: The ranks that it was split over; other ones than those it is sharded over.
        placements: On `mesh`.
        shape: Of the whole parameter.
        stride: Of the whole parameter, in elements.
        local_shape: Of this rank's part, which is what is sharded.
    """

    mesh: DeviceMesh
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    local_shape: torch.Size

    @classmethod
    def of(cls, name: str, parameter: DTensor, mesh: DeviceMesh) -> TensorParallel:
        """The layout of a parameter that is to be sharded over `mesh`.

        Raises:
            ConfigError: If the two meshes are not different dimensions of one.
            UnsupportedModelError: If the parameter is laid out in a way that cannot be divided further.
        """
        own = parameter.device_mesh
        try:
            joined_mesh(mesh, own)
        except ValueError as error:
            raise ConfigError(
                f"a parameter is a DTensor over {_described(own)}, to be sharded over {_described(mesh)}, which "
                "are not different dimensions of one mesh",
                where=f"fully_shard(mesh=...), {name}",
                instead='mesh = init_device_mesh(device, (2, 4), mesh_dim_names=("dp", "tp")); '
                'parallelize_module(model, mesh["tp"], ...), then fully_shard(model, mesh=mesh["dp"]); or list it in '
                "ignored_params, then it is neither sharded nor averaged",
            ) from error
        cls.refuse_layout(name, parameter)
        if own.ndim > _MOST_DIMENSIONS:
            raise UnsupportedModelError(
                f"a parameter is a DTensor over {_described(own)}, which has more than {_MOST_DIMENSIONS} dimensions",
                where=name,
                instead="at most two dimensions besides those of sharding; or list it in ignored_params, then it is "
                "neither sharded nor averaged",
            )
        local = local_tensor(parameter)
        return cls(own, tuple(parameter.placements), parameter.shape, parameter.stride(), local.shape)

    @staticmethod
    def refuse_layout(name: str, parameter: DTensor) -> None:
        """Raises `UnsupportedModelError` for a DTensor whose parts cannot be divided further."""
        odd = [p for p in parameter.placements if type(p) not in (Shard, Replicate)]
        if odd:
            raise UnsupportedModelError(
                f"a parameter is a DTensor with placements {tuple(parameter.placements)}"
                + (", a sum that was not made yet" if any(isinstance(p, Partial) for p in odd) else ""),
                where=name,
                instead="Shard and Replicate (parameter.redistribute(placements=...)); or list it in ignored_params, "
                "then it is neither sharded nor averaged",
            )
        if not (local_tensor(parameter).is_contiguous() and parameter.is_contiguous()):
            raise UnsupportedModelError(
                f"a parameter is a DTensor that is not contiguous, with strides {parameter.stride()}",
                where=name,
                instead="distribute_tensor(value.contiguous(), mesh, placements)",
            )

    @classmethod
    def of_sharded(cls, parameter: DTensor, data_parallel: DeviceMesh) -> TensorParallel | None:
        """The layout before it was sharded, of a parameter that is sharded over a mesh; `None` if it was plain."""
        joined, first = parameter.device_mesh, data_parallel.ndim
        if joined.ndim <= first or joined.mesh_dim_names is None:
            return None
        mesh, placements = joined[joined.mesh_dim_names[first:]], tuple(parameter.placements[first:])
        local_shape = part_shape(parameter.shape, mesh, placements)
        return cls(mesh, placements, parameter.shape, parameter.stride(), local_shape)

    def is_of(self, parameter: DTensor) -> bool:
        """Whether a DTensor is laid out like this."""
        return parameter.device_mesh == self.mesh and tuple(parameter.placements) == self.placements

    def is_sharded(self, parameter: DTensor) -> bool:
        """Whether a DTensor in the parameter's place is sharded, and not split over the parameter's own mesh alone."""
        return parameter.device_mesh.ndim > self.mesh.ndim

    def refuse_other_layout(self, name: str, parameter: DTensor) -> None:
        """Raises `ConfigError` for a DTensor in the parameter's place that is laid out in another way."""
        if not self.is_of(parameter):
            raise ConfigError(
                f"the parameter is a DTensor with placements {tuple(parameter.placements)} over "
                f"{_described(parameter.device_mesh)}, and was split with {self.placements} over "
                f"{_described(self.mesh)}",
                where=name,
                instead="a DTensor of that mesh and these placements, or a plain tensor of the whole shape",
            )

    def sharded_mesh(self, data_parallel: DeviceMesh) -> DeviceMesh:
        """The mesh of the sharded parameter: the dimensions it is sharded and replicated over, then its own."""
        return joined_mesh(data_parallel, self.mesh)

    def sharded_placements(self, data_parallel: MeshPlacement, dim: int | None) -> tuple[Any, ...]:
        """The placements on that mesh of a parameter whose part on each rank is sharded on `dim`."""
        parts = 1
        for i, placement in enumerate(self.placements):
            if isinstance(placement, Shard) and placement.dim == dim:
                parts *= self.mesh.size(i)
        # Each part is divided for itself, so that a rank's rows are not next to each other in the whole parameter's
        # order of ranks.
        outer = [
            strided_shard(p.dim, parts) if isinstance(p, Shard) and parts > 1 else p
            for p in data_parallel.placements(dim)
        ]
        return (*outer, *self.placements)

    def gathered(self, local: torch.Tensor) -> DTensor:
        """The parameter that a forward computes with, of this rank's part; compiled code traces this."""
        return DTensor.from_local(
            local,
            self.mesh,
            self.placements,
            run_check=False,
            shape=self.shape,
            stride=self.stride,
        )

    def own_part(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a plain tensor of the whole shape that every rank has; no communication."""
        return local_tensor(distribute_tensor(whole, self.mesh, self.placements, src_data_rank=None))


def _described(mesh: DeviceMesh) -> str:
    names = mesh.mesh_dim_names
    shape = " x ".join(map(str, mesh.shape))
    return f"a mesh {names} of {shape}" if names else f"a mesh of {shape} without names"
