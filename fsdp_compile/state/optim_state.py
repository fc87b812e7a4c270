"""`optim_state_dict`, `optim_state_dict_to_load` and older names: an optimizer's state by names, as with FSDP1.

Ranks gather and send by the names of parameters in the model's order, whatever order their optimizers list them in.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
)
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Adafactor, Optimizer

from fsdp_compile._torch.tensors import local_tensor, make_dtensor, tree_leaves, tree_map
from fsdp_compile.comm import alike
from fsdp_compile.errors import ConfigError
from fsdp_compile.fsdp2.shards import (
    full_value,
    is_first,
    is_number,
    meshes_of,
    shard_between_steps,
    shard_like,
    union,
    unwrap,
)
from fsdp_compile.state.optim_names import (
    GROUPS,
    PARAMS,
    STATE,
    NamedGroups,
    OptimInput,
    kind_of_keys,
    named_groups,
    require_state,
    warn_of_input,
)


def optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    optim_state_dict: Mapping[str, Any] | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    config: OptimStateDictConfig | None = None,
) -> dict[str, Any]:
    """An optimizer's state by the names of the plain model's parameters, to be saved. All ranks call it.

    Full values are gathered one by one. Nothing in the result is memory of the optimizer. State that is not sharded
    (step counters) is that of this rank, and compared between ranks. Parameters without state are left out. What a user
    has put into `optim.state` under a string stays under it.

    Args:
        model: A sharded or compiled model that has all of the optimizer's parameters.
        optim: Also one that was given to `flat_step` or `whole_step`.
        optim_state_dict: What to convert, in the place of `optim.state_dict()`; names in the place of numbers, and no
            `param_groups`, are taken.
        group: FSDP1's; nothing but the ranks of the model's mesh.
        config: `torch.distributed.fsdp.FullOptimStateDictConfig(offload_to_cpu, rank0_only)` for plain tensors, the
            default on all ranks and the host; with `rank0_only` other ranks than the mesh's first get `{}`.
            `ShardedOptimStateDictConfig(offload_to_cpu)` for DTensors.

    Raises:
        ConfigError: Inside a forward or a backward; if nothing is sharded, or the model lacks one of the optimizer's
            parameters.
        RankMismatchError: If ranks have state of other names or other values of what is not sharded.
    """
    where = "optim_state_dict()"
    target = _target_of(model, optim, where, config, group=group)
    given = optim.state_dict() if optim_state_dict is None else optim_state_dict
    require_state(given, where)
    named = target.named
    by_name = {named.names.get(key, key): state for key, state in given[STATE].items()}
    unknown = [key for key in by_name if not isinstance(key, str)]
    if unknown:
        raise ConfigError(f"the state dict has state of parameter {unknown[0]}, which the optimizer lacks", where=where)
    entries = {name: by_name.pop(name) for name in named.parameters if name in by_name} | by_name
    _require_alike(entries, target)
    receives = not target.rank0_only or target.is_first()
    state = {}
    for name, value in entries.items():
        saved = _mapped(value, lambda _, leaf: _saved(leaf, target, receives=receives))
        if receives:
            state[name] = saved
    if not receives:
        return {}
    rest = {key: copy.deepcopy(value) for key, value in given.items() if key not in (STATE, GROUPS)}
    return {STATE: state, **({GROUPS: named.renamed(given[GROUPS])} if GROUPS in given else {}), **rest}


def optim_state_dict_to_load(
    model: nn.Module,
    optim: Optimizer,
    optim_state_dict: Mapping[str, Any],
    *,
    is_named_optimizer: bool = False,
    load_directly: bool = False,
    group: dist.ProcessGroup | None = None,
    config: OptimStateDictConfig | None = None,
) -> dict[str, Any]:
    """What `optim.load_state_dict` takes of a state dict with names, which `optim_state_dict` or one process has saved.

    Each rank keeps its part of full values. All ranks have the whole state dict then, and nothing is communicated; or
    the first one alone (`rank0_only`), which sends each rank its rows, value by value. Parameters without saved state
    have none afterwards. Groups are matched by their parameters: saved with others, in another order or in part, each
    keeps its settings. State under a string that names no parameter is passed on.

    Args:
        model: A sharded or compiled model that has all of the optimizer's parameters.
        optim: The optimizer that is to load the result; it is not changed.
        optim_state_dict: Full or sharded; ignored on other ranks than the first with `rank0_only`.
        is_named_optimizer: Whether the optimizer's own state dict has names; parameters without saved state keep the
            state that they have then.
        load_directly: Also loads the result.
        group: FSDP1's; nothing but the ranks of the model's mesh.
        config: `FullOptimStateDictConfig(rank0_only=True)` if the first rank of the mesh alone has it.

    Raises:
        ConfigError: On all ranks if the first one alone has the state dict, and before anything is changed: if it
            numbers parameters, names some that the model does not have, or has values of other shapes or layouts, or on
            the meta device; else as `optim_state_dict`.
    """
    target = _target_of(model, optim, "optim_state_dict_to_load()", config, group=group)
    result = _to_load(optim_state_dict, target, optim, by_name=is_named_optimizer)
    if load_directly:
        optim.load_state_dict(result)
    return result


@dataclasses.dataclass(frozen=True)
class Target:
    """An optimizer of a sharded model, and the form of a state dict of it; `where` is the call, in errors."""

    named: NamedGroups
    meshes: list[DeviceMesh]
    where: str
    is_full: bool
    rank0_only: bool
    on_host: bool

    def is_first(self, *, sends: bool = False) -> bool:
        """Whether this is the first rank of the meshes, which `sends` state to the others, or gets theirs."""
        return is_first(self.named.parameters.values(), self.where, sends=sends)


def _target_of(
    model: nn.Module,
    optim: Optimizer | None,
    where: str,
    config: OptimStateDictConfig | None,
    *,
    group: dist.ProcessGroup | None = None,
    optim_input: Any = None,
) -> Target:
    """The optimizer of a model between two steps; raises `ConfigError` as `optim_state_dict` does."""
    module = unwrap(model)
    shard_between_steps(module, where, instead=f"{where} before or after it")
    chosen = FullOptimStateDictConfig() if config is None else config
    if not isinstance(chosen, FullOptimStateDictConfig | ShardedOptimStateDictConfig):
        raise ConfigError(
            f"config is {chosen!r}",
            where=where,
            instead="torch.distributed.fsdp.FullOptimStateDictConfig(offload_to_cpu=..., rank0_only=...) for full "
            "tensors, or ShardedOptimStateDictConfig(offload_to_cpu=...) for DTensors, whose to_local() is this rank's",
        )
    meshes = meshes_of(module.parameters())
    if not meshes:
        raise ConfigError(
            "nothing in this model is sharded",
            where=f"{where} of {type(module).__name__}",
            instead="fully_shard(model) or the first compiled call before; optimizer.state_dict() for a plain model",
        )
    if group is not None and set(dist.get_process_group_ranks(group)) != set(meshes[0].mesh.flatten().tolist()):
        raise ConfigError(
            f"group has ranks {dist.get_process_group_ranks(group)}, and the model is on {meshes[0]}",
            where=where,
            instead="no group: state is gathered over the mesh, whose first rank is the one of rank0_only",
        )
    is_full = isinstance(chosen, FullOptimStateDictConfig)
    named = named_groups(module, where, optim, optim_input)
    return Target(named, meshes, where, is_full, getattr(chosen, "rank0_only", False), chosen.offload_to_cpu)


def _mapped(state: Any, change: Callable[[object, Any], Any]) -> Any:
    """A parameter's state with each value changed, the values of a dict in the order of their keys."""
    if not isinstance(state, dict):
        return tree_map(lambda leaf: change("", leaf), state)
    made = {key: tree_map(lambda leaf, key=key: change(key, leaf), state[key]) for key in sorted(state, key=str)}
    return {key: made[key] for key in state}


def _leaves(state: Any) -> Iterator[tuple[object, Any]]:
    held = state if isinstance(state, dict) else {"": state}
    return ((key, leaf) for key in sorted(held, key=str) for leaf in tree_leaves(held[key]))


def _require_alike(entries: Mapping[str, Any], target: Target) -> None:
    """Raises `RankMismatchError` on all ranks if ranks differ in what is not sharded."""
    described: dict[str, str] = {}
    for name, state in entries.items():
        if isinstance(target.named.parameters.get(name), DTensor):
            for key, leaf in _leaves(state):
                title = f"{key!r} of {name}"
                described[title] = f"{described[title]}, {_text(leaf)}" if title in described else _text(leaf)
    alike.require(
        described,
        [mesh.get_group(dim) for mesh in target.meshes for dim in reversed(range(mesh.ndim))],
        torch.device(target.meshes[0].device_type),
        what="optimizer state",
        where=target.where,
        instead="the same steps of the same optimizer on every rank",
    )


def _text(leaf: Any) -> str:
    if isinstance(leaf, DTensor):
        return f"sharded {leaf.dtype}"
    if isinstance(leaf, torch.Tensor):
        values = repr(leaf.detach().cpu().tolist())
        shown = values if leaf.dim() == 0 else f"{tuple(leaf.shape)} {hashlib.sha256(values.encode()).hexdigest()}"
        return f"{leaf.dtype} {shown}"
    return repr(leaf) if isinstance(leaf, bool | int | float | str | None) else type(leaf).__name__


@torch.no_grad()
def _saved(leaf: Any, target: Target, *, receives: bool) -> Any:
    """A value as it is saved, in memory of its own; `None` for tensors that this rank does not get."""
    if not isinstance(leaf, torch.Tensor):
        return copy.deepcopy(leaf)
    if isinstance(leaf, DTensor) and not target.is_full:
        local = local_tensor(leaf)
        return make_dtensor(local.to("cpu" if target.on_host else local.device, copy=True), leaf)
    full = full_value(leaf) if isinstance(leaf, DTensor) else leaf.detach().clone()
    on_host = target.on_host or full.dim() == 0
    return (full.cpu() if on_host else full) if receives else None


@dataclasses.dataclass(frozen=True)
class _Sent:
    """Stands for a full tensor that the first rank sends by itself, of which each rank gets its part."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _to_load(
    state_dict: Mapping[str, Any] | None, target: Target, optim: Optimizer | None, *, by_name: bool = False
) -> dict[str, Any]:
    """What an optimizer's `load_state_dict` takes; arguments and errors are those of `optim_state_dict_to_load`."""
    tensors: list[torch.Tensor] = []
    named = target.named
    settings = [{} for _ in named.groups] if optim is None else optim.param_groups
    keys: dict[str, Any] = {name: name for name in named.numbers} if by_name else dict(named.numbers)
    read = _from_first(state_dict, target, optim, tensors) if target.rank0_only else _read(state_dict, target, optim)
    following = iter(tensors)
    state = {}
    for name, held in read[STATE].items():
        like = named.parameters.get(name)
        state[keys.get(name, name)] = _mapped(held, functools.partial(_placed, like=like, sent=following))
    if by_name and optim is not None:
        for key, kept in optim.state_dict()[STATE].items():
            state.setdefault(key, tree_map(copy.deepcopy, kept))
    groups = {GROUPS: named.regrouped(read[GROUPS], settings, keys, target.where)} if GROUPS in read else {}
    return {**read, STATE: state, **groups}


def _from_first(
    state_dict: Mapping[str, Any] | None, target: Target, optim: Optimizer | None, tensors: list[torch.Tensor]
) -> dict[str, Any]:
    """What the first rank has read, without the full tensors of parameters, which it adds to `tensors`."""
    sent: dict[str, Any] = {}
    if target.is_first(sends=True):
        try:
            read = _read(state_dict, target, optim)
            for name, held in read[STATE].items():
                like = target.named.parameters.get(name)
                read[STATE][name] = _mapped(held, functools.partial(_outline, like=like, tensors=tensors))
            sent = {"read": pickle.dumps(read)}
        except ConfigError as error:
            sent = {"error": str(error)}
        except Exception as error:  # whatever it is: the others wait for the message
            sent = {"error": f"the first rank cannot send the state dict: {type(error).__name__}: {error}"}
    heard = union(sent, target.meshes)
    if "error" in heard:
        raise ConfigError(heard["error"], where=target.where)
    return pickle.loads(heard["read"])


def _outline(key: object, leaf: Any, like: torch.Tensor | None, tensors: list[torch.Tensor]) -> Any:
    if _is_cut(key, leaf, like):
        tensors.append(leaf)
        return _Sent(tuple(leaf.shape), leaf.dtype)
    return leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf


def _read(state_dict: Mapping[str, Any] | None, target: Target, optim: Optimizer | None) -> dict[str, Any]:
    """A state dict that fits: states of the optimizer's parameters by their first names, and the rest of it."""
    named, given = target.named, state_dict or {}
    if kind_of_keys(given, target.where) is OptimStateKeyType.PARAM_ID:
        raise ConfigError(
            "the state dict numbers parameters and does not name them",
            where=target.where,
            instead="rekey_optim_state_dict(state, OptimStateKeyType.PARAM_NAME, plain_model, optim=its_optimizer)",
        )
    state: dict[str, Any] = {}
    wrong = [
        f"{name} is not in the model"
        for group in given.get(GROUPS, ())
        for name in group[PARAMS]
        if name not in named.first_names
    ]
    for key, held in given[STATE].items():
        name = named.first_names.get(key, key)
        if name in named.parameters or key not in named.first_names:  # the rest is of parameters of other optimizers
            state[name] = held
            wrong += _problems(name, held, target, optim)
    if wrong:
        raise ConfigError(
            "the state dict does not fit the optimizer: " + "; ".join(wrong),
            where=target.where,
            instead="optim_state_dict() of the same model, on any number of ranks, or full, plain tensors",
        )
    return {**given, STATE: state}


def _problems(name: str, held: Any, target: Target, optim: Optimizer | None) -> Iterator[str]:
    """What is wrong with the state of a parameter, in words."""
    like = target.named.parameters.get(name)
    has_shapes = type(optim).__module__.startswith("torch.optim.") and not isinstance(optim, Adafactor | LBFGS)
    for key, leaf in _leaves(held):
        title = f"{key!r} of {name}"
        if like is None or not isinstance(leaf, torch.Tensor):
            continue
        if leaf.is_meta:
            yield f"{title} is on the meta device"
        elif isinstance(leaf, DTensor) and target.rank0_only:
            yield f"{title} is a DTensor, and the first rank alone has it"
        elif isinstance(leaf, DTensor) and not (
            isinstance(like, DTensor) and _can_be_laid_out(leaf, like) and (leaf.shape == like.shape or not has_shapes)
        ):
            yield f"{title} is a DTensor of shape {tuple(leaf.shape)} on {leaf.device_mesh}, or of another rank"
        elif has_shapes and held.get(key) is leaf and leaf.shape != like.shape and not is_number(key, leaf):
            yield f"{title} has shape {tuple(leaf.shape)}, and the parameter {tuple(like.shape)}"


def _can_be_laid_out(value: DTensor, like: DTensor) -> bool:
    if value.device_mesh != like.device_mesh:
        return False
    if value.device_mesh.get_coordinate() != like.device_mesh.get_coordinate():
        return False  # a mesh that was unpickled says the place of the rank that pickled it
    if value.shape != like.shape or value.placements != like.placements:
        return True
    return local_tensor(value).numel() == local_tensor(like).numel()


def _is_cut(key: object, leaf: Any, like: torch.Tensor | None) -> bool:
    """Whether each rank keeps its part of a plain tensor."""
    is_plain = isinstance(leaf, torch.Tensor | _Sent) and not isinstance(leaf, DTensor)
    if not is_plain or not isinstance(like, DTensor) or tuple(leaf.shape) != tuple(like.shape):
        return False
    return isinstance(leaf, _Sent) or not is_number(key, leaf)


@torch.no_grad()
def _placed(key: object, leaf: Any, like: torch.Tensor | None, sent: Iterator[torch.Tensor]) -> Any:
    """What this rank keeps of a value, in memory of its own."""
    if isinstance(leaf, _Sent):
        assert isinstance(like, DTensor)
        full = next(sent, None)  # where this is not the first rank: none
        whole = torch.empty(leaf.shape, dtype=leaf.dtype) if full is None else full
        return shard_like(whole, like, source=0)
    if _is_cut(key, leaf, like):
        return shard_like(leaf, like)  # type: ignore[arg-type]
    if isinstance(leaf, DTensor) and isinstance(like, DTensor):
        if leaf.shape == like.shape and leaf.placements != like.placements:
            leaf = leaf.redistribute(placements=like.placements)
        local = local_tensor(leaf).to(local_tensor(like).device, copy=True)
        return make_dtensor(local, like if leaf.shape == like.shape else leaf)
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf)


# FSDP1's older functions, with its meaning: their results go to `optimizer.load_state_dict`, and to and from files.


def full_optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    optim_input: OptimInput | None = None,
    rank0_only: bool = True,  # noqa: FBT001, FBT002
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Full state on the host, by name; `{}` on other ranks than the first, unless `rank0_only=False`."""
    _warn("full_optim_state_dict", "optim_state_dict(model, optim, config=FullOptimStateDictConfig(...))", optim_input)
    config = FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=rank0_only)
    return optim_state_dict(model, optim, group=group, config=config)


def sharded_optim_state_dict(
    model: nn.Module, optim: Optimizer, group: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """State by name, as DTensors on the host."""
    _warn("sharded_optim_state_dict", "optim_state_dict(model, optim, config=ShardedOptimStateDictConfig())")
    return optim_state_dict(model, optim, group=group, config=ShardedOptimStateDictConfig())


def shard_full_optim_state_dict(
    full_optim_state_dict: Mapping[str, Any],
    model: nn.Module,
    optim_input: OptimInput | None = None,
    optim: Optimizer | None = None,
) -> dict[str, Any]:
    """What an optimizer loads of full state that every rank has; each keeps its part, without communication."""
    where = "shard_full_optim_state_dict()"
    _warn(where[:-2], "optim_state_dict_to_load(model, optim, state)", optim_input)
    return _to_load(full_optim_state_dict, _target_of(model, optim, where, None, optim_input=optim_input), optim)


def flatten_sharded_optim_state_dict(
    sharded_optim_state_dict: Mapping[str, Any], model: nn.Module, optim: Optimizer
) -> dict[str, Any]:
    """What an optimizer loads of sharded state."""
    _warn("flatten_sharded_optim_state_dict", "optim_state_dict_to_load(model, optim, state)")
    return optim_state_dict_to_load(model, optim, sharded_optim_state_dict, config=ShardedOptimStateDictConfig())


def scatter_full_optim_state_dict(
    full_optim_state_dict: Mapping[str, Any] | None,
    model: nn.Module,
    optim_input: OptimInput | None = None,
    optim: Optimizer | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """What an optimizer loads of full state that the first rank alone has: each rank receives its part."""
    where = "scatter_full_optim_state_dict()"
    new = "optim_state_dict_to_load(model, optim, state, config=FullOptimStateDictConfig(rank0_only=True))"
    _warn(where[:-2], new, optim_input)
    config = FullOptimStateDictConfig(rank0_only=True)
    target = _target_of(model, optim, where, config, group=group, optim_input=optim_input)
    return _to_load(full_optim_state_dict, target, optim)


def _warn(old: str, new: str, optim_input: OptimInput | None = None) -> None:
    warnings.warn(f"{old} is FSDP1's older name: {new} does the same", FutureWarning, stacklevel=3)
    if optim_input is not None:
        warn_of_input(stacklevel=4)
