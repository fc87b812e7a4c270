"""Whether everything below a module is where the last step left it: looked at before each step.

`integrity.py` says what may have changed, and puts it right unit by unit. Usually nothing has, and that is seen by a
few comparisons of whole lists of identities: no Python code runs per parameter.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compile._torch import calls_are_compiled, hold_locals, plain_torch_functions
from fsdp_compile.parameters import integrity, sharding
from fsdp_compile.parameters.attributes import READS
from fsdp_compile.parameters.reads import layouts
from fsdp_compile.parameters.unit import Unit

_WATCHED = "_fsdp_watched"
_tables_of = operator.attrgetter("_parameters", "_modules")
_END = object()
"""Ends what is compared, so that neither side may be longer."""
_requires_grad = operator.attrgetter("requires_grad")


def units_in_place(root: nn.Module) -> Sequence[Unit]:
    """The units that modules in `root` read from, each parameter of them a view of its flat shard.

    Raises:
        ConfigError: As `integrity.check` and `sharding.refuse_new_parameters`.
    """
    watched: Watched | None = root.__dict__.get(_WATCHED)
    if watched is None or not watched.is_intact():
        watched = _put_in_place(root)
    return watched.units


def _put_in_place(root: nn.Module) -> Watched:
    units = _units_read_below(root)
    for unit in units:
        integrity.refuse_held(unit)
    for unit in units:
        integrity.check(unit)
    # After the check, which takes parameters in that were put in the place of others. In compiled code one that is new
    # is an input of a graph, and the backend sees it; but then it is not to be known from now on.
    is_known = not calls_are_compiled() or not sharding.holds_plain_parameters(root)
    if not calls_are_compiled():
        sharding.refuse_new_parameters(root)
    watched = Watched.of(root)
    if is_known:
        object.__setattr__(root, _WATCHED, watched)
    return watched


@dataclasses.dataclass(frozen=True, eq=False)
class Watched:
    """A module in which everything is in place, and what tells that it still is.

    Attributes:
        units: What modules in it read from.
        modules: Those in it, and others that hold parameters of the units.
        tables: The dicts of parameters and of modules of each of these.
        names: Of what the dicts hold.
        contents: The parameters and modules that the dicts hold, and `_END`.
        parameters: All of the units.
        locals: The view that each of them holds.
        storages: The own, empty storage of each of them, which `.data = ...` replaces.
        trainable: Whether each of them gets gradients.
        layouts: How often anything had been laid out.
    """

    units: tuple[Unit, ...]
    modules: tuple[nn.Module, ...]
    tables: tuple[dict[str, Any], ...]
    names: list[str]
    contents: tuple[object, ...]
    parameters: tuple[DTensor, ...]
    locals: tuple[torch.Tensor, ...]
    storages: tuple[torch.UntypedStorage | None, ...]
    trainable: tuple[bool, ...]
    layouts: int

    @staticmethod
    def of(root: nn.Module) -> Watched:
        """Takes what is there now to be in place."""
        units = _units_read_below(root)
        slots = [slot for unit in units for slot in unit.slots]
        modules = tuple(dict.fromkeys([*root.modules(), *(module for slot in slots for module, _ in slot.owners)]))
        tables = tuple(_tables(modules))
        return Watched(
            units=tuple(units),
            modules=modules,
            tables=tables,
            names=_names(tables),
            contents=(*_contents(tables), _END),
            parameters=tuple(slot.dtensor for slot in slots),
            locals=tuple(slot.local for slot in slots),
            storages=tuple(slot.shell for slot in slots),
            trainable=tuple(flat.leaf.requires_grad for unit in units for flat in unit.flats for _ in flat.slots),
            layouts=layouts(),
        )

    def is_intact(self) -> bool:
        """Whether nothing was replaced, converted, moved, frozen, thawed, added, removed or laid out anew since."""
        if self.layouts != layouts():
            return False
        with plain_torch_functions():  # asking each parameter's class for its own takes as long again
            return (
                _same(_tables(self.modules), self.tables)
                and _names(self.tables) == self.names
                and _same(itertools.chain(_contents(self.tables), (_END,)), self.contents)
                and hold_locals(self.parameters, self.locals)
                and _same(map(torch.Tensor.untyped_storage, self.parameters), self.storages)
                and _same(map(_requires_grad, self.parameters), self.trainable)
            )


def _tables(modules: Iterable[nn.Module]) -> Iterator[dict[str, Any]]:
    """The dicts of parameters and of modules of each module."""
    return itertools.chain.from_iterable(map(_tables_of, modules))


def _names(tables: Iterable[dict[str, Any]]) -> list[str]:
    """The names in some of them."""
    return list(itertools.chain.from_iterable(tables))


def _contents(tables: Iterable[dict[str, Any]]) -> Iterator[object]:
    """The parameters and the modules that are in some of them."""
    return itertools.chain.from_iterable(map(dict.values, tables))


def _same(found: Iterable[object], expected: Iterable[object]) -> bool:
    """Whether two sequences hold the same objects, up to the end of the shorter; `==` of tensors compares values."""
    return all(map(operator.is_, found, expected))


def _units_read_below(root: nn.Module) -> list[Unit]:
    reads = [read for module in root.modules() for read in module.__dict__.get(READS, {}).values()]
    return list(dict.fromkeys(flat.unit for _, _, flat in reads))
