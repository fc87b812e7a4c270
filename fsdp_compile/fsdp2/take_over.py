"""Taking a model over that torch's FSDP2 has sharded: from then on graphs may gather it.

FSDP2's objects stay, and own parameters, hooks and state dicts. Their shards move into flat buffers, their two forward
hooks of each unit are wrapped, and modules get classes whose reads a graph can see. It happens when a compile for this
backend first meets the model, after FSDP2's own lazy initialization.
"""

from __future__ import annotations

import functools
import threading
import weakref
from typing import Any

import torch
from torch import nn

from fsdp_compile._torch import fully_shard as fsdp2
from fsdp_compile._torch.autograd import outside_of_transforms
from fsdp_compile._torch.distributed import cast
from fsdp_compile._torch.dynamo import (
    OptimizedModule,
    call_of,
    compiler_of_calls,
    given_backend,
    graph_break,
    skip_code,
)
from fsdp_compile.fsdp2 import kernels  # noqa: F401  reads of a model that was taken over need their derivatives
from fsdp_compile.fsdp2.buffers import originals_in_eval
from fsdp_compile.fsdp2.module_class import FLAT, LAYOUTS, UNIT, ParamRead, class_of, original_class, refresh_reads
from fsdp_compile.fsdp2.param_group import Param, ParamGroup
from fsdp_compile.fsdp2.pipeline import Pipeline
from fsdp_compile.fsdp2.shards import give_storages, unwrap
from fsdp_compile.fsdp2.unit import Gatherer, Model, Unit
from fsdp_compile.layout.spec import ROOT

_models: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Model]] = weakref.WeakKeyDictionary()
"""By root, the models that were taken over; its units, which hooks of its modules know, keep a model."""
_backends: list[object] = []
"""The functions that compile for this package: frames of others are Python to it."""


def note_backend(backend: object) -> None:
    """Makes a function known as a backend whose graphs gather units."""
    _backends.append(backend)


def model_of(module: nn.Module) -> Model | None:
    """The model that a module is a part of, if it was taken over."""
    unit = module.__dict__.get(UNIT)
    if unit is not None:
        return unit.model
    reference = _models.get(module)
    return None if reference is None else reference()


def models() -> list[Model]:
    """All models that were taken over."""
    return [model for reference in _models.values() if (model := reference()) is not None]


def units(model: nn.Module) -> list[Unit]:
    """The units of a sharded model, in the order of their modules; it is taken over if no compile has done that yet.

    Args:
        model: The model, or what `torch.compile` has made of it. All ranks call this together.

    Returns:
        None for a plain model.
    """
    return [unit for found in take_over_all(unwrap(model)) for unit in found.units]


def take_over_all(module: nn.Module) -> list[Model]:
    """Takes over the sharded models in a module, or the one that it is a part of, and returns them."""
    if (found := model_of(module)) is not None:
        return [found]
    return list(dict.fromkeys(map(take_over, fsdp2.states_below(module))))


def take_over(state: fsdp2.FSDPState) -> Model:
    """Takes over the model that one of FSDP2's states belongs to; all ranks of its meshes call it together.

    In the middle of a forward, the units whose calls FSDP2's hooks have begun are left to graphs.
    """
    # The first call may be an evaluation, or in a transform of `torch.func`.
    with outside_of_transforms(), torch.no_grad():
        if not fsdp2.is_initialized(state):
            fsdp2.lazy_init(state)
        states = fsdp2.states_of_model(state)
        root = fsdp2.modules_of(states[0])[0]
        if (earlier := model_of(root)) is not None:
            return earlier
        # The call in which this happens may have gathered some, or the user before it. Extensions gather a second time
        # into what they have made, which a forward cannot do.
        for of_torch in (group for each in states for group in fsdp2.groups_of(each)):
            if fsdp2.is_gathered(of_torch) and not fsdp2.has_extensions(of_torch):
                fsdp2.reshard(of_torch)
        model = Model(root)
        titles = {id(module): name for name, module in root.named_modules()}
        for each in states:
            title = "+".join(titles[id(module)] for module in fsdp2.modules_of(each)) or ROOT
            unit = Unit(model, each, title)
            unit.make_groups(titles)
            for group in unit.groups:
                group.pending.take_from_torch()
            unit.refuse_partial_of_torch()
            fsdp2.replace_hooks(each, functools.partial(_pre_hook, unit), functools.partial(_post_hook, unit))
            model.units.append(unit)
        _give_classes(model)
        for module in {module: None for group in model.groups for param in group.params for module, _ in param.refs}:
            module.register_state_dict_post_hook(give_storages)
        for unit in model.units:
            unit.follow_prefetch()
        _models[root] = weakref.ref(model)
    for unit in model.units:
        unit.continue_forward()
    return model


def _give_classes(model: Model) -> None:
    """Gives modules the classes by which graphs read their parameters."""
    reads: dict[nn.Module, list[tuple[str, ParamGroup, Param]]] = {}
    for group in model.groups:
        for param in group.params:
            for module, name in param.refs:
                reads.setdefault(module, []).append((name, group, param))
    classes: dict[Unit, list[tuple[nn.Module, type, type]]] = {unit: [] for unit in model.units}
    # Inner units come after those around them.
    around = {m: unit for unit in model.units for module in fsdp2.modules_of(unit.state) for m in module.modules()}
    for module in model.root.modules():
        fsdp2.take_marks(module)
        own = sorted(reads.get(module, ()), key=lambda read: read[0])
        layouts = {name: param.layout for name, _, param in own if param.layout is not None}
        if layouts:
            object.__setattr__(module, LAYOUTS, layouts)
        plain = type(module)
        in_eval = {name: "" if (spec := group.eval_spec(param)) is None else spec.text for name, group, param in own}
        reads_of = [ParamRead(n, g.number, p.spec.text, p.layout is not None, in_eval[n]) for n, g, p in own]
        buffers = originals_in_eval(module)
        made = class_of(plain, reads_of, buffers)
        if own:
            object.__setattr__(module, UNIT, own[0][1].unit)
        if own or buffers:
            unit = own[0][1].unit if own else around[module]
            classes[unit].append((module, made, class_of(plain, ())))
        else:
            # Its code may read parameters of its children.
            fsdp2.set_class(module, made)
    for unit, its in classes.items():
        unit.set_classes(its)
        for group in unit.groups:
            refresh_reads(group)


def _follow_conversions(model: Model) -> None:
    """After `.double()` or `.to()`: flat buffers of the new dtype, and classes whose reads say so."""
    converted = [unit for unit in model.units if unit.is_converted]
    if not converted:
        return
    with torch.inference_mode(mode=False), torch.no_grad():
        titles = {id(module): name for name, module in model.root.named_modules()}
        for module in model.root.modules():
            fsdp2.set_class(module, original_class(module))
            for name in [name for name in vars(module) if name.startswith(FLAT)]:
                del vars(module)[name]  # it may be of a group that there is no more
        for unit in converted:
            unit.remake_groups(titles)
        _give_classes(model)
        model.pipeline = Pipeline()  # the old one would keep the old groups


def watch_calls(compiled: OptimizedModule) -> None:
    """Follows, before each call of a compiled root whose hooks Dynamo traces, what users have done with parameters."""
    compiled.register_forward_pre_hook(_enter_call)
    compiled.register_forward_hook(_leave_call, always_call=True)


def _enter_call(compiled: OptimizedModule, *_: object) -> None:
    if not torch.compiler.is_compiling():
        _follow_changes(compiled)


@torch.compiler.disable
def _follow_changes(compiled: OptimizedModule) -> None:
    root = compiled._orig_mod
    model = model_of(root)
    if model is not None and model.root is root:
        _follow_conversions(model)
        for unit in model.units:
            unit.follow()
        model.pipeline.begin_forward()
        model.followed_in = call_of(compiled)


def _leave_call(compiled: OptimizedModule, *_: object) -> None:
    model = None if torch.compiler.is_compiling() else model_of(compiled._orig_mod)
    if model is not None:
        model.followed_in = None  # its frame holds inputs
        model.pipeline.end_forward()


# FSDP2's hooks.


class _Watched(threading.local):
    """Whether Dynamo compiles, for this backend, the frames that the caller of a hook enters."""

    value = False


_watched = _Watched()


def _pre_hook(unit: Unit, hook: fsdp2.PreHook) -> fsdp2.PreHook:
    policy = fsdp2.policy_of(unit.state)
    training = policy.param_dtype if policy.cast_forward_inputs else None
    in_eval = None if fsdp2.own_setting(unit.state, "full_precision_in_eval", default=False) else training
    if isinstance(hook, _FirstPreHook):
        hook = hook.__wrapped__
    unit.pre_hook = hook

    def pre_forward(module: nn.Module, args: Any, kwargs: Any) -> Any:
        dtype = training if module.training else in_eval
        if torch.compiler.is_compiling():
            if unit.only_hooks:
                graph_break(msg=f"FSDP2's hooks gather unit {unit.title!r}: {unit.only_hooks}")
            return cast((args, kwargs), dtype)
        # Here, since Dynamo does not watch what a disabled function calls.
        _note_watched()
        return _begin(unit, module, args, kwargs, dtype)

    skip_code(pre_forward.__code__)
    return pre_forward


def keep_inputs_in_eval(module: nn.Module) -> None:
    """Makes the first compiled call of a sharded module leave inputs as they are in eval mode.

    FSDP2's own hook runs in it, and would cast them: the model is taken over when the forward is compiled.
    """
    state = fsdp2.state_of(module)
    assert state is not None
    fsdp2.replace_hooks(state, _FirstPreHook, lambda hook: hook)


class _FirstPreHook:
    def __init__(self, hook: fsdp2.PreHook) -> None:
        self.__wrapped__ = hook

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        _note_watched()
        made = self.__wrapped__(module, args, kwargs)
        return (args, kwargs) if _watched.value and not module.training else made


def _post_hook(unit: Unit, hook: fsdp2.PostHook) -> fsdp2.PostHook:
    unit.post_hook = hook
    training = fsdp2.policy_of(unit.state).output_dtype
    in_eval = training if fsdp2.own_setting(unit.state, "casts_output_in_eval", default=True) else None

    def post_forward(module: nn.Module, args: Any, output: Any) -> Any:
        dtype = training if module.training else in_eval
        if torch.compiler.is_compiling():
            return cast(output, dtype)
        return _end(unit, hook, module, args, output, dtype)

    skip_code(post_forward.__code__)
    return post_forward


@torch.compiler.disable
def _begin(unit: Unit, module: nn.Module, args: Any, kwargs: Any, dtype: torch.dtype | None) -> Any:
    for each in (unit, *unit.inner_units):
        each.leave_hooks()
    # Checkpointing by module hooks repeats the forward as it was: by hooks only if hooks have run its backward so far.
    repeats = fsdp2.training_state(unit.state) is fsdp2.TrainingState.PRE_BACKWARD
    is_root = unit is unit.model.units[0]
    if is_root:
        if unit.gatherer is not Gatherer.HOOKS:
            _follow_conversions(unit.model)
        unit.model.pipeline.begin_forward()
    by_graphs = _watched.value and not unit.only_hooks and unit.gatherer is not Gatherer.HOOKS
    if (by_graphs or is_root) and not repeats:
        are_compiled = by_graphs or any(each.compiled_regions for each in unit.model.units)
        for each in unit.inner_units:
            if by_graphs or each.is_in_part:
                each.follow()
            if are_compiled:  # graphs would ignore given values
                each.gather_given()
        if by_graphs and not unit.given_values():
            unit.defer(call_of(module))
            return cast((args, kwargs), dtype)
    if unit.gatherer is not Gatherer.HOOKS:
        unit.is_in_part = False  # but for a forward with given values, which says nothing of those without
        unit.begin_hooks()
    return unit.pre_forward(module, args, kwargs)


@torch.compiler.disable
def _end(unit: Unit, hook: fsdp2.PostHook, module: nn.Module, args: Any, output: Any, dtype: torch.dtype | None) -> Any:
    if unit is unit.model.units[0]:
        unit.model.pipeline.end_forward()
    for each in unit.inner_units:
        output = each.end_given(output)
    if unit.gatherer is not Gatherer.HOOKS:
        unit.end_deferred()
        return cast(output, dtype)
    output = hook(module, args, output)  # of several modules each has its own
    unit.end_hooks()
    return output


def _note_watched() -> None:
    compiler = compiler_of_calls()
    _watched.value = compiler is not None and _is_ours(compiler)


@functools.lru_cache(maxsize=64)
def _is_ours(compiler: Any) -> bool:
    return given_backend(compiler).function in _backends


for _function in (_enter_call, _leave_call, _note_watched, compiler_of_calls, _FirstPreHook.__call__):
    skip_code(_function.__code__)
