"""Makes the plan of a model once more, with the times that its first steps have taken: `FSDPOptions.refine_after`.

    step 1            not measured: memory is allocated, caches are cold
    steps 2 to N+1    each graph notes its collectives (`measured_runs.py`)
    before step N+2   the ranks agree on the ratio of communication to compute; if a new plan saves enough by it, all
                      reads get another spec (`UnshardSpec.link_times`), so that Dynamo compiles again, on all ranks

What is planned again is all that times decide; what is computed stays, and so do numbers.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from fsdp_compile._torch.distributed import largest
from fsdp_compile.comm import groups
from fsdp_compile.comm.failures import refuse_lost_ranks
from fsdp_compile.comm.groups import RankStore
from fsdp_compile.ir.graph import Phase
from fsdp_compile.lower.measured_runs import Recording
from fsdp_compile.lower.progress import say
from fsdp_compile.modules.classes import rebuild_specs
from fsdp_compile.modules.forward import in_forward
from fsdp_compile.passes.schedule_auto import MEASURED_MARGIN
from fsdp_compile.planner.measured_times import Measured, PlannedTimes, gain, link_steps, times_of
from fsdp_compile.runtime.units import FSDPParamGroup, ModelState

LEAST_GAIN: Final = 0.03
"""The part of a step that a new plan must save by its estimate: it takes a second compile."""
_WARM_UP: Final = 1
"""Steps that are not measured."""
_UNKNOWN: Final = -1000
"""In the place of the ratio of a link that was not measured; no ratio is as large."""
_SHARE: Final = 1_000_000
"""Ranks compare whole numbers: millionths of a share."""


@dataclasses.dataclass(eq=False)
class Refinement:
    """The measured steps of one model.

    Attributes:
        forwards: Forwards that have begun, until all are measured.
        recorded: What was measured, with what was planned.
        is_over: Whether nothing is measured any more.
    """

    forwards: int = 0
    recorded: list[tuple[PlannedTimes, Recording]] = dataclasses.field(default_factory=list)
    is_over: bool = False

    def measured(self) -> Measured:
        """Runs that have the calls of their plans, in their order."""
        runs = [(planned, recording.run()) for planned, recording in self.recorded]
        return [(planned, run) for planned, run in runs if run.is_of(planned)]


def measure(
    compiled: Callable[[list[Any]], Any], planned: PlannedTimes, position: int, phase: Phase
) -> Callable[[list[Any]], Any]:
    """Wraps a compiled graph so that its runs are measured until the plan is refined.

    Args:
        compiled: The graph.
        planned: What its plan expects.
        position: Of a parameter group among the inputs, which tells the model.
        phase: Of the graph.
    """

    def run(args: list[Any]) -> Any:
        group = FSDPParamGroup.of(args[position])
        refinement = None if group is None else _refinement(group.unit.model, planned.after, phase)
        if group is None or refinement is None or refinement.forwards <= _WARM_UP:
            return compiled(args)
        recording = Recording(group.params[0].spec.compute or group.flat_param.device.type)
        result = recording.of(compiled, args)
        refinement.recorded.append((planned, recording))
        return result

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _refinement(model: ModelState, after: int, phase: Phase) -> Refinement | None:
    """The measured steps that a graph belongs to; `None` if it is not measured."""
    known: Refinement | None = model.refinement
    # A compiled function enters the graph without the model's own `__call__`, before which plans are refined.
    if known is None and phase is Phase.FORWARD:
        if not in_forward():
            _say_why_not("it is called by a compiled function around it")
            return None
        known = model.refinement = Refinement(is_over=_places(model) is None)
        if known.is_over:
            _say_why_not("its parameters are on several meshes")
    if known is None or known.is_over:
        return None
    if phase is Phase.FORWARD:
        known.forwards += 1
        if known.forwards == _WARM_UP + after:
            reference = weakref.ref(model)
            model.before_next_forward.append(lambda: _refine(reference()))
            model.note_layout()  # what is done before a forward is looked at again
    return known


@functools.cache
def _say_why_not(reason: str) -> None:
    """Says once why a model's steps are not measured although that was asked for."""
    say(f"steps of a model are not measured, since {reason}: its plan stays")


def _refine(model: ModelState | None) -> None:
    """Plans again with what was measured if that is worth a compile; all ranks call this together."""
    if model is None or model.refinement is None or model.refinement.is_over:
        return
    refinement: Refinement = model.refinement
    refinement.is_over = True
    places = _places(model)
    assert places is not None
    measured = refinement.measured()
    refinement.recorded.clear()
    mine = link_steps(measured)
    links = sorted({alias for unit in model.units for param in unit.params for alias in _links(param.spec)})
    # The smallest of all ranks: where one computes longer than the others, these wait for it in collectives.
    agreed = _largest([-mine[link] if link in mine else _UNKNOWN for link in links], places)
    times = {link: times_of(-step) for link, step in zip(links, agreed, strict=True) if step != _UNKNOWN}
    # Batches may differ between ranks, and with them what they expect.
    (saved,) = _largest([round(_SHARE * gain(measured, times, MEASURED_MARGIN))], places)
    said = ", ".join(f"{link} {factor:g}" for link, factor in times.items())
    if saved < LEAST_GAIN * _SHARE:
        say(f"measured steps: collectives take as long as planned, times {said}; the plan stays")
        return
    say(f"measured steps: collectives take as long as planned, times {said}; a new plan saves {saved / _SHARE:.1%}")
    for unit in model.units:
        for param in unit.params:
            param.spec = dataclasses.replace(param.spec, link_times=tuple(times.items()))
            if param.eval_spec is not None:
                param.eval_spec = dataclasses.replace(param.eval_spec, link_times=tuple(times.items()))
        rebuild_specs(unit)


def _links(spec: Any) -> Iterator[str]:
    return filter(None, (spec.group, spec.replicate_group, spec.post_forward_group))


def _places(model: ModelState) -> list[RankStore] | None:
    """Where the ranks of a model meet, shard group first; `None` for a model on several meshes."""
    compared = [group.compared for unit in model.units for group in unit.param_groups]
    meshes = {(one.shard, one.replicate) for one in compared if one is not None}
    if len(meshes) > 1:
        return None
    return [place for pair in meshes for place in pair if place is not None]


def _largest(numbers: Sequence[int], places: Sequence[RankStore]) -> list[int]:
    """The largest number of all ranks of a model at each place: over shards, then over replicas."""
    found = list(numbers)
    try:
        for place in places:
            found = largest(found, groups.comparing_group(place))
    except RuntimeError as error:
        refuse_lost_ranks(error, "before a forward, where ranks agree on the times that they have measured")
        raise
    return found
