"""Parameters that are DTensors over a whole mesh, with its data-parallel dimensions, in a forward.

Their gradients are what FSDP2 takes: summed over the other dimensions, where they are partial sums there, and left as
they are over the data-parallel ones, which the reduction of the unit averages over. Where a gradient is split over such
a dimension (that of a position embedding, of which each rank of "cp" has used some rows), each rank takes an equal part
of all of it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import weakref
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from fsdp_compile._torch.tensors import local_tensor, new_dtensor
from fsdp_compile.comm.mesh import MeshPlacement
from fsdp_compile.comm.spmd_mesh import SpmdMesh
from fsdp_compile.comm.tensor_parallel import TensorParallel
from fsdp_compile.errors import ConfigError, InvariantError

_by_key: weakref.WeakValueDictionary[str, SpmdParam] = weakref.WeakValueDictionary()
"""Graphs name layouts, since an argument of a call in a graph is a tensor or a constant."""


@dataclasses.dataclass(frozen=True)
class SpmdParam(TensorParallel):
    """How a parameter was laid out over the whole mesh; the base class's `mesh` is all of it.

    Attributes:
        spmd: The mesh, and its data-parallel dimensions.
        key: By which graphs know the layout.
    """

    spmd: SpmdMesh
    key: str = dataclasses.field(default="", compare=False)

    @classmethod
    def over(cls, name: str, parameter: torch.Tensor, spmd: SpmdMesh) -> SpmdParam:
        """The layout of a parameter that is to be sharded over dimensions of `spmd`.

        Raises:
            ConfigError: If it is no DTensor over that mesh, or split over one of these dimensions already.
            UnsupportedModelError: As `TensorParallel.of`.
        """
        where = f"fully_shard(dp_mesh_dims=...), {name}"
        if not isinstance(parameter, DTensor) or parameter.device_mesh != spmd.mesh:
            held = f"a DTensor over {parameter.device_mesh}" if isinstance(parameter, DTensor) else "a plain tensor"
            raise ConfigError(
                f"a parameter is {held}, and dp_mesh_dims is for those that are DTensors over the whole mesh "
                f"{spmd.mesh.mesh_dim_names}",
                where=where,
                instead="torch.distributed.tensor.distribute_tensor(value, mesh, placements), with Replicate() on the "
                "data-parallel dimensions; or no dp_mesh_dims, and mesh= of these dimensions",
            )
        split = [i for i in spmd.data_parallel_dims if not isinstance(parameter.placements[i], Replicate)]
        if split:
            raise ConfigError(
                f"a parameter has placements {tuple(parameter.placements)}: over the data-parallel dimension "
                f"{spmd.mesh.mesh_dim_names[split[0]]!r} it is not replicated",  # type: ignore[index]
                where=where,
                instead="Replicate() on the data-parallel dimensions, which fully_shard splits",
            )
        cls.refuse_layout(name, parameter)
        shape, stride = parameter.shape, parameter.stride()
        found = cls(spmd.mesh, tuple(parameter.placements), shape, stride, local_tensor(parameter).shape, spmd)
        # One object for equal layouts: code that is compiled for one layer is that of the others.
        known = next((other for other in _by_key.values() if other == found), None)
        if known is not None:
            return known
        key = next(key for key in (f"spmd.{number}" for number in itertools.count()) if key not in _by_key)
        named = dataclasses.replace(found, key=key)
        _by_key[key] = named
        return named

    def is_sharded(self, parameter: DTensor) -> bool:
        """Whether a DTensor in the parameter's place is sharded, too; where that changes no placement, any is."""
        # Only replicas; or a number, which every rank of the one dimension has whole.
        changes_none = not self.spmd.shard or (len(self.spmd.shard) == 1 and not self.shape)
        return changes_none or not self.is_of(parameter)

    def sharded_mesh(self, data_parallel: DeviceMesh) -> DeviceMesh:  # noqa: ARG002
        """The mesh of the sharded parameter."""
        return self.spmd.sharded_mesh

    def sharded_placements(self, data_parallel: MeshPlacement, dim: int | None) -> tuple[Any, ...]:  # noqa: ARG002
        """The placements on that mesh."""
        return self.spmd.sharded_placements(self.placements, dim)

    def gathered(self, local: torch.Tensor) -> DTensor:
        """The parameter that a forward computes with, of this rank's part."""
        return gathered_over_mesh(local, self.key)

    def local_gradient(self, grad: DTensor) -> torch.Tensor:
        """This rank's part of a gradient, with its own sums over data-parallel ranks still to be made."""
        summed = self.spmd.data_parallel_dims
        given = tuple(grad.placements)
        split = [i for i in summed if not given[i].is_partial() and not given[i].is_replicate()]
        # Where it is split, it is replicated, too, as the parameter is.
        wanted = tuple(given[i] if i in summed and i not in split else p for i, p in enumerate(self.placements))
        local = (grad if given == wanted else grad.redistribute(placements=wanted)).to_local()
        return local / math.prod(self.mesh.size(i) for i in split) if split else local


class _Gathered(torch.autograd.Function):
    """The DTensor of a gathered part."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, layout: SpmdParam) -> DTensor:
        """Wraps the part, whose memory is shared."""
        ctx.layout = layout
        ctx.set_materialize_grads(False)
        return new_dtensor(local.detach(), layout.mesh, layout.placements, layout.shape)

    @staticmethod
    def backward(ctx: Any, grad: DTensor | None) -> tuple[torch.Tensor | None, None]:
        """Takes the part of the gradient."""
        return None if grad is None else ctx.layout.local_gradient(grad), None


@torch.compiler.allow_in_graph
def gathered_over_mesh(local: torch.Tensor, key: str) -> DTensor:
    """The DTensor of a gathered part, for graphs too: AOTAutograd traces it, and what backward sums.

    Args:
        local: The part.
        key: Of the layout.
    """
    layout = _by_key.get(key)
    if layout is None:
        raise InvariantError(f"a graph reads a parameter with the layout {key}, which is gone")
    made: DTensor = _Gathered.apply(local, layout)
    return made
