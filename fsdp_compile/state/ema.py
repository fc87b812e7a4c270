"""`EMA`: a moving average of a sharded model's parameters, sharded as they are."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compile._torch.tensors import by_device_and_dtype, foreach_lerp_, make_dtensor
from fsdp_compile.errors import ConfigError
from fsdp_compile.fsdp2.buffers import in_own_dtype
from fsdp_compile.fsdp2.shards import (
    full_value,
    is_first,
    local_of,
    plain_name,
    shard_between_steps,
    shard_like,
    unwrap,
)

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

    Each rank has the average of its own shards, and a copy of all buffers. It is saved and loaded by
    `torch.distributed.checkpoint`, as one entry of a checkpoint (`dcp.save({"ema": ema})`), at any number of ranks.

    Args:
        model: A sharded model, or a compiled one. It stays the one that was sharded: no parameters are added later.
        decay: How much of the average stays in each update.

    Attributes:
        decay: As given; it may be changed between updates.
        n_averaged: The number of updates. The first one copies the parameters.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999) -> None:
        if not 0.0 <= decay <= 1.0:
            raise ConfigError(f"a decay is {decay}", where="EMA(decay=...)", instead="a number from 0 to 1, as 0.999")
        self._model = unwrap(model)
        self.decay = decay
        self.n_averaged = 0
        self._is_swapped_in = False
        self._averages: dict[str, torch.Tensor] = {}
        now = self._now("EMA(model)").items()
        self._averages = {name: _like(value, local_of(value).detach().clone()) for name, value in now}

    @torch.no_grad()
    def update(self) -> None:
        """Moves the averages towards the parameters, and copies the buffers; to be called after an optimizer's step.

        Raises:
            ConfigError: Inside of `swapped_in`, a forward, a backward or `full_params`.
        """
        now = self._now("EMA.update()")
        moves = {
            name
            for name, p in now.items()
            if self.n_averaged and isinstance(p, nn.Parameter) and (p.is_floating_point() or p.is_complex())
        }
        pairs = {name: (local_of(self._averages[name]), local_of(value)) for name, value in now.items()}
        for name in pairs.keys() - moves:
            pairs[name][0].copy_(pairs[name][1])
        averages = by_device_and_dtype(pairs[name][0] for name in now if name in moves)
        parameters = by_device_and_dtype(pairs[name][1] for name in now if name in moves)
        for kind, same in averages.items():
            foreach_lerp_(same, parameters[kind], 1 - self.decay)
        self.n_averaged += 1

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Inside, the model's parameters and buffers have the averaged values.

        They are exchanged in place, so that compiled code goes on, and exchanged back bit for bit when the block ends,
        also with an exception. What is written to the model inside (by `update_bn`, say) is kept as the average.

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
        first = {value: name for name, value in self._now("EMA.state_dict()").items()}
        state: dict[str, Any] = {_COUNT: torch.tensor(self.n_averaged)}
        for name, value in self._model.state_dict(keep_vars=True).items():
            # What modules give by `get_extra_state` is the model's.
            is_own = isinstance(value, torch.Tensor) and value in first
            state[_PREFIX + plain_name(name)] = self._averages[first[value]] if is_own else value
        return state

    def full_state_dict(self, *, rank0_only: bool = False, cpu_offload: bool = False) -> dict[str, Any]:
        """The averages as full tensors, which also an `AveragedModel` of the plain model loads. All ranks call it.

        Args:
            rank0_only: Only the first rank of the mesh gets values, the others an empty dict.
            cpu_offload: Full tensors are in the memory of the host.
        """
        state = self.state_dict()
        receives = not rank0_only or is_first(self._model.parameters(), "EMA.full_state_dict()")
        for name in list(state):
            value = state.pop(name)
            full = full_value(value) if isinstance(value, DTensor) else value
            if receives:
                own = full.to("cpu" if cpu_offload else full.device) if isinstance(full, torch.Tensor) else full
                state[name] = own
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes what `state_dict` or `full_state_dict` gave; of full tensors each rank, which has all, keeps its part.

        Raises:
            ConfigError: If names, shapes or layouts are others; nothing is changed then.
        """
        own = self.state_dict()
        wrong = [f"{name} is not in both" for name in sorted(own.keys() ^ state_dict.keys())]
        wrong += [f"{name} has another shape or layout" for name in own if not _fits(state_dict.get(name), own[name])]
        if wrong:
            raise ConfigError(
                "the state dict does not fit the model: " + "; ".join(wrong),
                where="EMA.load_state_dict()",
                instead="a state dict of EMA(model).state_dict() or .full_state_dict() of the same model",
            )
        self.n_averaged = int(state_dict[_COUNT])
        for name, value in own.items():
            given = state_dict[name]
            if isinstance(value, DTensor) and not isinstance(given, DTensor):
                given = shard_like(given, value)
            if isinstance(value, torch.Tensor) and name != _COUNT:
                local_of(value).copy_(local_of(given))

    def _now(self, where: str) -> dict[str, torch.Tensor]:
        """The model's parameters and buffers, sharded, by their names in the plain model."""
        if self._is_swapped_in:
            raise ConfigError("the averages are in the model", where=where, instead="the end of swapped_in() before it")
        shard_between_steps(self._model, where, instead="it before or after that")
        with in_own_dtype(self._model):
            every = itertools.chain(self._model.named_parameters(), self._model.named_buffers())
            now = {plain_name(name): value for name, value in every}
        for name, value in now.items() if self._averages else ():
            average = self._averages.get(name)
            if average is None or _kind(value) != _kind(average):
                raise ConfigError(
                    "it was added, or is full or otherwise changed now", where=f"{where}, {name}", instead="EMA(model)"
                )
            if (value.device, value.dtype) != (average.device, average.dtype):  # the model was moved, cast or made
                kept = value.detach() if average.is_meta else average
                self._averages[name] = _like(value, local_of(kept).to(local_of(value), copy=True))
        return now

    @torch.no_grad()
    def _exchange(self, where: str) -> None:
        now = self._now(where)
        with in_own_dtype(self._model):
            for name, value in now.items():
                average, own = local_of(self._averages[name]), local_of(value)
                kept = average.clone()
                average.copy_(own)
                own.copy_(kept)


def _like(value: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    return make_dtensor(local, value) if isinstance(value, DTensor) else local


def _kind(value: torch.Tensor) -> tuple[bool, torch.Size]:
    return isinstance(value, DTensor), local_of(value).shape


def _fits(given: Any, own: Any) -> bool:
    if not isinstance(own, torch.Tensor):
        return True
    if not isinstance(given, torch.Tensor) or given.shape != own.shape:
        return False
    return not isinstance(given, DTensor) or (
        isinstance(own, DTensor) and (given.placements, local_of(given).shape) == (own.placements, local_of(own).shape)
    )
