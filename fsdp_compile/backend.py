"""The backend `"fsdp"` of `torch.compile`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import fx, nn

from fsdp_compile._torch.dynamo import (
    FrameToCompile,
    before_each_compile,
    dynamo_config,
    ends_in_graph_break,
    inductor_config,
    list_mode_options,
    traced_module,
)
from fsdp_compile.capture import plain, unaveraged
from fsdp_compile.capture.flat_inputs import flat_inputs
from fsdp_compile.capture.forms import is_whole_model, refuse_budget_of_a_part, refuse_unused_regions
from fsdp_compile.capture.functions import leave_functional_call, returned_reads, take_reads_out
from fsdp_compile.capture.reject_writes import refuse_writes
from fsdp_compile.capture.shard_embeddings import shard_lookups
from fsdp_compile.cost.calibrated import refuse_elsewhere
from fsdp_compile.errors import ConfigError
from fsdp_compile.fsdp2.module_class import user_class
from fsdp_compile.fsdp2.param_group import ParamGroup
from fsdp_compile.fsdp2.take_over import note_backend, take_over_all
from fsdp_compile.ir.graph import Phase, Role, StepGraph
from fsdp_compile.lower.compiled_step import entered
from fsdp_compile.lower.eager import compile_eagerly
from fsdp_compile.lower.inductor import FREE_AT_LAST_USE, compile_with_inductor
from fsdp_compile.lower.region import Region, register_region
from fsdp_compile.lower.shared_plan import Lines, Settings, inserted_in, refuse, settle
from fsdp_compile.options import FSDPOptions
from fsdp_compile.pipeline import graphs_ahead, keep, transform
from fsdp_compile.progress import say

ONE_OPERATOR: Final[frozenset[type]] = frozenset({nn.Embedding, nn.Linear})
"""Modules of which Inductor would compile one operator, which takes it seconds and fuses nothing.

It is used all the same where the user has settings for it, and where it fuses what makes a parameter of 8 bits.
"""


def fsdp(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | FSDPOptions | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compiles one Dynamo graph; `torch.compile(model, backend="fsdp")` calls this.

    Args:
        gm: Dynamo's graph, with one `fsdp_compile.unshard` per read of a sharded parameter.
        example_inputs: Its inputs.
        options: Fields of `FSDPOptions`.
        mode: As for `torch.compile`: a set of Inductor settings by name.

    Raises:
        ConfigError: For a wrong option, or for a function over a plain model, or one that is compiled in place.
        UnsupportedModelError: For a model that cannot be compiled.
    """
    checked = FSDPOptions.from_dict(options)
    settings = _settings_of(checked, mode)
    unaveraged.refuse_plain(gm, example_inputs)
    plain.refuse_unused_sharding(example_inputs, checked)
    refuse_unused_regions(example_inputs, checked)
    leave_functional_call(gm)
    refuse_writes(gm, example_inputs)
    take_reads_out(gm)
    if checked.embedding == "sharded":
        shard_lookups(gm)
    return _compile(gm, example_inputs, checked, settings)


def _compile(
    gm: fx.GraphModule, inputs: Sequence[Any], options: FSDPOptions, settings: Mapping[str, Any]
) -> Callable[..., Any]:
    """Compiles a Dynamo graph whose reads are taken out."""
    flats = flat_inputs(inputs)
    returned, whole = returned_reads(gm), is_whole_model(inputs)
    groups = [group for value in inputs if (group := ParamGroup.of(value)) is not None]
    ran = register_region(groups, options)
    is_given = settings or options.inductor or any(param.spec.gather_format for g in groups for param in g.params)
    module = traced_module()
    if module is not None and user_class(module) in ONE_OPERATOR and not (whole or is_given):
        options = dataclasses.replace(options, lower="eager")
    of_plans = Settings.of(options, flats.values())
    tell = functools.partial(refuse, list(flats.values()))
    try:
        refuse_budget_of_a_part(inputs, options, breaks=ends_in_graph_break(gm))
        _refuse_other_cluster(options, inputs)
    except ConfigError as error:
        tell(error)
        raise
    inserted: dict[Phase, Lines] = {}

    def note_inserted(step: StepGraph) -> None:
        inserted[step.phase] = inserted_in(step)

    def run_passes(step: StepGraph, lines: Lines | None = None) -> StepGraph:
        return transform(step, options, note_inserted, lines, whole=whole)

    # A CUDA graph cannot return a collective that runs, and memory is poisoned where a graph has read it last.
    records = {**settings, **options.inductor}.get("triton.cudagraphs", inductor_config.triton.cudagraphs)
    region = Region(
        flats,
        run_passes,
        functools.partial(keep, options=options, whole=whole),
        ran.number,
        options.may_recompute,
        None if whole or records or options.poison else functools.partial(graphs_ahead, options),
        functools.partial(settle, settings=of_plans),
        of_plans.can_follow,
        lambda step: ran.steps.append(step.copy()),
        tell,
        inserted=inserted,
    )
    say(f"region {region.number}: tracing {'forward and backward' if torch.is_grad_enabled() else 'forward'}")
    if options.lower == "eager":
        compiled = compile_eagerly(gm, inputs, region)
    else:
        # Only a budget needs memory to be exactly as estimated; reuse saves allocations otherwise.
        exact = {} if options.memory_budget_gb is None else FREE_AT_LAST_USE
        compiled = compile_with_inductor(gm, inputs, region, {**exact, **settings, **options.inductor})
    positions = [i for i, record in flats.items() if record.role is Role.FLAT]
    return entered(compiled, positions, returned, tells_unused=region.sources is not None)


def _settings_of(options: FSDPOptions, mode: str | None) -> dict[str, Any]:
    """Inductor's settings by the name of their mode."""
    if options.lower == "eager" and (mode or options.inductor):
        raise ConfigError(
            "settings of Inductor were given, and Inductor is not used",
            where="torch.compile(mode=...)" if mode else "options={'inductor': ...}",
            instead="lower='inductor', or leave them out",
        )
    return list_mode_options(mode) if mode else {}


def _refuse_other_cluster(options: FSDPOptions, example_inputs: Sequence[Any]) -> None:
    devices = {value.device.type for value in example_inputs if isinstance(value, torch.Tensor)}
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    refuse_elsewhere(options.planned_for, "cpu" if devices <= {"cpu"} else "cuda", ranks)


def _before_compile(frame: FrameToCompile) -> None:
    """Takes over models that torch's FSDP2 has sharded, before Dynamo traces a frame that may read them."""
    plain.shard_in_frame(frame)
    for module in frame.modules:
        for model in take_over_all(module):
            for group in model.groups:
                group.refuse_parametrized()
        if module is frame.starts or isinstance(module, nn.RNNBase):  # Dynamo leaves calls of the latter to Python
            unaveraged.refuse_plain_forward(module)


# Each shape may need two graphs of a forward: one that accumulates gradients, and one that reduces them.
dynamo_config.recompile_limit *= 2
note_backend(fsdp)
plain.watch(fsdp)
before_each_compile(fsdp, _before_compile)
