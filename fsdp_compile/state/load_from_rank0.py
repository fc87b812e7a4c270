"""`load_from_rank0`: loads a full state dict that only the first rank has into a sharded model."""

from __future__ import annotations

import dataclasses
import io
import json
import pickle
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_compile.comm import exchange
from fsdp_compile.errors import ConfigError
from fsdp_compile.modules import buffers
from fsdp_compile.modules.classes import original_class
from fsdp_compile.runtime.extended_reads import refuse_extended
from fsdp_compile.runtime.module_state import units
from fsdp_compile.runtime.split_params import refuse_split
from fsdp_compile.runtime.units import FSDPUnit
from fsdp_compile.runtime.unshard import reshard
from fsdp_compile.sharding import sync_states, views
from fsdp_compile.sharding.devices import device_on
from fsdp_compile.sharding.views import allocate_from_meta
from fsdp_compile.state.from_first_rank import from_first_rank
from fsdp_compile.state.full_tensors import plain_name

_WHERE = "load_from_rank0"
_INSTEAD = (
    "full, plain tensors under the names of model.state_dict(); strict=False leaves names alone that only one of the "
    "two has"
)
_EXTRA = "_extra_state"
"""The last part of the names that torch gives to what `get_extra_state` returns."""


@dataclasses.dataclass(frozen=True)
class IncompatibleKeys:
    """The names that `load_from_rank0(strict=False)` ignored.

    Attributes:
        missing: Names of the model's state that the state dict has no value for, under any name.
        unexpected: Names in the state dict that the model does not have.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def load_from_rank0(
    model: nn.Module,
    state_dict: Mapping[str, Any] | None,
    *,
    strict: bool = True,
    device: torch.device | str | int | None = None,
) -> IncompatibleKeys:
    """Loads a full state dict that only the first rank has; every rank gets its part.

    All ranks call it together. Values are sent one by one in messages of at most 250 MiB; no other rank ever has a full
    parameter in memory, and replicas get copies. A parameter or module with several names may be given under any of
    them; if under several, the last name in the model's order counts, as in `load_state_dict`. Values are cast to the
    dtypes of the model. What is on meta gets memory first. Names are the plain model's, with or without what
    `torch.compile` and torch's `checkpoint_wrapper` put into names of parts; errors and results say the plain ones.

    Args:
        model: After `fully_shard`.
        state_dict: Full, plain tensors by name, on the first rank of the mesh, and the extra state of modules that have
            one (`get_extra_state`), which every rank sets; ignored on others.
        strict: Whether missing and unexpected names are errors. What is missing keeps its value, or stays on meta for
            `materialize`.
        device: For what is on meta; by default the current device of the mesh's type.

    Returns:
        The names that were ignored, the same on every rank.

    Raises:
        ConfigError: On all ranks, and before any change, if nothing in the model is sharded, units of it are on meshes
            with different first ranks, names do not match, or a value is no plain tensor, is on meta, has another
            shape or is for a DTensor that was ignored: torch.distributed.checkpoint loads that.
    """
    model = getattr(model, "_orig_mod", model)
    sharded = units(model)
    mesh = _mesh_of(model, sharded)
    for unit in sharded:
        views.put_in_place(unit)
    states, extra = list(_states(model)), _with_extra_state(model)
    own = {id(param.parameter) for unit in sharded for param in unit.params}
    full: dict[str, Any] = {}

    def look() -> bytes:
        full.update(_by_plain_names(state_dict))
        return json.dumps(_look(states, extra, own, full)).encode()

    found = json.loads(from_first_rank(look, mesh, where=_WHERE, instead=_INSTEAD))
    keys = IncompatibleKeys(tuple(found["missing"]), tuple(found["unexpected"]))
    problems = found["problems"]
    if strict:
        problems += [f"{name} is missing" for name in keys.missing]
        problems += [f"{name} is not in the model" for name in keys.unexpected]
    _refuse(problems)
    sent = _shared([name for name in found["given"] if name in extra], full, mesh)
    target = device_on(mesh, device, where=f"{_WHERE}(device=...)")
    with buffers.restored_buffers(model), torch.no_grad():
        given = {state.key: state for state in states if state.name in found["given"]}  # the last name counts
        _give_memory(model, sharded, given.keys(), target)
        params = {id(param.parameter): param for unit in sharded for param in unit.params}  # with memory now
        for key, state in given.items():
            value = full.get(state.name)
            if key in params:
                exchange.take_from_first(params[key].sharded_view, value, params[key].spec)
                continue
            if value is not None:
                state.value.copy_(value)
            exchange.overwrite(state.value.detach(), mesh)
    reshard(sharded)  # unsharded values are outdated
    for name, value in sent.items():
        extra[name].set_extra_state(value)
    return keys


@dataclasses.dataclass(frozen=True)
class _State:
    """One place of a parameter or of a saved buffer."""

    name: str
    module: nn.Module
    attribute: str

    @property
    def value(self) -> torch.Tensor:
        states: dict[str, torch.Tensor | None] = {**self.module._parameters, **self.module._buffers}
        held = states[self.attribute]
        assert held is not None
        return held

    @property
    def key(self) -> int:
        """The same at all places of one parameter."""
        return id(self.value)

    def is_ignored(self, sharded: Collection[int]) -> bool:
        """Whether it is a DTensor, and not the sharded parameter of one of these keys."""
        return isinstance(self.value, DTensor) and self.key not in sharded


def _states(model: nn.Module) -> Iterator[_State]:
    for prefix, module in model.named_modules(remove_duplicate=False):
        saved = {n: b for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set}
        for attribute, value in {**module._parameters, **saved}.items():
            if value is not None:
                yield _State(plain_name(f"{prefix}.{attribute}".removeprefix(".")), module, attribute)


def _with_extra_state(model: nn.Module) -> dict[str, nn.Module]:
    """The modules with a state of their own beside tensors, by its names in state dicts."""
    named = model.named_modules(remove_duplicate=False)
    return {
        plain_name(f"{prefix}.{_EXTRA}".removeprefix(".")): module
        for prefix, module in named
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def _by_plain_names(state_dict: Mapping[str, Any] | None) -> dict[str, Any]:
    """What the first rank was given, by the names in the plain model.

    Raises:
        ConfigError: If it was given nothing, or a name twice.
    """
    if state_dict is None:
        raise ConfigError("the first rank was given no state dict", where=_WHERE, instead=_INSTEAD)
    full: dict[str, Any] = {}
    for name, value in state_dict.items():
        if plain_name(name) in full:
            raise ConfigError(
                f"the state dict has {plain_name(name)} twice: with the name of a wrapper in it and without",
                where=_WHERE,
                instead="one of them",
            )
        full[plain_name(name)] = value
    return full


def _shared(names: Sequence[str], full: Mapping[str, Any], mesh: DeviceMesh) -> dict[str, Any]:
    """The extra state of these names in what the first rank has, on all ranks. Nothing of it is executed.

    Raises:
        ConfigError: On all ranks, if there is more in it than tensors, numbers, texts, lists and dicts of them.
    """
    if not names:
        return {}

    def written() -> bytes:
        file = io.BytesIO()
        torch.save([full[name] for name in names], file)
        return file.getvalue()

    where = f"{_WHERE}, {', '.join(names)}"
    instead = (
        "a get_extra_state() that returns such values, or module.set_extra_state(...) on each rank and strict=False "
        "without these names"
    )
    sent = io.BytesIO(from_first_rank(written, mesh, where=where, instead=instead))
    try:
        return dict(zip(names, torch.load(sent, map_location="cpu", weights_only=True), strict=True))
    except pickle.UnpicklingError as error:
        raise ConfigError(
            f"extra state is sent as tensors, numbers, texts, lists and dicts of them: {str(error).splitlines()[0]}",
            where=where,
            instead=instead,
        ) from None


def _mesh_of(model: nn.Module, sharded: list[FSDPUnit]) -> DeviceMesh:
    if not sharded:
        raise ConfigError(
            "nothing in this model is sharded",
            where=f"{_WHERE}({original_class(model).__name__})",
            instead="fully_shard(model) before, or model.load_state_dict(state_dict)",
        )
    refuse_split(
        sharded,
        _WHERE,
        instead="torch.distributed.checkpoint.state_dict.set_model_state_dict(model, state_dict, options="
        "StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)), or torch.distributed.checkpoint",
    )
    refuse_extended(
        (param for unit in sharded for param in unit.params),
        _WHERE,
        instead="torch.distributed.checkpoint, which loads each rank's part",
    )
    firsts = {int(unit.policy.mesh.mesh.flatten()[0].item()) for unit in sharded}
    if len(firsts) > 1:
        raise ConfigError(
            f"units are on meshes whose first ranks are {sorted(firsts)}",
            where=_WHERE,
            instead="one call for each part of the model that has a mesh of its own",
        )
    return max((unit.policy.mesh for unit in sharded), key=lambda mesh: mesh.size())


def _look(
    states: list[_State], extra: Collection[str], own: Collection[int], full: Mapping[str, Any]
) -> dict[str, list[str]]:
    """What the first rank finds: `given`, `missing` and `unexpected` names, and `problems` in words.

    Args:
        states: The model's.
        extra: Names of extra state.
        own: The keys of sharded parameters.
        full: What the first rank was given.
    """
    given = [state for state in states if state.name in full]
    has_value = {state.key for state in given}
    return {
        "given": [*(state.name for state in given), *(name for name in extra if name in full)],
        "missing": [
            *(state.name for state in states if state.key not in has_value),
            *(name for name in extra if name not in full),
        ],
        "unexpected": sorted(set(full) - {state.name for state in states} - set(extra)),
        "problems": [
            *(p for state in given if (p := _problem(state, full[state.name]))),
            *(f"{state.name} is a DTensor that fully_shard() has not made" for state in given if state.is_ignored(own)),
        ],
    }


def _problem(state: _State, given: object) -> str | None:
    if not isinstance(given, torch.Tensor) or isinstance(given, DTensor):
        return f"{state.name} is a {type(given).__name__}, not a full tensor"
    if given.is_meta:
        return f"{state.name} is on the meta device"
    if given.shape != state.value.shape:
        return f"{state.name} has shape {tuple(given.shape)}, and {tuple(state.value.shape)} in the model"
    if state.value.is_meta and not isinstance(state.value, DTensor) and state.attribute in state.module._parameters:
        return f"{state.name}, which is not sharded, is on the meta device in the model"
    return None


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ConfigError(
            "the state dict does not fit the model: " + "; ".join(problems),
            where=_WHERE,
            instead=_INSTEAD,
        )


def _give_memory(model: nn.Module, sharded: list[FSDPUnit], given: Collection[int], device: torch.device) -> None:
    for unit in sharded:
        allocate_from_meta(unit, [s for s in unit.params if s.parameter.is_meta and id(s.parameter) in given], device)
    waiting = {name for name, buffer in model.named_buffers() if buffer.is_meta and id(buffer) in given}
    sync_states.give_memory(model, waiting, device)
