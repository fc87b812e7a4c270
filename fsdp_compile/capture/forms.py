"""The form in which `torch.compile(model, backend="fsdp")` compiles a model: in few graphs, or block by block.

What needs all of a model in one graph is refused for a part of it.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import nn

from fsdp_compile._torch import dynamo
from fsdp_compile._torch import fully_shard as fsdp2
from fsdp_compile.errors import ConfigError
from fsdp_compile.fsdp2.module_class import user_class
from fsdp_compile.fsdp2.param_group import ParamGroup
from fsdp_compile.fsdp2.take_over import models, take_over_all
from fsdp_compile.fsdp2.unit import Unit
from fsdp_compile.options import FSDPOptions

LIKE_UNITS: Final = 12
"""From how many like units on a model is compiled block by block, unless the user says otherwise."""
_OF_GRAPHS: Final = ("memory_budget_gb", "bucket_mb", "artifacts", "poison", "stop_after")
"""Options that are for the graph of a whole model: blocks would refuse them, or do less."""

_divided: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Compiled models whose blocks are compiled one by one."""


def choose_form(compiled: dynamo.OptimizedModule) -> tuple[tuple[nn.Module, ...], str]:
    """The modules of a sharded model to compile one by one, or none to compile it as a whole; and why.

    Raises:
        ConfigError: If the user says "blocks", and the model has none.
    """
    model, given = compiled._orig_mod, dynamo.given_backend(compiled.dynamo_ctx)
    options = FSDPOptions.from_dict(given.options)
    said = f"options={{'regions': {options.regions!r}}}"
    blocks = () if options.regions == "whole" else _blocks(model)
    if options.regions == "blocks" and not blocks:
        raise ConfigError(
            "the model has no unit below its root that could be compiled separately",
            where=f"{said}, {type(model).__name__}",
            instead="fully_shard() for each block before fully_shard(model), or 'regions': 'whole'",
        )
    if options.regions != "auto":
        return blocks, said
    # A single layer is no block: what comes after it could not be fused with it.
    several = [block for block in blocks if any(True for _ in block.children())]
    kinds = Counter((user_class(block), tuple(p.shape for p in block.parameters())) for block in several)
    (kind, _), like = kinds.most_common(1)[0] if kinds else ((type(model), ()), 0)
    if like < LIKE_UNITS:
        return (), f"it has fewer than {LIKE_UNITS} like units"
    settings = {**dynamo.list_mode_options(given.mode), **options.inductor} if given.mode else options.inductor
    if settings.get("triton.cudagraphs", dynamo.inductor_config.triton.cudagraphs):
        return (), "a CUDA graph cannot return a collective that runs"
    if compiled.dynamo_ctx.fullgraph:
        return (), "fullgraph=True"
    found = next(_only_of_whole_models(model, blocks, options), "")
    return ((), found) if found else (blocks, f"{like} units of {kind.__name__} are like one another")


def _only_of_whole_models(model: nn.Module, blocks: Sequence[nn.Module], options: FSDPOptions) -> Iterator[str]:
    """What the user has asked for, and would not get, or get less of, block by block."""
    for name in _OF_GRAPHS:
        if getattr(options, name) != getattr(FSDPOptions, name):
            yield f"options={{{name!r}: ...}} is for one graph"
    inside = {module for block in blocks for module in block.modules()}
    rest = (p for module in set(model.modules()) - inside for p in module.parameters(recurse=False))
    if options.embedding == "sharded" and any(p.ndim == 2 for p in rest):
        yield "options={'embedding': 'sharded'}, and a table that is in no block"
    for unit in (unit for taken in take_over_all(model) for unit in taken.units):
        modules, specs = fsdp2.modules_of(unit.state), [p.spec for group in unit.groups for p in group.params]
        if unit.prefetched != ((), ()):
            yield f"unit {unit.title} has lists of what to prefetch"
        if len(inside.intersection(modules)) > 1:
            yield f"unit {unit.title} has several modules, each of which would gather it"
        if inside.isdisjoint(modules) and any(spec.gather_format or spec.hook for spec in specs):
            yield f"unit {unit.title} is in no block, and has a gather_dtype or a comm hook"


def _blocks(model: nn.Module) -> tuple[nn.Module, ...]:
    """The outermost units below the root, but for those that share parameters: FSDP2 reduces their gradients once."""
    found: list[nn.Module] = []
    todo = [*model.children()]
    while todo:
        module = todo.pop(0)
        if fsdp2.state_of(module) is None:
            todo[:0] = module.children()
        else:
            found.append(module)
    shared = Counter(id(parameter) for module in dict.fromkeys(found) for parameter in module.parameters())
    return tuple(module for module in dict.fromkeys(found) if all(shared[id(p)] == 1 for p in module.parameters()))


def divide(compiled: dynamo.OptimizedModule, blocks: Sequence[nn.Module]) -> None:
    """Compiles the blocks of a model in its place."""
    dynamo.compile_parts_instead(compiled, blocks)
    _divided.add(compiled._orig_mod)


def refuse_unused_regions(inputs: Sequence[object], options: FSDPOptions) -> None:
    """Raises `ConfigError` for `regions="blocks"` if `torch.compile` was not given a model, which it would divide."""
    if options.regions == "blocks":
        divided = {module for model in _divided for module in model.modules()}
        if any(unit.model.root not in divided for unit in units_read(inputs)):
            raise ConfigError(
                "blocks are compiled one by one by torch.compile(model), and this is a function or an in-place compile",
                where="options={'regions': 'blocks'}",
                instead="torch.compile(model, backend='fsdp', options={'regions': 'blocks'}), or block.compile() for "
                "each block without this option",
            )


def is_whole_model(inputs: Sequence[object]) -> bool:
    """Whether Dynamo's graph reads every unit of the models of which it reads any."""
    return not _unread(inputs)


def refuse_budget_of_a_part(inputs: Sequence[object], options: FSDPOptions, *, breaks: bool) -> None:
    """Raises `ConfigError` for a budget for one of several graphs that are trained: none knows what the others hold.

    The only graph of a forward may leave out units that this forward does not use, but not those that FSDP2's hooks
    gather, where a graph break is behind it (`breaks`).
    """
    if options.memory_budget_gb is None or not torch.is_grad_enabled():
        return
    module = dynamo.traced_module()
    inside = None if module is None else set(module.modules())
    around = {model for model in models() if module in set(model.root.modules())}
    for unit in (unit for model in {unit.model for unit in units_read(inputs)} | around for unit in model.units):
        if unit.only_hooks:
            raise refusal_of_several(f"FSDP2's hooks gather unit {unit.title} ({unit.only_hooks})", options)
    for unit in _unread(inputs):
        if breaks or (inside is not None and inside.isdisjoint(fsdp2.modules_of(unit.state))):
            raise refusal_of_several(f"the graph does not read {unit.title}", options)


def refusal_of_several(what: str, options: FSDPOptions) -> ConfigError:
    """The error for a budget of a model in several graphs."""
    return ConfigError(
        f"{what}: the graph is a part of its model, and a budget for the whole device leaves it what other parts hold "
        "at the same time, which its plan does not know",
        where=f"options={{'memory_budget_gb': {options.memory_budget_gb}}} with graph breaks, or for each block",
        instead="one graph for the model (torch.compile(fullgraph=True) says where it breaks), or leave the budget out",
    )


def _unread(inputs: Sequence[object]) -> list[Unit]:
    """Units with parameters that Dynamo's graph does not read, of models of which it reads any.

    Not those of modules that the user has removed since.
    """
    read, found = units_read(inputs), []
    for model in dict.fromkeys(unit.model for unit in read):
        present = set(model.root.modules())
        left = (unit for unit in model.units if unit.groups and unit not in read)
        found += [unit for unit in left if not present.isdisjoint(fsdp2.modules_of(unit.state))]
    return found


def units_read(inputs: Sequence[object]) -> dict[Unit, None]:
    """The units that Dynamo's graph reads, in the order of its inputs."""
    return dict.fromkeys(group.unit for value in inputs if (group := ParamGroup.of(value)) is not None)
