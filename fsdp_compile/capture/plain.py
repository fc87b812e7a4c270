"""The one line on a plain model: it is sharded when its compiled form is called first, before anything of it runs.

    compiled = torch.compile(model, backend="fsdp")    before its first call reaches any hook of it
    torch.compile(function, backend="fsdp")            `function` may call such models; other plain ones are refused
    model.compile(backend="fsdp")                      refused when it trains: torch has no hook that would run first

What comes first makes no difference between what Dynamo compiles of a model and what it leaves to Python.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp_compile._torch import dynamo
from fsdp_compile._torch import fully_shard as fsdp2
from fsdp_compile._torch.autograd import outside_of_transforms
from fsdp_compile.capture.forms import choose_form, divide, units_read
from fsdp_compile.capture.unaveraged import (
    WRAPPERS,
    ids_in,
    places_of,
    refuse,
    refuse_meta,
    refuse_plain_rest_of_optimizer,
    refuse_wrapper_around,
    sharded,
    waiting,
)
from fsdp_compile.comm import alike
from fsdp_compile.comm.groups import check_mesh, default_mesh
from fsdp_compile.errors import ConfigError
from fsdp_compile.fsdp2 import stale
from fsdp_compile.fsdp2.accumulation import follow_no_sync
from fsdp_compile.fsdp2.module_class import user_class
from fsdp_compile.fsdp2.shards import local_of
from fsdp_compile.fsdp2.take_over import model_of, take_over_all, watch_calls
from fsdp_compile.fsdp2.updates import update_as
from fsdp_compile.options import FSDPOptions
from fsdp_compile.progress import say
from fsdp_compile.sharding.arguments import refuse_params
from fsdp_compile.sharding.fully_shard import fully_shard


def watch(backend: Callable[..., Any]) -> None:
    """Shards what is compiled for a backend at its first call; the backend's module calls this when it is imported."""

    def wrapped(compiled: dynamo.OptimizedModule, module: nn.Module, options: Mapping[str, Any] | None) -> None:
        waiting.setdefault(module, options)
        dynamo.before_first_call(compiled, _begin)

    dynamo.after_each_compile_of_a_module(backend, wrapped)
    register_optimizer_step_pre_hook(stale.follow_before_step)
    register_module_module_registration_hook(refuse_wrapper_around)
    register_optimizer_step_pre_hook(refuse_plain_rest_of_optimizer)


@torch.compiler.disable
def _begin(compiled: dynamo.OptimizedModule) -> None:
    """Shards a model that is about to be called first, and chooses the form in which it is compiled."""
    module = compiled._orig_mod
    if module in waiting:  # several compiles of a model may wait, and this one is called first
        waiting[module] = dynamo.given_backend(compiled.dynamo_ctx).options
    shard_now(module)
    take_over_all(module)  # before Dynamo looks for a graph: one of another model may fit its classes
    blocks, why = choose_form(compiled)
    say(f"{user_class(module).__name__} is compiled {'block by block' if blocks else 'as a whole'}: {why}")
    if blocks:
        divide(compiled, blocks)
    elif dynamo.is_of_torch(module):
        watch_calls(compiled)


def shard_now(module: nn.Module) -> bool:
    """Shards a compiled plain model that was not called yet, or the compiled one that it is a part of.

    Not if nobody has compiled it, or if it is sharded, or has no parameters; returns whether it did.
    """
    if module not in waiting:
        return False
    # A wrapper of another data parallelism, whose call was refused, may not be collected yet.
    around = [m for m in waiting if m is module or (module in set(m.modules()) and not isinstance(m, WRAPPERS))]
    outermost = max(around, key=lambda other: len(list(other.modules())))
    done = _shard(outermost, FSDPOptions.from_dict(waiting[outermost]))
    for part in outermost.modules():
        waiting.pop(part, None)
    return done


def shard_in_frame(frame: dynamo.FrameToCompile) -> None:
    """Shards the compiled plain models that a frame may call, before Dynamo traces it."""
    for held in frame.modules:
        module = held._orig_mod if isinstance(held, dynamo.OptimizedModule) else held
        if module in waiting and shard_now(module) and (call := dynamo.call_of(module)) is not None:
            # `compiled.forward(x)`: hooks of the call itself have not run.
            model = model_of(module)
            for unit in [] if model is None else model.units:
                if module in fsdp2.modules_of(unit.state):
                    policy = fsdp2.policy_of(unit.state)
                    if (policy.param_dtype and policy.cast_forward_inputs) or policy.output_dtype:
                        raise ConfigError(
                            "mixed precision casts inputs or outputs of this module, and its call had begun before it "
                            "was sharded",
                            where=f"{type(module).__name__}.forward(), options={{'mp_policy': ...}}",
                            instead="call the compiled model itself, or fully_shard(model, mp_policy=...) before "
                            "torch.compile",
                        )
                    unit.defer(call)


def _shard(module: nn.Module, options: FSDPOptions) -> bool:
    if model_of(module) is not None or not any(True for _ in places_of(module)):
        return False
    if (part := next((m for m in module.modules() if m in sharded), None)) is not None:
        raise ConfigError(
            f"a part of the model, {user_class(part).__name__}, was sharded when it was called directly",
            where=type(module).__name__,
            instead="compile the model before its parts are called, or call fully_shard(model) first",
        )
    if fsdp2.states_below(module):  # by the user, who has said what is sharded
        return False
    places = dict(places_of(module))
    of_others = ids_in(fsdp2.sharded_modules())
    common = [name for _, (name, p) in places.items() if id(p) in of_others]
    if len(common) == len(places):  # a part of a sharded model
        return False
    if common:
        raise ConfigError(
            "it is a parameter of a model that is sharded, too, and FSDP2 gathers a parameter in one model",
            where=f"{type(module).__name__}, {common[0]}",
            instead="one module that has both models, compiled or given to fully_shard(); their forwards as methods "
            "that its forward calls",
        )
    refuse_params(places.values())
    refuse(module, places.values())
    with outside_of_transforms(), torch.no_grad():
        if not options.sync_module_states:
            refuse_meta(places.values())
            _compare_values(module, places.values(), options)
        fully_shard(module, **options.sharding)
        refuse_meta(named for _, named in places_of(module))  # what the first rank has on meta, too
        now = {old: owner._parameters[attribute] for (owner, attribute), (_, old) in places.items()}
        successors = {old: new for old, new in now.items() if new is not old and new is not None}
        for old, new in successors.items():
            update_as(old, new)
        take_over_all(module)
        follow_no_sync(module)
    stale.replace(successors)
    sharded[module] = options.sharding
    return True


def _compare_values(module: nn.Module, named: Iterable[tuple[str, nn.Parameter]], options: FSDPOptions) -> None:
    """Compares what ranks start with, once: each keeps its part of its own copy."""
    # Other buffers are caches and the like, whose memory may be uninitialized.
    saved = {
        f"{path}.{name}".removeprefix("."): buffer
        for path, owner in module.named_modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None and name not in owner._non_persistent_buffers_set
    }
    values = dict(named) | saved

    def summary(value: torch.Tensor) -> str:
        octets = local_of(value).detach().reshape(-1).view(torch.uint8)
        words = octets.view(torch.int64) if octets.numel() % 8 == 0 else octets
        return f"{tuple(value.shape)} with sum {int(words.sum())}"

    mesh = default_mesh(next(iter(values.values())).device.type) if options.mesh is None else options.mesh
    check_mesh(mesh)
    if mesh.size() > 1:
        alike.require(
            {name: summary(value) for name, value in values.items()},
            [mesh.get_group(dim) for dim in range(mesh.ndim)],
            torch.device(mesh.device_type),
            what="values of a plain model, of which each would keep its part",
            where=type(module).__name__,
            instead="torch.manual_seed() with the same seed on every rank before the model is made, or the same "
            "checkpoint on every rank; or options={'sync_module_states': True}, which takes the first rank's values, "
            "as DDP does",
        )


def refuse_unused_sharding(inputs: Sequence[object], options: FSDPOptions) -> None:
    """Raises `ConfigError` for options of `fully_shard` if a model was sharded otherwise: they would do nothing."""
    if not options.sharding:
        return
    for model in dict.fromkeys(unit.model for unit in units_read(inputs)):
        made_with = sharded.get(model.root)
        for name, value in options.sharding.items():
            if made_with is None or name not in made_with or not _same(value, made_with[name]):
                raise ConfigError(
                    f"option {name!r} says how to shard, and the model was sharded before, without it or otherwise",
                    where=f"options={{{name!r}: ...}}",
                    instead=f"fully_shard(model, {name}=...) and no such option; or the same one in all compiles of a "
                    "plain model, of which the first call shards it",
                )


def _same(one: object, other: object) -> bool:
    """Whether two values of an option mean the same; wrap policies that are made anew are not equal to each other."""
    if isinstance(one, functools.partial) and isinstance(other, functools.partial):
        return (one.func, one.args, one.keywords) == (other.func, other.args, other.keywords)
    if isinstance(one, ModuleWrapPolicy | CustomPolicy) and type(one) is type(other):
        return vars(one) == vars(other)
    return one == other
