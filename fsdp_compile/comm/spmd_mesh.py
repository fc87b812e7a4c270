"""A mesh over all of which parameters are DTensors already, and which of its dimensions are data-parallel.

    mesh ("dp", "cp", "tp") of 2 x 2 x 2, weight [16, 4] with [Replicate(), Replicate(), Shard(0)],
    fully_shard(mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard=("dp", "cp")))

    in a forward      over ("dp", "cp", "tp")    [Replicate(), Replicate(), Shard(0)]   local [8, 4], gathered over both
    between steps     over ("dp_cp", "tp")       [_StridedShard(0), Shard(0)]           local [2, 4]

The meshes and the placements are FSDP2's.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
import torch.distributed.fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from fsdp_compile._torch.distributed import flattened_mesh, joined_mesh
from fsdp_compile._torch.tensors import strided_shard
from fsdp_compile.errors import ConfigError

_OTHERWISE = (
    'parameters that are plain, or DTensors over the other dimensions alone (mesh["tp"]), and the data-parallel part '
    'of the mesh: mesh=mesh["dp_replicate", "fsdp"]'
)


@dataclasses.dataclass(frozen=True)
class SpmdMesh:
    """The mesh of a program that is written for all of its ranks (SPMD), and its data-parallel dimensions.

    Attributes:
        mesh: With names.
        shard: Names of the dimensions over which parameters are sharded, next to each other.
        replicate: Names of those over which they are replicas.
        data_parallel: 1-D, or 2-D (replicate, shard): those dimensions, flattened where there are several.
    """

    mesh: DeviceMesh
    shard: tuple[str, ...]
    replicate: tuple[str, ...]
    data_parallel: DeviceMesh

    @classmethod
    def of(cls, mesh: object, dims: object) -> SpmdMesh:
        """Reads `fully_shard(mesh=..., dp_mesh_dims=...)`; makes a group where dimensions have to be flattened.

        Raises:
            ConfigError: If torch knows no such argument, it is something else, or names what the mesh does not have.
        """
        where = f"fully_shard(dp_mesh_dims={dims!r})"
        kind: Any = getattr(torch.distributed.fsdp, "DataParallelMeshDims", None)
        if kind is None:
            raise ConfigError(
                f"it is torch 2.13's, and torch {torch.__version__} does not have it", where=where, instead=_OTHERWISE
            )
        if not isinstance(dims, kind):
            raise ConfigError(
                "it is no DataParallelMeshDims",
                where=where,
                instead='torch.distributed.fsdp.DataParallelMeshDims(shard="dp"), with the names of dimensions',
            )
        shard, replicate = tuple(dims.shard_names), tuple(dims.replicate_names)
        names = mesh.mesh_dim_names if isinstance(mesh, DeviceMesh) else None
        if not isinstance(mesh, DeviceMesh) or names is None:
            raise ConfigError(
                f"it names dimensions of the mesh, and {'mesh has no names' if mesh is not None else 'there is none'}",
                where=where,
                instead='mesh=init_device_mesh(device, (2, 4), mesh_dim_names=("dp", "tp")), over which all parameters '
                "are DTensors",
            )
        _refuse_names(names, shard, replicate, where)
        parts = [_flattened(mesh, part) for part in (replicate, shard) if part]
        return cls(mesh, shard, replicate, functools.reduce(joined_mesh, parts))

    @property
    def data_parallel_dims(self) -> frozenset[int]:
        """The dimensions of `mesh` that are sharded and replicated over."""
        return frozenset(map(self._dim, (*self.shard, *self.replicate)))

    @property
    def sharded_mesh(self) -> DeviceMesh:
        """The mesh of sharded parameters: several dimensions to shard over are one."""
        if len(self.shard) <= 1:
            return self.mesh
        return functools.reduce(joined_mesh, [part for part, _ in self._parts()])

    def sharded_placements(self, placements: tuple[Any, ...], dim: int | None) -> tuple[Any, ...]:
        """The placements on `sharded_mesh` of a parameter with `placements` on `mesh`, whose part is sharded on `dim`.

        `None` stands for a parameter of 0 dimensions, which every rank has whole.
        """
        if len(self.shard) <= 1:
            taken = range(self.mesh.ndim)
            return tuple(self._placement(placements, i, dim) for i in taken)
        found: list[Any] = []
        for _, first in self._parts():
            is_data_parallel = self._name(first) in self.shard
            found += [Replicate()] if is_data_parallel and self.replicate else []
            found.append(self._placement(placements, first, dim))
        return tuple(found)

    def _parts(self) -> list[tuple[DeviceMesh, int]]:
        """The meshes that `sharded_mesh` is made of, and the first dimension of `mesh` that each stands for."""
        others = {*self.shard[1:], *self.replicate}
        found = []
        for i in range(self.mesh.ndim):
            name = self._name(i)
            if name not in others:
                found.append((self.data_parallel if name in self.shard else self.mesh[name], i))
        return found

    def _placement(self, placements: tuple[Any, ...], i: int, dim: int | None) -> Any:
        """The placement on dimension `i` of `mesh`."""
        if self._name(i) not in self.shard or dim is None:
            return placements[i]
        # Dimensions after it have divided the parameter first: a rank's rows are not next to each other in the whole.
        after = range(i + 1, self.mesh.ndim)
        parts = [self.mesh.size(j) for j in after if isinstance(placements[j], Shard) and placements[j].dim == dim]
        split = functools.reduce(lambda a, b: a * b, parts, 1)
        return strided_shard(dim, split) if split > 1 else Shard(dim)

    def _name(self, i: int) -> str:
        assert self.mesh.mesh_dim_names is not None
        return self.mesh.mesh_dim_names[i]

    def _dim(self, name: str) -> int:
        assert self.mesh.mesh_dim_names is not None
        return self.mesh.mesh_dim_names.index(name)


def _refuse_names(names: tuple[str, ...], shard: tuple[str, ...], replicate: tuple[str, ...], where: str) -> None:
    every = (*shard, *replicate)
    unknown = [name for name in every if name not in names]
    if unknown or len(set(every)) < len(every) or not every:
        what = f"{unknown[0]!r} is none of the mesh's dimensions {names}" if unknown else "a dimension is named twice"
        raise ConfigError(
            what if every else "it names no dimension",
            where=where,
            instead="each data-parallel dimension once: shard= those to shard over, replicate= those of replicas",
        )
    places = [names.index(name) for name in shard]
    if places != list(range(places[0], places[0] + len(places))) if places else False:
        raise ConfigError(
            f"the dimensions to shard over are not next to each other, or in another order than in the mesh {names}",
            where=where,
            instead="a mesh in which they are: the ranks of one shard group are those of one flattened dimension",
        )
    places = [names.index(name) for name in replicate]
    if places != sorted(places):
        raise ConfigError(
            f"the dimensions of replicas are in another order than in the mesh {names}",
            where=where,
            instead="the order of the mesh",
        )


def _flattened(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    return mesh[names[0]] if len(names) == 1 else flattened_mesh(mesh[names])
