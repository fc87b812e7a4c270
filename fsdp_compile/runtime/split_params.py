"""Parameters that are split over a tensor-parallel mesh as well as sharded, in what concerns a whole model."""

from __future__ import annotations

from collections.abc import Iterable

from torch.distributed.device_mesh import DeviceMesh

from fsdp_compile.errors import UnsupportedModelError
from fsdp_compile.runtime.units import FSDPUnit


def meshes_of(units: Iterable[FSDPUnit]) -> list[DeviceMesh]:
    """The meshes that parameters of some units are on; of tensor-parallel models those that have all of its ranks."""
    units = list(units)
    split = [p.dtensor.device_mesh for unit in units for p in unit.params if p.tensor_parallel is not None]
    # What is not split, each place in the tensor-parallel mesh shards for itself.
    return list(dict.fromkeys(split or (unit.policy.mesh for unit in units)))


def refuse_split(units: Iterable[FSDPUnit], where: str, *, instead: str) -> None:
    """Raises `UnsupportedModelError` if a parameter is split over a tensor-parallel mesh.

    Args:
        units: Of the model.
        where: The call that does not support it.
        instead: What to write.
    """
    for unit in units:
        for param in unit.params:
            if param.tensor_parallel is not None:
                raise UnsupportedModelError(
                    "a parameter was a DTensor before it was sharded (tensor parallelism), and is not whole on any of "
                    "the ranks that it is sharded over",
                    where=f"{where}, {unit.parameter_name(param)}",
                    instead=instead,
                )
