"""The form in which `torch.compile(model, backend="fsdp")` compiles a model: in few graphs, or block by block."""

from __future__ import annotations

import dataclasses
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from torch import nn

from fsdp_compile._torch import dynamo
from fsdp_compile._torch import fully_shard as fsdp2
from fsdp_compile.errors import ConfigError
from fsdp_compile.fsdp2.module_class import user_class
from fsdp_compile.fsdp2.param_group import ParamGroup
from fsdp_compile.fsdp2.take_over import take_over_all
from fsdp_compile.options import FSDPOptions

LIKE_UNITS: Final = 12
"""From how many like units on a model is compiled block by block, unless the user says otherwise."""
_OF_GRAPHS: Final = ("memory_budget_gb", "bucket_mb", "artifacts", "poison", "stop_after")
"""Options that are for the graph of a whole model: blocks would refuse them, or do less."""

_divided: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Compiled models whose blocks are compiled one by one."""


@dataclasses.dataclass(frozen=True)
class Form:
    """How a model is compiled.

    Attributes:
        blocks: The modules that are compiled one by one; none of a model that is compiled as a whole.
        why: For the log.
    """

    blocks: tuple[nn.Module, ...]
    why: str

    def __str__(self) -> str:
        return f"compiled {'block by block' if self.blocks else 'as a whole'}: {self.why}"


def choose_form(compiled: dynamo.OptimizedModule) -> Form:
    """The form of a compiled model that is sharded, and is about to be called first.

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
        return Form(blocks, said)
    # A single layer is no block: what comes after it could not be fused with it.
    several = [block for block in blocks if any(True for _ in block.children())]
    kinds = Counter((user_class(block), tuple(p.shape for p in block.parameters())) for block in several)
    (kind, _), like = kinds.most_common(1)[0] if kinds else ((type(model), ()), 0)
    if like < LIKE_UNITS:
        return Form((), f"it has fewer than {LIKE_UNITS} like units")
    settings = {**dynamo.list_mode_options(given.mode), **options.inductor} if given.mode else options.inductor
    if settings.get("triton.cudagraphs", dynamo.inductor_config.triton.cudagraphs):
        return Form((), "a CUDA graph cannot return a collective that runs")
    if compiled.dynamo_ctx.fullgraph:
        return Form((), "fullgraph=True")
    found = next(_only_of_whole_models(model, blocks, options), "")
    return Form((), found) if found else Form(blocks, f"{like} units of {kind.__name__} are like one another")


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
    """Refuses `regions="blocks"` where `torch.compile` was not given a model, which it would divide.

    Raises:
        ConfigError: For such a graph.
    """
    if options.regions == "blocks":
        divided = {module for model in _divided for module in model.modules()}
        models = {group.unit.model for value in inputs if (group := ParamGroup.of(value)) is not None}
        if any(model.root not in divided for model in models):
            raise ConfigError(
                "blocks are compiled one by one by torch.compile(model), and this is a function or an in-place compile",
                where="options={'regions': 'blocks'}",
                instead="torch.compile(model, backend='fsdp', options={'regions': 'blocks'}), or block.compile() for "
                "each block without this option",
            )
