"""The units of a sharded model, as plans need them: names, sizes and dtypes, without tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from fsdp_compile.fsdp2.unit import Model
from fsdp_compile.layout.spec import UnshardSpec


@dataclasses.dataclass(frozen=True)
class ParamData:
    """One sharded parameter.

    Attributes:
        name: From the root of its model.
        spec: Where it lies in the flat buffer, and how it is gathered and reduced.
        stored: Dtype of its shard.
        trained: Whether it is to have a gradient.
    """

    name: str
    spec: UnshardSpec
    stored: torch.dtype
    trained: bool


@dataclasses.dataclass(frozen=True)
class GroupData:
    """A flat buffer, of `numel` elements on each rank, and what lies in it."""

    numel: int
    stored: torch.dtype
    trained: bool
    params: tuple[ParamData, ...]

    @property
    def shard_bytes(self) -> int:
        """Bytes on one rank, padding included."""
        return self.numel * self.stored.itemsize


@dataclasses.dataclass(frozen=True)
class UnitData:
    """A unit; `title` as in graphs."""

    title: str
    groups: tuple[GroupData, ...]

    @property
    def params(self) -> Iterator[ParamData]:
        """All parameters of the unit."""
        return (param for group in self.groups for param in group.params)

    @property
    def shard_bytes(self) -> int:
        """Bytes of the unit's parameters on one rank, padding included."""
        return sum(group.shard_bytes for group in self.groups)

    @property
    def full_bytes(self) -> int:
        """Bytes of the unit's unsharded parameters in their stored dtype."""
        return sum(param.spec.numel * param.stored.itemsize for param in self.params)


def units_of(model: Model) -> tuple[UnitData, ...]:
    """The units of a model that have parameters, in the order of their modules."""
    return tuple(
        UnitData(
            unit.title,
            tuple(
                GroupData(
                    group.flat.numel(),
                    group.flat.dtype,
                    group.is_trainable,
                    tuple(ParamData(p.name, p.spec, group.flat.dtype, p.parameter.requires_grad) for p in group.params),
                )
                for group in unit.groups
            ),
        )
        for unit in model.units
        if unit.groups
    )
