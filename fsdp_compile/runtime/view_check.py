"""Whether every parameter below a module is still the view that it was; checked before each step.

Usually nothing has changed, and a few comparisons of whole lists of identities find that: no Python code runs per
parameter.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compile._torch.tensors import have_locals, plain_torch_functions
from fsdp_compile.runtime.units import FSDPParamGroup, FSDPUnit, ModelState

_tables_of = operator.attrgetter("_parameters", "_modules")
_parameters_of = operator.attrgetter("_parameters")
_requires_grad = operator.attrgetter("requires_grad")
_attributes_of = operator.attrgetter("__dict__")
_END = object()
"""Ends what is compared, so that neither side may be longer."""


@dataclasses.dataclass(frozen=True, eq=False)
class ViewCheck:
    """A module in which every parameter is a view of its flat parameter, and what tells that it still is.

    Attributes:
        units: The units that modules in it read from.
        groups: Their parameter groups.
        extended: Those of them with all-gather extensions.
        outside: Modules outside of it that have parameters of the units.
        tables: The dicts of parameters and of modules of each of `modules`, and of parameters of each of `outside`.
        names: The keys of these dicts.
        contents: Their values, and `_END`.
        views: The local tensor of each parameter.
        storages: The own, empty storage of each parameter, which `.data = ...` replaces.
        trainable: Whether each requires gradients.
        attributes: How many attributes each has, and each local tensor: all-gather extensions may be put on it.
    """

    units: tuple[FSDPUnit, ...]
    groups: tuple[FSDPParamGroup, ...]
    extended: tuple[FSDPParamGroup, ...]
    models: tuple[ModelState, ...]
    layout_versions: list[int]
    modules: tuple[weakref.ref[nn.Module], ...]
    outside: tuple[weakref.ref[nn.Module], ...]
    tables: tuple[dict[str, Any], ...]
    names: list[str]
    contents: tuple[object, ...]
    parameters: tuple[DTensor, ...]
    views: tuple[torch.Tensor, ...]
    storages: tuple[torch.UntypedStorage | None, ...]
    trainable: tuple[bool, ...]
    attributes: list[int]

    @staticmethod
    def of(root: nn.Module, units: Sequence[FSDPUnit]) -> ViewCheck:
        """The check of a module as it is now, with the units that modules in it read from."""
        params = [param for unit in units for param in unit.params]
        modules = dict.fromkeys(root.modules())
        outside = dict.fromkeys(m for param in params for m, _ in param.module_refs if m not in modules)
        # Those outside may be above the root: their dicts of modules would keep it alive.
        tables = tuple(_tables(modules, outside))
        groups = [group for unit in units for group in unit.param_groups]
        models = tuple(dict.fromkeys(unit.model for unit in units))
        return ViewCheck(
            units=tuple(units),
            groups=tuple(groups),
            extended=tuple(group for group in groups if group.is_extended),
            models=models,
            layout_versions=[model.layout_version for model in models],
            modules=tuple(map(weakref.ref, modules)),
            outside=tuple(map(weakref.ref, outside)),
            tables=tables,
            names=_names(tables),
            contents=(*_contents(tables), _END),
            parameters=tuple(param.dtensor for param in params),
            views=tuple(param.sharded_view for param in params),
            storages=tuple(param.dtensor_storage for param in params),
            trainable=tuple(group.flat_param.requires_grad for group in groups for _ in group.params),
            attributes=[len(vars(t)) for t in (*(p.parameter for p in params), *(p.sharded_view for p in params))],
        )

    def is_intact(self) -> bool:
        """Whether nothing was replaced, converted, moved, frozen, unfrozen, added, removed or laid out anew since."""
        modules, outside = ([reference() for reference in each] for each in (self.modules, self.outside))
        if (
            None in modules
            or None in outside
            or [model.layout_version for model in self.models] != self.layout_versions
        ):
            return False
        with plain_torch_functions():  # asking each parameter's class for its own takes as long again
            return (
                _same(_tables(modules, outside), self.tables)
                and _names(self.tables) == self.names
                and _same(itertools.chain(_contents(self.tables), (_END,)), self.contents)
                and have_locals(self.parameters, self.views)
                and _same(map(torch.Tensor.untyped_storage, self.parameters), self.storages)
                and _same(map(_requires_grad, self.parameters), self.trainable)
                and list(map(len, map(_attributes_of, (*self.parameters, *self.views)))) == self.attributes
            )


def _tables(modules: Iterable[nn.Module | None], outside: Iterable[nn.Module | None]) -> Iterator[dict[str, Any]]:
    return itertools.chain(itertools.chain.from_iterable(map(_tables_of, modules)), map(_parameters_of, outside))


def _names(tables: Iterable[dict[str, Any]]) -> list[str]:
    return list(itertools.chain.from_iterable(tables))


def _contents(tables: Iterable[dict[str, Any]]) -> Iterator[object]:
    return itertools.chain.from_iterable(map(dict.values, tables))


def _same(found: Iterable[object], expected: Iterable[object]) -> bool:
    """Whether two sequences consist of the same objects, up to the end of the shorter."""
    # `==` of tensors would compare values.
    return all(map(operator.is_, found, expected))
