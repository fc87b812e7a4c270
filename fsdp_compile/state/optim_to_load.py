"""State of an optimizer that was saved by names, as the optimizer can load it: this rank's part of it."""

from __future__ import annotations

import dataclasses
import functools
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Adafactor, Optimizer

from fsdp_compile._torch.tensors import local_tensor, make_dtensor, tree_leaves, tree_map
from fsdp_compile.comm import exchange
from fsdp_compile.comm.gather import Receivers
from fsdp_compile.errors import ConfigError
from fsdp_compile.runtime.loaded_state import is_of_other_rank
from fsdp_compile.runtime.module_state import units_below
from fsdp_compile.runtime.replaced_params import is_number
from fsdp_compile.runtime.split_params import refuse_split
from fsdp_compile.runtime.units import FSDPParam, sharded_parameters
from fsdp_compile.state import optim_names
from fsdp_compile.state.from_first_rank import from_first_rank
from fsdp_compile.state.optim_form import Sharded
from fsdp_compile.state.optim_names import GROUPS, STATE, Keys, NamedGroups


@dataclasses.dataclass(frozen=True)
class Target:
    """What is to load a state dict.

    Attributes:
        named: The parameters of the optimizer.
        kind: What its own state dict calls them.
        optim: The optimizer, if it is known.
        where: The call, in errors.
    """

    named: NamedGroups
    kind: Keys
    optim: Optimizer | None
    where: str

    @property
    def has_states_of_parameters(self) -> bool:
        """Whether all of its tensors but scalars are known to have their parameters' shapes."""
        is_of_torch = type(self.optim).__module__.startswith("torch.optim.")
        return is_of_torch and not isinstance(self.optim, Adafactor)

    @property
    def settings(self) -> Sequence[Mapping[str, Any]]:
        """Of its groups now."""
        return [{} for _ in self.named.groups] if self.optim is None else self.optim.param_groups

    def param_of(self, name: str) -> FSDPParam | None:
        """The sharded parameter of a name, if it is one."""
        parameter = self.named.parameters.get(name)
        return None if parameter is None else self._sharded.get(parameter)

    @functools.cached_property
    def _sharded(self) -> dict[torch.Tensor, FSDPParam]:
        return sharded_parameters()


def to_load(
    state_dict: Mapping[str, Any] | None, sharded: Sharded, target: Target, holders: Receivers
) -> dict[str, Any]:
    """What an optimizer's `load_state_dict` takes.

    Args:
        state_dict: By names.
        sharded: The model.
        target: The optimizer.
        holders: Which ranks have the state dict: if the first one alone, all ranks call this together.

    Raises:
        ConfigError: If it does not fit.
    """
    if holders is Receivers.ALL:
        found = _read(state_dict or {}, target, may_be_sharded=True)
        return _result(found, _own_part, target)
    refuse_split(
        units_below(sharded.module),
        f"{target.where} of state that one rank has",
        instead="full state on every rank, or torch.distributed.checkpoint",
    )
    return _from_first(state_dict or {}, sharded, target)


def is_laid_out_like(value: DTensor, param: FSDPParam) -> bool:
    """Whether a DTensor has this rank's part of a parameter's shape; its dtype may be another."""
    like, local = param.dtensor, local_tensor(value)
    same_place = (value.device_mesh, value.placements) == (like.device_mesh, like.placements)
    is_plain = type(local) is torch.Tensor
    return same_place and is_plain and value.shape == like.shape and local.numel() == param.sharded_view.numel()


@dataclasses.dataclass(frozen=True)
class _Read:
    """A state dict that fits: states by name (or the user's own key), and the rest of it, with groups to load."""

    state: dict[str, Any]
    rest: dict[str, Any]


def _read(state_dict: Mapping[str, Any], target: Target, *, may_be_sharded: bool) -> _Read:
    """Raises `ConfigError` if a state dict does not fit the optimizer."""
    optim_names.refuse_numbers(state_dict, target.where)
    named = target.named
    problems = [f"{name} is not in the model" for name in optim_names.unknown_names(state_dict, named)]
    own = set(named.names)
    state = {}
    for key, value in state_dict[STATE].items():
        name = named.first_names.get(key)
        if name is None:
            state[key] = value  # the user's own
        elif name in own:
            state[name] = value
            problems += _problems(name, value, target, may_be_sharded=may_be_sharded)
    if problems:
        raise ConfigError(
            "the state dict does not fit the optimizer: " + "; ".join(problems),
            where=target.where,
            instead="what optim_state_dict() of the same model, on any number of ranks, gave; or full, plain tensors",
        )
    rest = {key: value for key, value in state_dict.items() if key not in (STATE, GROUPS)}
    if GROUPS in state_dict:
        keys = named.keys(target.kind)
        rest[GROUPS] = optim_names.regrouped(state_dict[GROUPS], named, target.settings, keys, target.where)
    return _Read(state, rest)


def _problems(name: str, state: Any, target: Target, *, may_be_sharded: bool) -> Iterator[str]:
    """What is wrong with the state of a parameter, in words."""
    param = target.param_of(name)
    parameter = target.named.parameters[name]
    shape = tuple(parameter.shape)
    for key, leaf in _leaves(state):
        title = f"{key!r} of {name}"
        is_tensor = isinstance(leaf, torch.Tensor)
        if is_tensor and hasattr(leaf, "local_shards"):
            yield f"{title} is a ShardedTensor: load the checkpoint with torch.distributed.checkpoint"
        elif isinstance(leaf, DTensor):
            if not may_be_sharded:
                yield f"{title} is a DTensor, and the first rank alone has it"
            elif param is not None and is_of_other_rank(leaf, param.dtensor):
                yield f"{title} was saved by another rank, and holds that rank's part"
            elif param is not None and not _can_be_laid_out(leaf, param):
                yield f"{title} is a DTensor of shape {tuple(leaf.shape)} on {leaf.device_mesh}, the parameter {shape}"
        elif is_tensor and leaf.is_meta:
            yield f"{title} is on the meta device"
        elif (
            is_tensor
            and param is None
            and isinstance(parameter, DTensor)
            and _is_each_element(key, leaf.shape, parameter)
        ):
            yield f"{title} is full, and the parameter a DTensor that fully_shard() has not made: load that with DCP"
        elif _is_of_torch(state, key, leaf, target) and tuple(leaf.shape) != shape:
            yield f"{title} has shape {tuple(leaf.shape)}, and the parameter {shape}"


def _leaves(state: Any) -> Iterator[tuple[Any, Any]]:
    held = state if isinstance(state, dict) else {"": state}
    return ((key, leaf) for key, value in held.items() for leaf in tree_leaves(value))


def _is_of_torch(state: Any, key: object, leaf: object, target: Target) -> bool:
    """Whether a value is a tensor of torch's optimizer, and no scalar; these hold none in lists or dicts."""
    is_own = isinstance(state, dict) and state.get(key) is leaf
    if not isinstance(leaf, torch.Tensor) or not is_own:
        return False
    return target.has_states_of_parameters and not is_number(key, leaf.shape)


def _is_cut(key: object, shape: Sequence[int], param: FSDPParam | None) -> bool:
    """Whether each rank keeps its part of a plain tensor."""
    return param is not None and _is_each_element(key, shape, param.dtensor)


def _is_each_element(key: object, shape: Sequence[int], parameter: torch.Tensor) -> bool:
    """Whether state has a value for each element of a parameter."""
    return tuple(shape) == tuple(parameter.shape) and not is_number(key, shape)


def _can_be_laid_out(value: DTensor, param: FSDPParam) -> bool:
    like = param.dtensor
    return is_laid_out_like(value, param) or (value.shape == like.shape and value.device_mesh == like.device_mesh)


class Place(Protocol):
    """Makes something of each value of a parameter's state."""

    def __call__(self, leaf: Any, param: FSDPParam | None, key: object) -> Any:
        """Of a value under `key`, and the parameter, if it is sharded."""


def _mapped(state: Mapping[str, Any], place: Place, target: Target) -> dict[str, Any]:
    found = {}
    for name, held in state.items():
        param = target.param_of(name)
        if isinstance(held, dict):
            found[name] = {
                key: tree_map(functools.partial(place, param=param, key=key), value) for key, value in held.items()
            }
        else:
            found[name] = tree_map(functools.partial(place, param=param, key=""), held)
    return found


def _result(found: _Read, place: Place, target: Target) -> dict[str, Any]:
    keys = target.named.keys(target.kind)
    state = {keys.get(name, name): value for name, value in _mapped(found.state, place, target).items()}
    if target.kind is Keys.PARAM_NAME and target.optim is not None:
        for name, value in target.optim.state_dict()[STATE].items():
            state.setdefault(name, tree_map(_copy, value))
    return {STATE: state, **found.rest}


def _copy(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


@torch.no_grad()
def _own_part(leaf: Any, param: FSDPParam | None, key: object) -> Any:
    """What this rank keeps of a value that it has, in memory of its own."""
    if not isinstance(leaf, torch.Tensor) or param is None:
        return _copy(leaf)
    device = param.sharded_view.device
    if isinstance(leaf, DTensor):
        same = leaf if is_laid_out_like(leaf, param) else leaf.redistribute(placements=param.dtensor.placements)
        return make_dtensor(local_tensor(same).to(device, copy=True), param.dtensor)
    if _is_cut(key, leaf.shape, param):
        part = param.own_part(leaf)
        return make_dtensor(part.to(device, copy=True, memory_format=torch.contiguous_format), param.dtensor)
    return _copy(leaf)


@dataclasses.dataclass(frozen=True)
class _Sent:
    """Stands for a tensor that follows in messages of its own."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _from_first(state_dict: Mapping[str, Any], sharded: Sharded, target: Target) -> dict[str, Any]:
    """What the first rank has: an outline of it, then each tensor, of which other ranks receive their rows alone."""
    tensors: list[torch.Tensor] = []
    pickled = from_first_rank(
        lambda: pickle.dumps(_outline(state_dict, target, tensors)),
        sharded.mesh,
        where=target.where,
        instead="what optim_state_dict() gave: tensors, and values that pickle can write",
    )
    outline = pickle.loads(pickled)
    following = iter(tensors)

    def receive(leaf: Any, param: FSDPParam | None, key: object) -> Any:
        return _received(leaf, next(following, None), param, key, sharded) if isinstance(leaf, _Sent) else leaf

    return _result(outline, receive, target)


def _outline(state_dict: Mapping[str, Any], target: Target, tensors: list[torch.Tensor]) -> _Read:
    """The first rank's state dict without its larger tensors, which are added to `tensors` in their order."""
    found = _read(state_dict, target, may_be_sharded=False)

    def outline(leaf: Any, param: FSDPParam | None, key: object) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.dim() == 0 and not _is_cut(key, leaf.shape, param):
            return leaf.detach().cpu()
        tensors.append(leaf.detach())
        return _Sent(tuple(leaf.shape), leaf.dtype)

    rest = tree_map(lambda leaf: leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf, found.rest)
    return _Read(_mapped(found.state, outline, target), rest)


@torch.no_grad()
def _received(
    sent: _Sent, full: torch.Tensor | None, param: FSDPParam | None, key: object, sharded: Sharded
) -> torch.Tensor:
    """This rank's part of a tensor that the first rank has, `full` there; all of it where it has another shape."""
    if param is not None and _is_cut(key, sent.shape, param):
        part = torch.empty(param.sharded_size, dtype=sent.dtype, device=param.sharded_view.device)
        exchange.take_from_first(part, full, param.spec)
        return make_dtensor(part, param.dtensor)
    whole = torch.empty(sent.shape, dtype=sent.dtype)
    if full is not None:
        whole.copy_(full)
    exchange.overwrite(whole, sharded.mesh)
    return whole
