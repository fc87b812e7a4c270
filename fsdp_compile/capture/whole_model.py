"""What needs all of a model in one graph, and is refused for a part of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsdp_compile.errors import ConfigError
from fsdp_compile.options import FSDPOptions
from fsdp_compile.runtime.units import FSDPParamGroup, FSDPUnit


def is_whole_model(inputs: Sequence[object]) -> bool:
    """Whether Dynamo's graph reads every unit of the models of which it reads any."""
    return not _unread(inputs)


def refuse_budget_of_a_part(inputs: Sequence[object], options: FSDPOptions) -> None:
    """Refuses a budget of memory for a graph that is not all of its model: none knows what the others hold.

    Raises:
        ConfigError: With the name of a unit that Dynamo's graph does not read.
    """
    unread = _unread(inputs)
    if options.memory_budget_gb is not None and unread:
        raise ConfigError(
            f"the graph does not read {unread[0].title}: it is a part of its model, and a budget for the whole device "
            "leaves it what other parts hold at the same time, which its plan does not know",
            where=f"options={{'memory_budget_gb': {options.memory_budget_gb}}} with graph breaks, or a part that is "
            "called by itself",
            instead="one graph that reads every unit (torch.compile(fullgraph=True) says where it breaks), or leave "
            "the budget out",
        )


def _unread(inputs: Sequence[object]) -> list[FSDPUnit]:
    """Units with parameters that Dynamo's graph does not read, of models of which it reads any."""
    found = [FSDPParamGroup.of(value) for value in inputs if isinstance(value, torch.Tensor)]
    read = dict.fromkeys(flat.unit for flat in found if flat is not None)
    models = dict.fromkeys(unit.model for unit in read)
    return [unit for model in models for unit in model.units if unit not in read]
