"""The class of a sharded module, in which `self.weight` is a property.

It is a cached subclass of the module's own with one property per sharded parameter. In `forward` the property gathers
the parameter; anywhere else it is the DTensor parameter, so that initialization, checkpoints and in-place writes work
on what is stored. As with FSDP2, its name is that of the user's class after `FSDP`.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import weakref
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple, SupportsIndex

import torch.distributed as dist
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from fsdp_compile.comm.gather_extension import is_traceable
from fsdp_compile.config.casts import ForwardCasts, FullPrecision
from fsdp_compile.errors import UnsupportedModelError
from fsdp_compile.layout.spec import Reshard, UnshardSpec, Update
from fsdp_compile.modules import buffers
from fsdp_compile.modules.attributes import is_noted, note_attributes
from fsdp_compile.modules.eager_reads import register_parameter
from fsdp_compile.modules.forward import enter_own_forward, forward
from fsdp_compile.modules.loaded_params import (
    keep_ties,
    keep_views,
    refuse_full_values,
    refuse_other_shapes,
    refuse_shards_of_other_ranks,
)
from fsdp_compile.modules.param_reads import (
    EXTENDED,
    FLAT,
    READ_NAMES,
    TENSOR_PARALLEL,
    GatheredBy,
    ParamRead,
    get_parameter,
    named_parameters,
    read_property,
)
from fsdp_compile.modules.param_views import give_storages
from fsdp_compile.runtime import update_in_backward
from fsdp_compile.runtime.extended_reads import register
from fsdp_compile.runtime.module_state import ReadFrom, ensure_state, reads_of
from fsdp_compile.runtime.reduce_group import reduce_alias
from fsdp_compile.runtime.units import FSDPParam, FSDPParamGroup, FSDPUnit
from fsdp_compile.runtime.unshard_args import UNSHARD_ARGS, refresh_unshard_args, set_unshard_args

_KEY = "_fsdp_key"
_classes: weakref.WeakKeyDictionary[object, dict[ClassKey, type[nn.Module]]] = weakref.WeakKeyDictionary()
"""By world. Ranks compare what they compile in it, so none may take what Dynamo has compiled in an earlier one."""


class ClassKey(NamedTuple):
    """What the class of a sharded module depends on.

    Attributes:
        base: The class that the user wrote, or assigned to the module since.
        reads: Its sharded parameters, by name.
        casts: What is cast when its forward is entered and left.
        methods: The class whose methods it gets on top.
    """

    base: type[nn.Module]
    reads: tuple[ParamRead, ...]
    casts: ForwardCasts | FullPrecision | None
    methods: type | None


def gather_on_read(
    module: nn.Module, reads: Mapping[str, ReadFrom] | None = None, in_eval: Mapping[str, str] | None = None
) -> None:
    """Makes `module` gather further parameters when its forward reads them.

    Args:
        module: Its class is replaced by a subclass.
        reads: Where each parameter is gathered from.
        in_eval: For those of `reads` that eval mode reads in another way, the text of that `UnshardSpec`.
    """
    state = ensure_state(module)
    reads = reads or {}
    others_in_eval = {name: text for name, text in state.eval_reads.items() if name not in reads}
    state.reads = {**state.reads, **reads}
    state.eval_reads = {**others_in_eval, **(in_eval or {})}
    for name in reads:
        set_unshard_args(module, name, None)
    if state.model is not None:
        state.model.note_layout()
    swap_class(module)
    enter_own_forward(module)


def gather_params(groups: Iterable[FSDPParamGroup]) -> None:
    """Makes modules gather their parameters from some parameter groups."""
    modules: dict[nn.Module, tuple[dict[str, ReadFrom], dict[str, str]]] = {}
    for group in groups:
        for param in group.params:
            for module, attribute in param.module_refs:
                reads, in_eval = modules.setdefault(module, ({}, {}))
                reads[attribute] = ReadFrom(param.spec.text, group, param)
                in_eval.update(param.eval_read(attribute))
                ensure_state(module).model = group.unit.model
    for module, (reads, in_eval) in modules.items():
        gather_on_read(module, reads, in_eval)


def give_methods(module: nn.Module, methods: type) -> None:
    """Adds the methods of a class to those of one module."""
    ensure_state(module).methods = methods
    swap_class(module)


def swap_class(module: nn.Module) -> None:
    """Gives a module the class that its state asks for."""
    state = ensure_state(module)
    number = {group: i for i, group in enumerate(dict.fromkeys(read.group for read in state.reads.values()))}
    # The texts of reads are part of the class, and each flat parameter is one attribute: Dynamo guards on the class and
    # once per parameter group, not once per parameter.
    for attribute in [a for a in module.__dict__ if a.startswith(FLAT)]:
        object.__delattr__(module, attribute)
    for group, i in number.items():
        # `nn.Module.__setattr__` would register the flat parameter as a parameter.
        object.__setattr__(module, f"{FLAT}{i}", group.flat_param)
    marked = note_attributes(module, state.reads)
    split = _note_tensor_parallel(module, state.reads)
    extended = _note_extended(module, state.reads)
    reads = sorted(
        ParamRead(
            n,
            number[r.group],
            r.text,
            state.eval_reads.get(n),
            n in marked,
            n in split,
            extended.get(n, GatheredBy.SPEC),
        )
        for n, r in state.reads.items()
    )
    now = type(module)
    key = ClassKey(vars(now)[_KEY].base if _KEY in vars(now) else now, tuple(reads), state.casts, state.methods)
    known: ClassKey | None = getattr(now, _KEY, None)  # of its class, or of one below the class that a user gave it
    if known is None or known[1:] != key[1:]:
        classes = _classes.setdefault(dist.group.WORLD or ClassKey, {})  # which stands for no world
        if key not in classes:
            # The class of a parametrized module is its own, and `remove_parametrizations` changes it.
            classes[key] = _make_class(key, _over(type(key.base)) if is_parametrized(module) else type(key.base))
        module.__class__ = classes[key]


def _note_tensor_parallel(module: nn.Module, reads: Mapping[str, ReadFrom]) -> Collection[str]:
    """Records how parameters that are DTensors in a forward are laid out; returns their names."""
    found = {name: read.param.tensor_parallel for name, read in reads.items() if read.param.tensor_parallel is not None}
    _set_or_delete(module, TENSOR_PARALLEL, found)
    return found.keys()


def _note_extended(module: nn.Module, reads: Mapping[str, ReadFrom]) -> dict[str, GatheredBy]:
    """Records shards of parameters whose class says how they are gathered; returns which these are."""
    params = {name: read.param for name, read in reads.items() if read.param.extension is not None}
    for param in params.values():
        register(param)
    _set_or_delete(module, EXTENDED, params)
    return {name: _gathered_by(param) for name, param in params.items()}


def _gathered_by(param: FSDPParam) -> GatheredBy:
    assert param.extension is not None
    can_be_traced = param.extension.runs_in_traces and is_traceable(param.sharded_view)
    return GatheredBy.CLASS if can_be_traced else GatheredBy.CLASS_OUTSIDE_GRAPHS


def _set_or_delete(module: nn.Module, attribute: str, found: Mapping[str, object]) -> None:
    if found:
        object.__setattr__(module, attribute, found)
    elif attribute in module.__dict__:
        object.__delattr__(module, attribute)


def follow_attributes(unit: FSDPUnit) -> None:
    """Makes modules that read from a unit follow attributes that were put on its parameters, or removed, since."""
    for module in {module: None for param in unit.params for module, _ in param.module_refs}:
        if original_class(module) is not type(module) and not is_noted(module, reads_of(module)):
            swap_class(module)


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class that the user wrote."""
    return original_of(type(module))


def original_of(maybe_sharded: type[nn.Module]) -> type[nn.Module]:
    """The class that the user wrote, of a class that may be ours."""
    return getattr(maybe_sharded, "_fsdp_original_class", maybe_sharded)


def swap_to_original_class(module: nn.Module) -> type[nn.Module]:
    """Gives a module the class that the user wrote; returns the sharded one."""
    sharded_class = type(module)
    module.__class__ = original_class(module)
    return sharded_class


def swap_back(module: nn.Module, sharded_class: type[nn.Module]) -> None:
    """Undoes `swap_to_original_class`."""
    # First the old class, whose key tells the base; then the one for the reads of now.
    module.__class__ = sharded_class
    swap_class(module)


class _ClassOfParametrized(type):
    """The class of a class of a sharded module with parametrizations, which torch removes from the class first."""

    def __delattr__(cls, name: str) -> None:
        raise UnsupportedModelError(
            "a parametrization is removed from a sharded module, whose parameters would become others",
            where=f"{getattr(cls, '_fsdp_original_class', cls).__name__}, {name}",
            instead="torch.nn.utils.parametrize.remove_parametrizations() before fully_shard() or the first compiled "
            "call; for a trained model, on a plain one that has loaded its full state dict",
        )


def _over(metaclass: type) -> type:
    """`_ClassOfParametrized`, for a class that has a metaclass of its own (`abc.ABCMeta`, say)."""
    if issubclass(_ClassOfParametrized, metaclass):
        return _ClassOfParametrized
    return type(_ClassOfParametrized.__name__, (_ClassOfParametrized, metaclass), {})


def _make_class(key: ClassKey, kind: type[type]) -> type[nn.Module]:
    base = key.base
    members: dict[str, Any] = {
        _KEY: key,
        READ_NAMES: tuple(read.name for read in key.reads),
        "_fsdp_casts": key.casts,
        **{read.name: read_property(read) for read in key.reads},
    }
    members |= {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    is_over_ours = hasattr(base, "_fsdp_original_class")  # `parametrize` gives a module a subclass of its class
    name = base.__name__
    if not is_over_ours:
        outside, dot, name = base.__qualname__.rpartition(".")
        name = f"FSDP{name}"
        members |= _members_over(base) | {"__qualname__": f"{outside}{dot}{name}"}
    has_methods = key.methods is None or issubclass(base, key.methods)
    bases: tuple[type, ...] = (base,) if has_methods else (key.methods, base)  # type: ignore[assignment]
    if not is_over_ours:
        bases = (*bases[:-1], _WithoutSubclassHook, base)
    return kind(name, bases, members)


class _WithoutSubclassHook:
    """Hides the `__init_subclass__` of the user's class: it may want arguments, or count classes that users write."""

    def __init_subclass__(cls) -> None:
        pass


def _members_over(original: type[nn.Module]) -> dict[str, Any]:
    """The members of every class directly over a user's."""
    members = {
        "__new__": _new_original,
        "train": _train,
        "__deepcopy__": _refuse_deepcopy,
        "__reduce_ex__": _refuse_pickle,
        "named_parameters": named_parameters,
        "get_parameter": get_parameter,
        "register_parameter": register_parameter,
        "_save_to_state_dict": _save_to_state_dict,
        "_load_from_state_dict": _load_from_state_dict,
        "load_state_dict": _load_state_dict,
        "_apply": _apply,
        UNSHARD_ARGS: None,
        "_fsdp_original_class": original,
        "_fsdp_outermost_forward": _outermost_forward(original),
    }
    if original.forward is not nn.Module.forward:  # of containers that cannot be called
        # Each subclass has its own function object for the signature, over one code object for Dynamo's skip list.
        made = types.FunctionType(forward.__code__, forward.__globals__, "forward")
        members["forward"] = functools.update_wrapper(made, original.forward)
    return members


def _new_original(sharded_class: type[nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
    # A new module is not sharded: slices of an `nn.Sequential` make one by calling the class.
    return original_of(sharded_class)(*args, **kwargs)


def _outermost_forward(original: type[nn.Module]) -> staticmethod[..., Any] | None:
    """The function that a module is called through which is compiled by itself; `None` for its own forward."""
    if not (original.forward.__module__ or "").startswith("torch.nn."):
        return None
    # Dynamo starts no graph in torch's own layers (a plain `nn.Sequential`, say), it only inlines them: the graph
    # starts in a function of ours. One code object per class, since Dynamo caches compiled graphs by code object.
    code = _call_original.__code__.replace(co_name=f"forward of {original.__name__}")
    return staticmethod(types.FunctionType(code, _call_original.__globals__))


def _call_original(self, *args, **kwargs):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN002, ANN003, ANN202
    return self._fsdp_original_class.forward(self, *args, **kwargs)


def _save_to_state_dict(module: nn.Module, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:  # noqa: FBT001  torch's
    original_class(module)._save_to_state_dict(module, destination, prefix, keep_vars)
    if not keep_vars:
        give_storages(module, destination, prefix, [(name, read.group) for name, read in reads_of(module).items()])
        buffers.save_original(module, destination, prefix)


def _train(module: nn.Module, mode: bool = True) -> nn.Module:  # noqa: FBT001, FBT002  torch's
    changed = original_class(module).train(module, mode)
    buffers.follow_mode(module)
    return changed


def _load_from_state_dict(module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
    refuse_shards_of_other_ranks(module, state_dict, prefix)
    before = dict(module._parameters)
    buffers.restore(module)
    *_, errors = args
    known = len(errors)
    original_class(module)._load_from_state_dict(module, state_dict, prefix, *args)
    buffers.follow_mode(module)
    keep_ties(module, before)
    if len(errors) > known:
        refuse_full_values(module, state_dict, prefix)


def _load_state_dict(module: nn.Module, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
    refuse_other_shapes(module, state_dict)
    return original_class(module).load_state_dict(module, state_dict, *args, **kwargs)


def _apply(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    changed = original_class(module)._apply(module, *args, **kwargs)
    keep_views(module)
    return changed


def _refuse_pickle(module: nn.Module, _protocol: SupportsIndex) -> Any:
    raise UnsupportedModelError(
        "a sharded module cannot be pickled: its class was made for its process groups and parameter groups",
        where=original_class(module).__name__,
        instead="model.state_dict(), or torch.distributed.checkpoint; in full_params(model), its state_dict() has full "
        "values, which a plain model of the same class loads",
    )


def _refuse_deepcopy(module: nn.Module, _memo: dict[int, Any]) -> nn.Module:
    raise UnsupportedModelError(
        "a sharded module cannot be deep-copied: the copy would share process groups and parameter groups with it",
        where=original_class(module).__name__,
        instead="fsdp_compile.EMA(model, decay) in the place of AveragedModel(model), which copies it; "
        "copy.deepcopy(model) before it is sharded, then fully_shard() both, whose parameters mix; or move values with "
        "state_dict() and load_state_dict()",
    )


def rebuild_specs(unit: FSDPUnit) -> None:
    """Writes a unit's policy, settings and updaters into its parameters' specs and their next reads."""
    for group in unit.param_groups:
        update = update_in_backward.choose_update(group)
        for param in group.params:
            param.spec = _rebuilt(param.spec, unit, update)
            if param.eval_spec is not None:
                param.eval_spec = _rebuilt(param.eval_spec, unit, update)
            for module, attribute in param.module_refs:
                state = ensure_state(module)
                state.reads[attribute] = ReadFrom(param.spec.text, group, param)
                state.eval_reads.update(param.eval_read(attribute))
        refresh_unshard_args(group)
    for module in {module: None for param in unit.params for module, _ in param.module_refs}:
        if original_class(module) is not type(module):  # else `full_params` gives the class back
            swap_class(module)


def _rebuilt(spec: UnshardSpec, unit: FSDPUnit, update: Update) -> UnshardSpec:
    where = unit.policy.mesh_placement
    post_forward_group = spec.post_forward_group if where.post_forward_size > 1 else ""
    reshard = where.reshard
    if spec.size == 1 and update is Update.IN_BACKWARD:
        # On one rank a read is a view of the flat parameter: backward must have a read of its own before the update.
        reshard = Reshard.AFTER_FORWARD
    return dataclasses.replace(
        spec,
        reshard=reshard,
        post_forward_size=where.post_forward_size,
        post_forward_group=post_forward_group,
        divide=unit.divide,
        reduce_group=reduce_alias(unit),
        forward_prefetch=unit.prefetched("forward_prefetch"),
        backward_prefetch=unit.prefetched("backward_prefetch"),
        update=update,
    )
