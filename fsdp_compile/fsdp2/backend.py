"""The backend `"fsdp"` of `torch.compile`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx, nn

from fsdp_compile._torch.dynamo import FrameToCompile, before_each_compile
from fsdp_compile.capture.functions import take_reads_out
from fsdp_compile.fsdp2.compiled_step import CompiledStep
from fsdp_compile.fsdp2.param_group import ParamGroup
from fsdp_compile.fsdp2.take_over import model_of, models, note_backend, sharded_root, take_over
from fsdp_compile.ir.graph import Phase, Record, Role, StepGraph
from fsdp_compile.layout.spec import GradPlacement
from fsdp_compile.lower.eager import compile_eagerly
from fsdp_compile.lower.inductor import compile_with_inductor
from fsdp_compile.lower.region import Region
from fsdp_compile.ops.effects import erase_markers
from fsdp_compile.options import FSDPOptions
from fsdp_compile.pipeline import transform


def fsdp(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | FSDPOptions | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compiles one Dynamo graph; `torch.compile(model, backend="fsdp")` calls this."""
    checked = FSDPOptions.from_dict(options)
    take_reads_out(gm)
    region = _Region(flat_inputs(example_inputs), lambda step: transform(step, checked))
    if checked.lower == "eager":
        return compile_eagerly(gm, example_inputs, region)
    return compile_with_inductor(gm, example_inputs, region, dict(checked.inductor))


class _Region(Region):
    def finish(self, gm: fx.GraphModule, phase: Phase, compile_graph: Callable[[], Any]) -> Any:
        made = CompiledStep.around(StepGraph(gm, phase))
        erase_markers(gm.graph)
        return made(compile_graph())


def flat_inputs(inputs: Sequence[object]) -> dict[int, Record]:
    """Finds flat tensors, and the inputs that belong to them, among the inputs of Dynamo's graph."""
    groups = {i: group for i, value in enumerate(inputs) if (group := ParamGroup.of(value)) is not None}
    titles: dict[str, Any] = {}
    found: dict[int, Record] = {}
    extra: dict[int, Record] = {}
    for i, group in groups.items():
        title = group.title
        while titles.setdefault(title, group.unit) is not group.unit:
            title += "'"
        record = Record(
            Role.FLAT, title, tuple(p.name for p in group.params), tuple(p.spec for p in group.params), Phase.FORWARD
        )
        found[i] = record
        for role, placement in (
            (Role.UNREDUCED_GRAD, GradPlacement.UNREDUCED),
            (Role.PARTIAL_GRAD, GradPlacement.REDUCE_SCATTERED),
        ):
            if placement in group.pending.placements:
                extra[id(group.pending.leaf(placement))] = dataclasses.replace(record, role=Role.GRAD_ACCUMULATOR)
                extra[id(group.pending.blank(placement))] = dataclasses.replace(record, role=role)
    return found | {i: extra[id(value)] for i, value in enumerate(inputs) if id(value) in extra}


def _take_over_what_starts(frame: FrameToCompile) -> None:
    for module in {m: None for m in (frame.starts, *frame.held) if isinstance(m, nn.Module)}:
        if model_of(module) is not None:
            continue
        state = sharded_root(module)
        if state is None:
            continue
        known = models()
        model = take_over(state)
        if model in known:  # a module without parameters of its own
            continue
        for unit in model.units:
            unit.continue_forward()


note_backend(fsdp)
before_each_compile(fsdp, _take_over_what_starts)
