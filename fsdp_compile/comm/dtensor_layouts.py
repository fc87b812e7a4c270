"""Parameters that are DTensors when they are gathered: split over further ranks, or over a mesh with all ranks.

    mesh ("dp", "tp") of 2 x 2, weight [8, 4] with Shard(0) over "tp", fully_shard(mesh=mesh["dp"])

    in a forward      DTensor over mesh["tp"]            [Shard(0)]                     local [4, 4], gathered over "dp"
    between steps     DTensor over mesh["dp", "tp"]      [_StridedShard(0), Shard(0)]   local [2, 4]

    weight [8, 4] with [Replicate(), Shard(0)] over both, fully_shard(mesh=mesh, dp_mesh_dims=...(shard="dp"))

    in a forward      DTensor over mesh["dp", "tp"]      [Replicate(), Shard(0)]        local [4, 4], gathered over "dp"
    between steps     the same                           [_StridedShard(0), Shard(0)]   local [2, 4]

Gradients are summed over the dimensions that are not data-parallel, where they are partial sums, and left as they are
over the data-parallel ones, which the reduction of the unit averages over.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import weakref
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from fsdp_compile._torch.autograd import set_gradient_dtype
from fsdp_compile._torch.tensors import new_dtensor
from fsdp_compile.errors import InvariantError

_by_key: weakref.WeakValueDictionary[str, DTensorLayout] = weakref.WeakValueDictionary()
"""Graphs name layouts, since an argument of a call in a graph is a tensor or a constant."""


@dataclasses.dataclass(frozen=True)
class DTensorLayout:
    """How a parameter is laid out while it is gathered.

    Attributes:
        mesh: The ranks that it is a DTensor over.
        placements: On `mesh`.
        shape: Of the whole parameter.
        data_parallel: Dimensions of `mesh` over which gradients are averaged; none if it has other ranks alone.
        grad_dtype: Dtype in which gradients are summed over other ranks, since torch 2.15; `None` for their own.
        key: By which graphs know the layout.
    """

    mesh: DeviceMesh
    placements: tuple[Any, ...]
    shape: torch.Size
    data_parallel: frozenset[int]
    grad_dtype: torch.dtype | None
    key: str = dataclasses.field(default="", compare=False)

    @classmethod
    def of(
        cls,
        mesh: DeviceMesh,
        placements: tuple[Any, ...],
        shape: torch.Size,
        data_parallel: frozenset[int],
        grad_dtype: torch.dtype | None = None,
    ) -> DTensorLayout:
        """The one object for a layout: code that is compiled for one layer is that of the others."""
        found = cls(mesh, placements, shape, data_parallel, grad_dtype)
        known = next((other for other in _by_key.values() if other == found), None)
        if known is not None:
            return known
        key = next(key for key in (f"layout.{number}" for number in itertools.count()) if key not in _by_key)
        _by_key[key] = found = dataclasses.replace(found, key=key)
        return found

    def gathered(self, local: torch.Tensor) -> DTensor:
        """The parameter that a forward computes with, of this rank's part; compiled code traces this."""
        return gathered_dtensor(local, self.key)

    def unreduced(self, local: torch.Tensor) -> DTensor:
        """The gradient with this rank's part, of which the sums over data-parallel ranks are still to be made."""
        placements = tuple(Partial() if i in self.data_parallel else p for i, p in enumerate(self.placements))
        return new_dtensor(local, self.mesh, placements, self.shape)

    def local_gradient(self, grad: DTensor) -> torch.Tensor:
        """This rank's part of a gradient, with the sums over data-parallel ranks still to be made."""
        given = tuple(grad.placements)
        # A position embedding, of which each rank of "cp" has used some rows: each rank takes an equal part of all.
        split = [i for i in self.data_parallel if not given[i].is_partial() and not given[i].is_replicate()]
        wanted = tuple(
            given[i] if i in self.data_parallel and i not in split else p for i, p in enumerate(self.placements)
        )
        local = (grad if given == wanted else grad.redistribute(placements=wanted)).to_local()
        return local / math.prod(self.mesh.size(i) for i in split) if split else local


class _Gathered(torch.autograd.Function):
    """The DTensor of a gathered part."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, layout: DTensorLayout) -> DTensor:
        """Wraps the part, whose memory is shared."""
        ctx.layout = layout
        ctx.set_materialize_grads(False)
        if ctx.needs_input_grad[0]:  # integers have no gradients
            set_gradient_dtype(ctx, layout.grad_dtype)
        return new_dtensor(local.detach(), layout.mesh, layout.placements, layout.shape)

    @staticmethod
    def backward(ctx: Any, grad: DTensor | None) -> tuple[torch.Tensor | None, None]:
        """Takes the part of the gradient."""
        return None if grad is None else ctx.layout.local_gradient(grad), None


@torch.compiler.allow_in_graph
def gathered_dtensor(local: torch.Tensor, key: str) -> DTensor:
    """The DTensor of a gathered part, for graphs too: AOTAutograd traces it, and what backward sums."""
    layout = _by_key.get(key)
    if layout is None:
        raise InvariantError(f"a graph reads a parameter with the layout {key}, which is gone")
    made: DTensor = _Gathered.apply(local, layout)
    return made
