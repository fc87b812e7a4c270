"""The averages of a model's parameters, laid out as its flat parameters are, and copies of its buffers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compile._torch.tensors import local_tensor, make_dtensor
from fsdp_compile.errors import ConfigError
from fsdp_compile.modules import buffers
from fsdp_compile.runtime.gradients import part_of
from fsdp_compile.runtime.units import FSDPParam, FSDPUnit


class Entry(NamedTuple):
    """One entry of a state dict of averages.

    Attributes:
        name: As in the state dict of the model.
        held: This rank's part of the average, in the memory that updates write.
        like: The parameter or buffer.
        param: Of a sharded parameter.
    """

    name: str
    held: torch.Tensor
    like: torch.Tensor
    param: FSDPParam | None

    @property
    def value(self) -> torch.Tensor:
        """The average as state dicts hold it: a DTensor where the parameter is one, of the same memory."""
        if not isinstance(self.like, DTensor):
            return self.held
        # With a storage of its own: a DTensor cannot be saved whose storage begins before it does.
        return make_dtensor(torch.from_dlpack(self.held), self.like)


class Averages:
    """The averages of one layout of a model's parameters; they begin as the parameters' values.

    Attributes:
        groups: For each parameter group a tensor like its flat parameter.
        parts: This rank's part of each parameter's average, by the parameter's first name.
        buffers: Copies of the model's buffers, in their own dtypes.
    """

    def __init__(self, model: nn.Module, units: list[FSDPUnit]) -> None:
        self.groups = {group: group.flat_param.detach().clone() for unit in units for group in unit.param_groups}
        places = {param.parameter: (group, param) for group in self.groups for param in group.params}
        self._whole: dict[str, tuple[nn.Module, str]] = {}
        self.parts: dict[str, torch.Tensor] = {}
        for name, parameter in model.named_parameters():
            if parameter in places:
                group, param = places[parameter]
                self.parts[name] = part_of(param, self.groups[group])
            else:
                owner, _, attribute = name.rpartition(".")
                self._whole[name] = (model.get_submodule(owner), attribute)
                self.parts[name] = _local(parameter).detach().clone()
        self.buffers = {name: _local(buffer).detach().clone() for name, buffer in buffers.in_own_dtype(model)}

    def fits(self, model: nn.Module, units: list[FSDPUnit]) -> bool:
        """Whether the parameters are laid out as they were, and those that are not sharded are like their averages."""
        if list(self.groups) != [group for unit in units for group in unit.param_groups]:
            return False
        sharded = {param.parameter for group in self.groups for param in group.params}
        whole = {name: _kind(_local(p)) for name, p in model.named_parameters() if p not in sharded}
        return whole == {name: _kind(self.parts[name]) for name in self._whole}

    def carry(self, before: Averages) -> None:
        """Takes over the averages of an earlier layout; raises `ConfigError` if parameters were added or resized."""
        for name, part in self.parts.items():
            if name not in before.parts or before.parts[name].shape != part.shape:
                raise ConfigError(
                    "a parameter was added, or changed its shape, since its average was made",
                    where=f"EMA, {name}",
                    instead="EMA(model, decay) again after the change",
                )
        for name, part in self.parts.items():
            part.copy_(before.parts[name])
        for name in self.buffers.keys() & before.buffers.keys():
            self.buffers[name] = before.buffers[name]

    def pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each average with what it is an average of: flat parameters, then parameters that are not sharded."""
        for group, average in self.groups.items():
            yield average, group.flat_param.detach()
        for name, (owner, attribute) in self._whole.items():
            parameter = owner._parameters[attribute]
            assert parameter is not None
            yield self.parts[name], _local(parameter).detach()

    def copy_buffers(self, model: nn.Module) -> None:
        """Copies the model's buffers."""
        for name, buffer in buffers.in_own_dtype(model):
            held, now = self.buffers.get(name), _local(buffer).detach()
            if held is None or (held.shape, held.dtype, held.device) != (now.shape, now.dtype, now.device):
                self.buffers[name] = now.clone()
            else:
                held.copy_(now)

    def exchange(self, model: nn.Module) -> None:
        """Exchanges the averages and copies with the model's parameters and buffers, one tensor after the other."""
        for average, parameter in self.pairs():
            _exchange(average, parameter)
        for module in model.modules():
            buffers.restore(module)
        for name, buffer in model.named_buffers():
            if name in self.buffers:
                _exchange(self.buffers[name], _local(buffer).detach())
        for module in model.modules():
            buffers.follow_mode(module)

    def entries(self, model: nn.Module) -> Iterator[Entry]:
        """What a state dict holds: parameters and saved buffers, under all names that the model's has."""
        params = {param.parameter: param for group in self.groups for param in group.params}
        held: dict[torch.Tensor, torch.Tensor] = {p: self.parts[name] for name, p in model.named_parameters()}
        held |= {b: self.buffers[name] for name, b in model.named_buffers() if name in self.buffers}
        for name, value in model.state_dict(keep_vars=True).items():
            if isinstance(value, torch.Tensor) and value in held:
                yield Entry(name, held[value], value, params.get(value))  # type: ignore[call-overload]


def extra_state(model: nn.Module) -> dict[str, Any]:
    """What modules give by `get_extra_state`, under their names in the model's state dict."""
    return {name: value for name, value in model.state_dict().items() if name.rpartition(".")[2] == "_extra_state"}


def _kind(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def _exchange(one: torch.Tensor, other: torch.Tensor) -> None:
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)
