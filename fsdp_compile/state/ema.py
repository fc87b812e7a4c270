"""`EMA`: a moving average of a sharded model's parameters, sharded as they are.

The average of a parameter group is one tensor, laid out like the group's flat parameter: it is updated as a whole, and
no rank ever holds the average of a whole parameter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compile._torch.tensors import by_device_and_dtype, foreach_lerp_, local_tensor
from fsdp_compile.comm.gather import Receivers, first_rank, gather_whole
from fsdp_compile.errors import ConfigError
from fsdp_compile.runtime.extended_reads import refuse_extended
from fsdp_compile.runtime.loaded_state import is_of_other_rank
from fsdp_compile.runtime.module_state import params_in, units_below, unwrap
from fsdp_compile.runtime.split_params import meshes_of
from fsdp_compile.runtime.units import FSDPUnit
from fsdp_compile.runtime.unshard import reshard
from fsdp_compile.state.averages import Averages, Entry, extra_state
from fsdp_compile.state.outside_of_steps import check, refuse_inside_a_step

_COUNT, _PREFIX = "n_averaged", "module."
"""Names in state dicts, which are those of `torch.optim.swa_utils.AveragedModel`."""


class EMA:
    """An exponential moving average of a sharded model: `AveragedModel` with `get_ema_multi_avg_fn(decay)`, on shards.

        ema = fsdp_compile.EMA(model, decay=0.999)
        ...
        optimizer.step()
        ema.update()
        ...
        with ema.swapped_in():
            evaluate(model)

    Each rank holds the average of its own shards, and a copy of all buffers. Parameters may be frozen, thawed, moved or
    cast meanwhile: their averages follow. It is saved and loaded by `torch.distributed.checkpoint`, as one entry of a
    checkpoint (`dcp.save({"ema": ema})`), at any number of ranks. Extra state of modules (`get_extra_state`) is the
    model's and has no average: state dicts have it as it is, for `AveragedModel`, and loading one leaves it alone.

    Args:
        model: A whole sharded model, or a compiled one.
        decay: How much of the average stays in each update.

    Attributes:
        decay: As given; it may be changed between updates.
        n_averaged: The number of updates. The first one copies the parameters.

    Raises:
        ConfigError: If `decay` is not between 0 and 1, nothing in the model is sharded yet, or it is a part of what was
            sharded together.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999) -> None:
        if not 0.0 <= decay <= 1.0:
            raise ConfigError(f"a decay is {decay}", where="EMA(decay=...)", instead="a number from 0 to 1, as 0.999")
        module = unwrap(model)
        assert isinstance(module, nn.Module)
        self._model = module
        _refuse_parts(module, units_below(module))
        self.decay = decay
        self.n_averaged = 0
        self._is_swapped_in = False
        self._averages = Averages(module, self._units("EMA(model)"))

    @torch.no_grad()
    def update(self) -> None:
        """Moves the averages towards the parameters, and copies the buffers; to be called after an optimizer's step.

        Raises:
            ConfigError: Inside of `swapped_in`, a forward, a backward or `full_params`.
        """
        averages = self._current("EMA.update()")
        pairs = list(averages.pairs())
        parameter_of = dict(pairs)
        for (_, dtype), same in by_device_and_dtype(average for average, _ in pairs).items():
            parameters = [parameter_of[average] for average in same]
            if self.n_averaged and (dtype.is_floating_point or dtype.is_complex):
                foreach_lerp_(same, parameters, 1 - self.decay)
                continue
            for average, parameter in zip(same, parameters, strict=True):
                average.copy_(average * self.decay + parameter * (1 - self.decay) if self.n_averaged else parameter)
        averages.copy_buffers(self._model)
        self.n_averaged += 1

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Inside, the model's parameters and buffers have the averaged values.

        They are exchanged in place, so that compiled code goes on, and exchanged back bit for bit when the block ends,
        also with an exception. What is written to the model inside (by `set_model_state_dict` or `update_bn`, say) is
        kept as the average.

        Raises:
            ConfigError: Inside of another `swapped_in`, a forward, a backward or `full_params`.
        """
        self._exchange("EMA.swapped_in()")
        self._is_swapped_in = True
        try:
            yield
        finally:
            self._is_swapped_in = False
            self._exchange("the end of EMA.swapped_in()")

    def state_dict(self) -> dict[str, Any]:
        """The averages under `AveragedModel`'s names: DTensors, in the memory that updates write; no communication."""
        entries = self._current("EMA.state_dict()").entries(self._model)
        averages = {_PREFIX + entry.name: entry.value for entry in entries}
        return {_COUNT: torch.tensor(self.n_averaged), **averages, **self._extra_state()}

    def full_state_dict(self, *, rank0_only: bool = False, cpu_offload: bool = False) -> dict[str, Any]:
        """The averages as full tensors, which also an `AveragedModel` of the plain model loads. All ranks call it.

        Args:
            rank0_only: Only the first rank of the mesh gets values, the others an empty dict.
            cpu_offload: Full tensors are in the memory of the host.

        Raises:
            ConfigError: With `rank0_only`, if units are on meshes whose first ranks differ.
        """
        where = "EMA.full_state_dict()"
        if rank0_only:
            first_rank(meshes_of(units_below(self._model)), where)
        state: dict[str, Any] = {_COUNT: torch.tensor(self.n_averaged), **self._extra_state()}
        receives = True
        for entry in self._current(where).entries(self._model):
            full = _full(entry, Receivers.FIRST if rank0_only else Receivers.ALL, cpu_offload=cpu_offload)
            if full is None:
                receives = False
            else:
                state[_PREFIX + entry.name] = full
        return state if receives else {}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes what `state_dict` or `full_state_dict` gave; of full tensors each rank, which has all, keeps its part.

        Raises:
            ConfigError: If names or shapes are others, or DTensors hold other rows than this rank's; nothing is changed
                then.
        """
        entries = list(self._current("EMA.load_state_dict()").entries(self._model))
        names = {_COUNT, *(_PREFIX + entry.name for entry in entries)}
        _refuse_names(names, set(state_dict) - self._extra_state().keys())
        parts = [_part(entry, state_dict[_PREFIX + entry.name]) for entry in entries]
        for entry, part in zip(entries, parts, strict=True):
            entry.held.copy_(part)
        self.n_averaged = int(state_dict[_COUNT])

    def _extra_state(self) -> dict[str, Any]:
        return {_PREFIX + name: value for name, value in extra_state(self._model).items()}

    def _units(self, where: str) -> list[FSDPUnit]:
        if self._is_swapped_in:
            raise ConfigError("the averages are in the model", where=where, instead="the end of swapped_in() before it")
        instead = "it before or after that"
        refuse_inside_a_step(where, what="parameters and averages are needed as a whole", instead=instead)
        units = units_below(self._model)
        check(units, where, instead=instead)
        refuse_extended(
            (param for unit in units for param in unit.params),
            where,
            instead="torch.optim.swa_utils.AveragedModel of a model without such parameters",
        )
        return units

    def _current(self, where: str) -> Averages:
        """The averages in the layout that parameters have now."""
        units = self._units(where)
        if not self._averages.fits(self._model, units):
            with torch.no_grad():
                averages = Averages(self._model, units)
                averages.carry(self._averages)
            self._averages = averages
        return self._averages

    @torch.no_grad()
    def _exchange(self, where: str) -> None:
        self._current(where).exchange(self._model)
        reshard(units_below(self._model))  # unsharded values are outdated


def _full(entry: Entry, receivers: Receivers, *, cpu_offload: bool) -> torch.Tensor | None:
    param = entry.param
    if param is not None:
        return gather_whole(
            entry.held, param.spec, param.tensor_parallel, receivers, torch.device("cpu") if cpu_offload else None
        )
    whole = entry.value.full_tensor() if isinstance(entry.value, DTensor) else entry.held
    return whole.cpu() if cpu_offload else whole.clone()


def _refuse_parts(module: nn.Module, units: list[FSDPUnit]) -> None:
    if not units:
        raise ConfigError(
            "nothing in this model is sharded yet",
            where=f"EMA({type(module).__name__})",
            instead="fully_shard(model) before it, or EMA(model) after the first call of the compiled model; "
            "torch.optim.swa_utils.AveragedModel for a model that stays plain",
        )
    for unit in units:
        inside = set(params_in(module, unit))
        outside = next((param for param in unit.params if param not in inside), None)
        if outside is not None:
            raise ConfigError(
                f"{unit.parameter_name(outside)} was sharded together with parameters of this module, and is outside "
                "of it",
                where=f"EMA({type(module).__name__}), unit {unit.title}",
                instead="EMA(model) of the whole model, or fully_shard(module) before the model that contains it",
            )


def _refuse_names(wanted: set[str], given: set[str]) -> None:
    problems = [f"{name} is missing" for name in sorted(wanted - given)]
    problems += [f"{name} is not in the model" for name in sorted(given - wanted)]
    if problems:
        raise ConfigError(
            "the state dict does not fit the model: " + "; ".join(problems),
            where="EMA.load_state_dict()",
            instead="what EMA(model).state_dict() or .full_state_dict() of the same model gave",
        )


def _is_split(value: torch.Tensor) -> bool:
    return isinstance(value, DTensor) and not all(placement.is_replicate() for placement in value.placements)


def _part(entry: Entry, value: torch.Tensor) -> torch.Tensor:
    """This rank's part of a value that was loaded."""
    if value.shape != entry.like.shape:
        raise ConfigError(
            f"the value has shape {tuple(value.shape)}, and {tuple(entry.like.shape)} in the model",
            where=f"EMA.load_state_dict(), {entry.name}",
            instead="the state of an EMA of the same model",
        )
    if not isinstance(value, DTensor):
        if entry.param is None and _is_split(entry.like):
            raise ConfigError(
                "the value is full, and fully_shard() has not made the DTensor in the model, which it ignores",
                where=f"EMA.load_state_dict(), {entry.name}",
                instead="torch.distributed.checkpoint, which saves every rank's part (dcp.save({'ema': ema}))",
            )
        return value if entry.param is None else entry.param.own_part(value)
    like = entry.like
    if (
        not isinstance(like, DTensor)
        or is_of_other_rank(value, like)
        or value.placements != like.placements
        or local_tensor(value).shape != entry.held.shape
    ):
        raise ConfigError(
            "the value holds other rows than this rank's: it was saved by another rank, or at another number of ranks",
            where=f"EMA.load_state_dict(), {entry.name}",
            instead="torch.distributed.checkpoint, which saves every rank's part (dcp.save({'ema': ema})), or "
            "ema.full_state_dict() on all ranks before rank 0 saves",
        )
    return local_tensor(value)
