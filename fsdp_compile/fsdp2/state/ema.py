"""`EMA`: a moving average of a sharded model's parameters, sharded as they are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compile._torch.tensors import by_device_and_dtype, foreach_lerp_, make_dtensor
from fsdp_compile.errors import ConfigError
from fsdp_compile.fsdp2.shards import full_value, is_first, local_of, meshes_of, own_part, shard_between_steps, unwrap

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
        self._averages = {name: local_of(value).detach().clone() for name, value in self._now("EMA(model)").items()}

    @torch.no_grad()
    def update(self) -> None:
        """Moves the averages towards the parameters, and copies the buffers; to be called after an optimizer's step.

        Raises:
            ConfigError: Inside of `swapped_in`, a forward, a backward or `full_params`.
        """
        now = self._now("EMA.update()")
        buffers = dict(self._model.named_buffers())
        moving = {id(average): name for name, average in self._averages.items() if self._is_moving(name, buffers)}
        for name in self._averages.keys() - moving.values():
            self._averages[name].copy_(local_of(now[name]))
        averages = [average for average in self._averages.values() if id(average) in moving]
        for same in by_device_and_dtype(averages).values():
            foreach_lerp_(same, [local_of(now[moving[id(each)]]).detach() for each in same], 1 - self.decay)
        self.n_averaged += 1

    def _is_moving(self, name: str, buffers: Mapping[str, torch.Tensor]) -> bool:
        dtype = self._averages[name].dtype
        return self.n_averaged > 0 and name not in buffers and (dtype.is_floating_point or dtype.is_complex)

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
        state: dict[str, Any] = {_COUNT: torch.tensor(self.n_averaged)}
        now, first = self._now("EMA.state_dict()"), self._first_names()
        for name, value in self._model.state_dict(keep_vars=True).items():
            known = first.get(value) if isinstance(value, torch.Tensor) else None
            if known is not None:
                like, average = now[known], self._averages[known]
                state[_PREFIX + name] = make_dtensor(average, like) if isinstance(like, DTensor) else average
            elif not isinstance(value, torch.Tensor) or name.endswith("_extra_state"):
                state[_PREFIX + name] = value  # what modules give by `get_extra_state` is the model's
        return state

    def full_state_dict(self, *, rank0_only: bool = False, cpu_offload: bool = False) -> dict[str, Any]:
        """The averages as full tensors, which also an `AveragedModel` of the plain model loads. All ranks call it.

        Args:
            rank0_only: Only the first rank of the mesh gets values, the others an empty dict.
            cpu_offload: Full tensors are in the memory of the host.
        """
        state = self.state_dict()
        receives = not rank0_only or is_first(meshes_of(state.values()), "EMA.full_state_dict()")
        for name in list(state):
            value = state.pop(name)
            full = full_value(value) if isinstance(value, DTensor) else value
            if receives:
                state[name] = full.to("cpu" if cpu_offload else full.device) if isinstance(full, torch.Tensor) else full
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
                instead="what EMA(model).state_dict() or .full_state_dict() of the same model gave",
            )
        self.n_averaged = int(state_dict[_COUNT])
        for name, value in own.items():
            given = state_dict[name]
            if isinstance(value, torch.Tensor) and name != _COUNT:
                split = isinstance(value, DTensor) and not isinstance(given, DTensor)
                local_of(value).copy_(own_part(given, value) if split else local_of(given))

    def _now(self, where: str) -> dict[str, torch.Tensor]:
        """The model's parameters and buffers, sharded."""
        if self._is_swapped_in:
            raise ConfigError("the averages are in the model", where=where, instead="the end of swapped_in() before it")
        shard_between_steps(self._model, where, instead="it before or after that")
        now = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        known = getattr(self, "_averages", None)
        for name, value in now.items() if known is not None else ():
            if name not in known or known[name].shape != local_of(value).shape:
                raise ConfigError(
                    "it was added, or is full or has another shape now", where=f"{where}, {name}", instead="EMA(model)"
                )
        return now

    def _first_names(self) -> dict[torch.Tensor, str]:
        return {value: name for name, value in [*self._model.named_parameters(), *self._model.named_buffers()]}

    @torch.no_grad()
    def _exchange(self, where: str) -> None:
        for name, value in self._now(where).items():
            kept = self._averages[name].clone()
            self._averages[name].copy_(local_of(value))
            local_of(value.detach()).copy_(kept)


def _fits(given: Any, own: Any) -> bool:
    if not isinstance(own, torch.Tensor):
        return True
    if not isinstance(given, torch.Tensor) or given.shape != own.shape:
        return False
    return not isinstance(given, DTensor) or (
        isinstance(own, DTensor) and (given.placements, local_of(given).shape) == (own.placements, local_of(own).shape)
    )
