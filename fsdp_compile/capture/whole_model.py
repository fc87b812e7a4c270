"""What needs all of a model in one graph, and is refused for a part of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsdp_compile._torch.dynamo import traced_module
from fsdp_compile._torch.fully_shard import modules_of
from fsdp_compile.errors import ConfigError
from fsdp_compile.fsdp2.param_group import ParamGroup
from fsdp_compile.fsdp2.take_over import models
from fsdp_compile.fsdp2.unit import Model, Unit
from fsdp_compile.options import FSDPOptions


def is_whole_model(inputs: Sequence[object]) -> bool:
    """Whether Dynamo's graph reads every unit of the models of which it reads any."""
    return not _unread(inputs)


def refuse_budget_of_a_part(inputs: Sequence[object], options: FSDPOptions, *, breaks: bool) -> None:
    """Refuses a budget of memory for one of several graphs that are trained: none knows what the others hold.

    The only graph of a forward may leave out units that this forward does not use, but not those that FSDP2's hooks
    gather, behind a graph break.

    Args:
        inputs: Of Dynamo's graph.
        options: Of the compile.
        breaks: Whether a graph break is behind the graph.

    Raises:
        ConfigError: With the name of a unit that Dynamo's graph does not read.
    """
    if options.memory_budget_gb is None or not torch.is_grad_enabled():
        return
    module = traced_module()
    around = [model for model in models() if module in set(model.root.modules())]
    for unit in (unit for model in {*_models(inputs), *around} for unit in model.units):
        if unit.only_hooks:
            raise refusal_of_several(f"FSDP2's hooks gather unit {unit.title} ({unit.only_hooks})", options)
    inside = None if module is None else set(module.modules())
    for unit in _unread(inputs):
        if breaks or (inside is not None and inside.isdisjoint(modules_of(unit.state))):
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
    read = {group.unit for value in inputs if (group := ParamGroup.of(value)) is not None}
    found: list[Unit] = []
    for model in _models(inputs):
        present = set(model.root.modules())
        left = (unit for unit in model.units if unit.groups and unit not in read)
        found += [unit for unit in left if not present.isdisjoint(modules_of(unit.state))]
    return found


def _models(inputs: Sequence[object]) -> list[Model]:
    """The models of which Dynamo's graph reads any unit."""
    return list(dict.fromkeys(group.unit.model for v in inputs if (group := ParamGroup.of(v)) is not None))
