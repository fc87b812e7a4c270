"""Methods that single modules get on top of those of their class.

What a module's code gets when it says `self.weight`.

The class of a module that holds managed parameters is replaced by a cached subclass with one property per parameter.
Inside `forward` the property gathers the full value; anywhere else it is the DTensor parameter, so that
initialization, checkpoints and in-place writes work on what is stored.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from fsdp_compile._torch.dynamo import calls_are_compiled, skip_code
from fsdp_compile.errors import UnsupportedModelError
from fsdp_compile.layout.spec import Reshard, UnshardSpec, Update
from fsdp_compile.modules import casts
from fsdp_compile.modules.forward import OWN_FORWARD, _forward, _own_forward, in_forward
from fsdp_compile.modules.param_views import give_storages
from fsdp_compile.runtime import update_in_backward
from fsdp_compile.runtime.reduce_queue import reduce_alias
from fsdp_compile.runtime.units import EVAL_READS, READS, UNSHARD_ARGS, FSDPParamGroup, FSDPUnit, note_layout, titles
from fsdp_compile.runtime.unshard_args import UnshardArgs, refresh_unshard_args, set_unshard_args

_MIXIN = "_fsdp_mixin"
"""Attribute of a module: the class whose methods it was given."""
_made: dict[tuple[type[nn.Module], type], type[nn.Module]] = {}


def give_methods(module: nn.Module, mixin: type) -> None:
    """Adds the methods of `mixin` to those of one module; its class keeps its name."""
    object.__setattr__(module, _MIXIN, mixin)
    module.__class__ = with_methods(type(module), module)


def with_methods(cls: type[nn.Module], module: nn.Module) -> type[nn.Module]:
    """`cls` with the methods that `module` was given, if it was given any."""
    mixin = module.__dict__.get(_MIXIN)
    if mixin is None or issubclass(cls, mixin):
        return cls
    if (cls, mixin) not in _made:
        members = {
            "_fsdp_original_class": getattr(cls, "_fsdp_original_class", cls),
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__doc__": cls.__doc__,
        }
        _made[cls, mixin] = type(cls.__name__, (mixin, cls), members)
    return _made[cls, mixin]


Read = tuple[nn.Parameter, str, FSDPParamGroup]
_LEAF = "_fsdp_leaf_"
"""Start of the attributes of a module that are the leaves which its parameters are gathered from, each once."""
_READINGS, _ORIGINAL = "_fsdp_readings", "_fsdp_original_class"
_classes: dict[tuple[type[nn.Module], tuple[ParamRead, ...]], type[nn.Module]] = {}


class ParamRead(NamedTuple):
    """How a class of modules reads one parameter: the same for all layers that are laid out alike.

    Attributes:
        name: Its attribute.
        leaf: Number of the leaf among those of a module.
        text: Of its `UnshardSpec`.
        eval_text: The same for eval mode, where that is another.
    """

    name: str
    leaf: int
    text: str
    eval_text: str | None


def gather_on_read(module: nn.Module, reads: Mapping[str, Read], in_eval: Mapping[str, str] | None = None) -> None:
    """Makes `module` gather the named parameters, besides those it gathers already, when its forward reads them.

    Args:
        module: The module; its class is replaced by a subclass.
        reads: For each parameter name, the leaf that it is gathered from, the text of its `UnshardSpec`, the parameter
            group.
        in_eval: For those of `reads` that are read otherwise in eval mode, the text of that `UnshardSpec`.
    """
    kept_in_eval = {n: t for n, t in module.__dict__.get(EVAL_READS, {}).items() if n not in reads}
    object.__setattr__(module, READS, {**module.__dict__.get(READS, {}), **reads})
    object.__setattr__(module, EVAL_READS, {**kept_in_eval, **(in_eval or {})})
    for name in reads:
        set_unshard_args(module, name, None)
    note_layout()
    read_as_written(module)
    enter_own_forward(module)


def gather_slots(groups: Iterable[FSDPParamGroup]) -> None:
    """Makes the modules that hold parameters of some parameter groups gather them from there."""
    modules: dict[nn.Module, tuple[dict[str, Read], dict[str, str]]] = {}
    for group in groups:
        for param in group.params:
            for module, attribute in param.module_refs:
                reads, in_eval = modules.setdefault(module, ({}, {}))
                reads[attribute] = (group.flat_param, param.spec.text, group)
                in_eval.update(param.eval_read(attribute))
    for module, (reads, in_eval) in modules.items():
        gather_on_read(module, reads, in_eval)


def read_as_written(module: nn.Module) -> None:
    """Gives a module the class whose properties read as the module's `READS` and `EVAL_READS` say.

    What they say is part of the class, and the leaves are attributes, each once: so Dynamo guards on the class and on
    one attribute for each parameter group, not on what it looks up for each parameter.
    """
    reads, in_eval = module.__dict__[READS], module.__dict__[EVAL_READS]
    number = {leaf: i for i, leaf in enumerate(dict.fromkeys(leaf for leaf, _, _ in reads.values()))}
    for attribute in [a for a in module.__dict__ if a.startswith(_LEAF)]:
        object.__delattr__(module, attribute)
    for leaf, i in number.items():
        object.__setattr__(module, f"{_LEAF}{i}", leaf)
    readings = tuple(sorted(ParamRead(n, number[leaf], text, in_eval.get(n)) for n, (leaf, text, _) in reads.items()))
    if getattr(type(module), _READINGS, None) != readings:
        module.__class__ = _class_that_reads(module, readings)


def _class_that_reads(module: nn.Module, readings: tuple[ParamRead, ...]) -> type[nn.Module]:
    """The subclass for a module: of its original class, or of the one that somebody has given it since."""
    now = type(module)
    is_own = now is original_class(module) or _ORIGINAL in vars(now)
    key = original_class(module) if is_own else now, readings
    if key not in _classes:
        _classes[key] = _make_class(*key) if is_own else _make_class_over(*key)
    return with_methods(_classes[key], module)


def enter_own_forward(module: nn.Module) -> None:
    """Makes reads gather in a forward that the user assigned to a module instance, which hides the class's."""
    own = module.__dict__.get("forward")
    if own is None or getattr(own, "__func__", None) is _own_forward:
        return
    object.__setattr__(module, OWN_FORWARD, own)
    object.__setattr__(module, "forward", types.MethodType(_own_forward, module))


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class that the user wrote."""
    return getattr(type(module), "_fsdp_original_class", type(module))


def _make_class(original: type[nn.Module], readings: tuple[ParamRead, ...]) -> type[nn.Module]:
    members = _read_members(readings) | {
        "train": _train,
        "__deepcopy__": _refuse_deepcopy,
        "named_parameters": _named_parameters,
        "get_parameter": _get_parameter,
        "_save_to_state_dict": _save_to_state_dict,
        "_load_from_state_dict": _load_from_state_dict,
        UNSHARD_ARGS: None,
        _ORIGINAL: original,
        "_fsdp_original_forward": original.forward,
        "_fsdp_outermost_forward": _outermost_forward(original),
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
    }
    if original.forward is not nn.Module.forward:  # of containers that cannot be called
        # Each subclass has its own function object for the signature, over one code object for Dynamo's skip list.
        forward = types.FunctionType(_forward.__code__, _forward.__globals__, "forward")
        members["forward"] = functools.update_wrapper(forward, original.forward)
    return type(original.__name__, (original,), members)


def _make_class_over(given: type[nn.Module], readings: tuple[ParamRead, ...]) -> type[nn.Module]:
    """The subclass of a class over one of ours, which somebody gave a module: `parametrize` does, for one."""
    named = {"__module__": given.__module__, "__qualname__": given.__qualname__, "__doc__": given.__doc__}
    return type(given.__name__, (given,), _read_members(readings) | named)


def _read_members(readings: tuple[ParamRead, ...]) -> dict[str, Any]:
    return {_READINGS: readings, **{reading.name: _read_property(reading) for reading in readings}}


def _outermost_forward(original: type[nn.Module]) -> Callable[..., Any]:
    """The forward of a module that is compiled by itself.

    Dynamo never starts a graph in torch's own layers, it only inlines them. So where the user compiles a plain
    `nn.Sequential`, say, a function of ours is where the graph starts: one code object per class, as Dynamo keeps its
    compiled graphs by code object.
    """
    if not original.forward.__module__.startswith("torch.nn."):
        return original.forward
    code = _call_original.__code__.replace(co_name=f"forward of {original.__name__}")
    return types.FunctionType(code, _call_original.__globals__)


def _call_original(self, *args, **kwargs):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN002, ANN003, ANN202
    return self._fsdp_original_forward(*args, **kwargs)


def _read_property(reading: ParamRead) -> property:
    name, leaf, text, eval_text = reading.name, f"{_LEAF}{reading.leaf}", reading.text, reading.eval_text

    def read(module: nn.Module) -> torch.Tensor | None:
        if torch.compiler.is_compiling() or in_forward() or calls_are_compiled():
            if eval_text is not None and not module.training:
                return torch.ops.fsdp.unshard(getattr(module, leaf), eval_text)
            variants = getattr(module, UNSHARD_ARGS)
            if variants is None or name not in variants:
                return torch.ops.fsdp.unshard(getattr(module, leaf), text)
            return torch.ops.fsdp.unshard(getattr(module, leaf), *_arguments(text, variants[name]))
        if name not in module._parameters:  # deleted by the user
            raise AttributeError(f"{type(module).__name__!r} object has no attribute {name!r}")
        return module._parameters[name]

    skip_code(read.__code__)  # one code object for all parameters: as a graph of its own it would recompile for each
    return property(read)


def _arguments(text: str, args: UnshardArgs) -> tuple[str | torch.Tensor | None, ...]:
    """What a read takes besides the parameter group; each tensor, and the text, is a variant to Dynamo."""
    if torch.is_grad_enabled():
        return args
    return (text,) if args[1] is None else (text, args[1])


def _named_parameters(self, *args, **kwargs):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN002, ANN003, ANN202
    """What `parameters()` and `named_parameters()` give: in a forward, what reads give.

    But not in a part of it that is neither compiled nor differentiated, as updates of a moving average are: they write
    into what is stored. In compiled code such writes are refused.
    """
    stored = self._fsdp_original_class.named_parameters(self, *args, **kwargs)
    if torch.compiler.is_compiling() or (in_forward() and torch.is_grad_enabled()):
        return _read_each(self, stored, args[0] if args else kwargs.get("prefix", ""))
    return stored


def _read_each(module, stored, prefix):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    for name, _ in stored:
        path, _, attribute = name.removeprefix(prefix).removeprefix(".").rpartition(".")
        yield name, getattr(module.get_submodule(path), attribute)


def _get_parameter(self, target):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """What `get_parameter()` gives; torch's own refuses whatever is no `nn.Parameter`, as gathered values are."""
    path, _, attribute = target.rpartition(".")
    module = self.get_submodule(path)
    if attribute in module._parameters:
        return getattr(module, attribute)
    return self._fsdp_original_class.get_parameter(self, target)


def _save_to_state_dict(module: nn.Module, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:  # noqa: FBT001  torch's
    original_class(module)._save_to_state_dict(module, destination, prefix, keep_vars)
    if not keep_vars:
        reads: dict[str, Read] = getattr(module, READS)
        give_storages(module, destination, prefix, [(name, group) for name, (_, _, group) in reads.items()])
        casts.save_original(module, destination, prefix)


def _train(module: nn.Module, mode: bool = True) -> nn.Module:  # noqa: FBT001, FBT002  torch's
    changed = original_class(module).train(module, mode)
    casts.follow_mode(module)
    return changed


def _load_from_state_dict(module: nn.Module, *args: Any) -> None:
    casts.restore(module)
    original_class(module)._load_from_state_dict(module, *args)
    casts.follow_mode(module)


def _refuse_deepcopy(module: nn.Module, _memo: dict[int, Any]) -> nn.Module:
    raise UnsupportedModelError(
        "a sharded module cannot be deep-copied: the copy would share process groups and parameter groups with it",
        where=type(module).__name__,
        instead="copy.deepcopy(model) before it is sharded, and move values with state_dict() and load_state_dict()",
    )


def rebuild_specs(unit: FSDPUnit) -> None:
    """Writes what a unit's policy, settings and optimizers say into its parameters' specs and into the next reads."""
    for group in unit.param_groups:
        update = group.update_state.update = update_in_backward.wanted(group)
        for param in group.params:
            param.spec = _rebuilt(param.spec, unit, update)
            if param.eval_spec is not None:
                param.eval_spec = _rebuilt(param.eval_spec, unit, update)
            for module, attribute in param.module_refs:
                module.__dict__[READS][attribute] = (group.flat_param, param.spec.text, group)
                module.__dict__[EVAL_READS].update(param.eval_read(attribute))
        refresh_unshard_args(group)
    for module in {module: None for param in unit.params for module, _ in param.module_refs}:
        if original_class(module) is not type(module):  # else `full_params` gives the class back
            read_as_written(module)


def _rebuilt(spec: UnshardSpec, unit: FSDPUnit, update: Update) -> UnshardSpec:
    where = unit.policy.mesh_placement
    post_forward_group = spec.post_forward_group if where.post_forward_size > 1 else ""
    reshard = where.reshard
    if spec.size == 1 and update is Update.IN_BACKWARD:
        # A read of the only rank is a view of the flat parameter: backward must see who reads it before the update.
        reshard = Reshard.AFTER_FORWARD
    return dataclasses.replace(
        spec,
        reshard=reshard,
        post_forward_size=where.post_forward_size,
        post_forward_group=post_forward_group,
        divide=unit.divide,
        reduce_group=reduce_alias(unit),
        forward_prefetch=titles(unit.forward_prefetch),
        backward_prefetch=titles(unit.backward_prefetch),
        update=update,
    )
