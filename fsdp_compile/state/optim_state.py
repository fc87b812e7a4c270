"""`optim_state_dict` and `optim_state_dict_to_load`: an optimizer's state by names, full or sharded.

With FSDP1's meaning, but for what it reads from process-wide settings, which are arguments here.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import OptimStateDictConfig, OptimStateKeyType
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_compile._torch.tensors import local_tensor, make_dtensor, tree_leaves, tree_map
from fsdp_compile.comm import alike
from fsdp_compile.comm.gather import Receivers, gather_whole
from fsdp_compile.errors import ConfigError
from fsdp_compile.runtime import loaded_state
from fsdp_compile.runtime.units import FSDPParam, sharded_parameters
from fsdp_compile.state import optim_names
from fsdp_compile.state.optim_form import Form, Memory, Sharded, Values, between_steps, form_of
from fsdp_compile.state.optim_names import GROUPS, STATE, NamedGroups
from fsdp_compile.state.optim_to_load import Target, is_laid_out_like, to_load

_WHERE = "optim_state_dict()"
_HOST = torch.device("cpu")


def optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    optim_state_dict: Mapping[str, Any] | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    config: OptimStateDictConfig | None = None,
) -> dict[str, Any]:
    """An optimizer's state by the names of the plain model's parameters, to be saved. All ranks call it.

    Full values are gathered one by one: beside its shards, a rank holds what it is to have and one message of at most
    16 MiB. Nothing in the result is memory of the optimizer. State that is no tensor of a parameter's shape (step
    counters, Adafactor's rows and columns) is that of this rank, and compared between ranks; scalars are on the host.
    Parameters without state are left out, and so is the state of a parameter under its further names. What a user has
    put into `optim.state` under a string stays under it.

    Args:
        model: A sharded or compiled model that has all of the optimizer's parameters.
        optim: Also one that was given to `flat_step`, `whole_step` or `step_in_backward`.
        optim_state_dict: What to convert, in the place of `optim.state_dict()`; names in the place of numbers, and no
            `param_groups`, are taken.
        group: FSDP1's; nothing but the ranks of the model's mesh.
        config: `torch.distributed.fsdp.FullOptimStateDictConfig(offload_to_cpu, rank0_only)` for plain tensors, the
            default on all ranks and the host; with `rank0_only` other ranks than the mesh's first get `{}`.
            `ShardedOptimStateDictConfig(offload_to_cpu)` for DTensors.

    Raises:
        ConfigError: Inside a forward, a backward or `full_params`; if nothing is sharded, the model lacks one of the
            optimizer's parameters, or a value is another rank's or laid out otherwise than its parameter.
        RankMismatchError: If ranks have state of other names or other values of what is not sharded.
    """
    form = form_of(config, _WHERE)
    sharded = between_steps(model, form, group, _WHERE)
    loaded_state.prepare(optim)
    named = optim_names.name_groups(sharded.module, optim_names.groups_of(optim), _WHERE)
    given = optim.state_dict() if optim_state_dict is None else optim_state_dict
    entries = _entries(given, named)
    _refuse_other_layouts(entries, form)
    alike.require(
        _described(entries),
        sharded.mesh,
        what="optimizer state",
        where=_WHERE,
        instead="the same steps of the same optimizer on every rank",
    )
    return _converted(given, entries, named, form, sharded)


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
    the first one alone (`rank0_only`), which sends each rank its rows, value by value. DTensors of sharded state
    are taken as they are. Parameters without saved state have none afterwards. Groups are matched by their parameters:
    saved with others, in another order or in part, each keeps its settings. State under a string that names no
    parameter is passed on.

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
        ConfigError: On all ranks if the first one alone has the state dict, and before anything is changed: if
            it numbers parameters, names some that the model does not have, or has values of other shapes, of other
            ranks or on the meta device; else as `optim_state_dict`.
    """
    kind = OptimStateKeyType.PARAM_NAME if is_named_optimizer else OptimStateKeyType.PARAM_ID
    where = "optim_state_dict_to_load()"
    form = form_of(config, where)
    sharded = between_steps(model, form, group, where)
    loaded_state.update_optimizer(optim)
    named = optim_names.name_groups(sharded.module, optim_names.groups_of(optim), where)
    result = to_load(optim_state_dict, sharded, Target(named, kind, optim, where), form.receivers)
    if load_directly:
        optim.load_state_dict(result)
    return result


@dataclasses.dataclass(frozen=True)
class _Entry:
    """The state of one parameter by its name, or what a user has put under a string; `param` if it is sharded."""

    key: str
    state: Any
    param: FSDPParam | None

    def leaves(self) -> Iterator[tuple[str, Any]]:
        """Each value with its key, in an order that is the same on all ranks."""
        held = self.state if isinstance(self.state, dict) else {"": self.state}
        return ((str(key), leaf) for key, value in held.items() for leaf in tree_leaves(value))


def _entries(given: Mapping[str, Any], named: NamedGroups) -> list[_Entry]:
    """In the order of the optimizer's parameters; the user's own follow."""
    optim_names.require_state(given, _WHERE)
    sharded = sharded_parameters()
    found = {}
    for key, state in given[STATE].items():
        name = named.name_of(key)
        if name is None and not isinstance(key, str):
            raise ConfigError(
                f"the state dict has state of parameter {key}, and the optimizer has {len(named.names)}",
                where=_WHERE,
                instead="optim.state_dict() of this optimizer",
            )
        parameter = named.parameters.get(name or "")
        found[name or key] = _Entry(name or key, state, None if parameter is None else sharded.get(parameter))
    in_order = [name for name in named.names if name in found]
    return [found[key] for key in dict.fromkeys([*in_order, *found])]


def _refuse_other_layouts(entries: list[_Entry], form: Form) -> None:
    for entry in entries:
        for key, leaf in entry.leaves():
            if entry.param is None or not isinstance(leaf, DTensor):
                continue
            where = f"{_WHERE}, state {key!r} of {entry.key}"
            if loaded_state.is_of_other_rank(leaf, entry.param.dtensor):
                raise ConfigError(
                    "it was saved by another rank, and holds that rank's part",
                    where=where,
                    instead="optim.state_dict()",
                )
            if form.values is Values.FULL and not is_laid_out_like(leaf, entry.param):
                raise ConfigError(
                    f"it is not laid out as its parameter: shape {tuple(leaf.shape)}, {leaf.placements}, parts of type "
                    f"{type(local_tensor(leaf)).__name__}",
                    where=where,
                    instead="torch.distributed.checkpoint, which saves optimizer.state_dict() as it is; or "
                    "fsdp_compile.whole_step(optimizer), which keeps such state in full",
                )


def _described(entries: list[_Entry]) -> dict[str, str]:
    """What has to be the same on all ranks: keys, and values that are not sharded."""
    found: dict[str, str] = {}
    for entry in entries:
        if entry.param is not None:
            # The order of keys is that of the gathers.
            found[entry.key] = f"state of {[key for key, _ in entry.leaves()]}"
            for key, leaf in entry.leaves():
                name = f"{entry.key}: {key}"
                found[name] = f"{found[name]}, {_text(leaf)}" if name in found else _text(leaf)
    return found


def _text(leaf: Any) -> str:
    if isinstance(leaf, DTensor):
        return f"sharded {leaf.dtype}"
    if isinstance(leaf, torch.Tensor):
        value = leaf.detach().cpu()
        shown = value.item() if value.numel() == 1 else alike.digest(value)
        return f"{leaf.dtype} {tuple(leaf.shape)} {shown}"
    return repr(leaf) if isinstance(leaf, bool | int | float | str | None) else type(leaf).__name__


def _converted(
    given: Mapping[str, Any], entries: list[_Entry], named: NamedGroups, form: Form, sharded: Sharded
) -> dict[str, Any]:
    receives = form.receivers is Receivers.ALL or sharded.is_first
    state = {}
    for entry in entries:
        value = tree_map(lambda leaf, param=entry.param: _saved(leaf, param, form, receives=receives), entry.state)
        if receives:
            state[entry.key] = value
    if not receives:
        return {}
    others = {key: copy.deepcopy(value) for key, value in given.items() if key not in (STATE, GROUPS)}
    groups = {GROUPS: optim_names.with_names(given[GROUPS], named)} if GROUPS in given else {}
    return {STATE: state, **groups, **others}


@torch.no_grad()
def _saved(leaf: Any, param: FSDPParam | None, form: Form, *, receives: bool) -> Any:
    """A value as it is saved, in memory of its own; `None` for tensors that this rank does not get."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    is_on_host = form.memory is Memory.HOST
    if isinstance(leaf, DTensor):
        local = local_tensor(leaf)
        if form.values is Values.SHARDED:
            return make_dtensor(_copied(local, is_on_host=is_on_host), leaf)
        if param is not None:
            return gather_whole(local, param.spec, param.tensor_parallel, form.receivers, _HOST if is_on_host else None)
        leaf = leaf.full_tensor()  # a DTensor of another library
    return _copied(leaf, is_on_host=is_on_host or leaf.dim() == 0) if receives else None


def _copied(value: torch.Tensor, *, is_on_host: bool) -> torch.Tensor:
    return value.detach().to(_HOST if is_on_host else value.device, copy=True)
