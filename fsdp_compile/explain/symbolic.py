"""Bytes and times of a plan as formulas of the number of ranks and the rate of the link."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import sympy

from fsdp_compile.cost.communicate import COPIES, Kind
from fsdp_compile.cost.formulas import collective_us, copy_us, share_of_others
from fsdp_compile.cost.hardware import make_link
from fsdp_compile.errors import ConfigError
from fsdp_compile.explain.plan import Plan
from fsdp_compile.explain.report import Collective
from fsdp_compile.parameters.flat import ParameterSlot
from fsdp_compile.parameters.layout import ALIGNMENT_BYTES

RANKS = sympy.Symbol("ranks", integer=True, positive=True)
"""Ranks that share the parameters, N."""
GB_PER_S = sympy.Symbol("gb_per_s", positive=True)
"""What one rank sends in one direction, 1e9 byte/s."""


@dataclasses.dataclass(frozen=True)
class Formulas:
    """Expressions in `RANKS` and `GB_PER_S`.

    Padding is in them, to whole rows per rank and to aligned slots. They hold for the buckets of the plan that they
    were made of: with very many ranks, slices become small and another plan may pack more of them together.

    Attributes:
        shard_bytes: Parameters that one rank holds.
        sent_bytes: What one rank sends in a step.
        communication_us: Time of all collectives, one after the other.
        copied_bytes: What crosses the bus between host and device in a step, in both directions together.
        copies_us: Time of all those copies, one after the other.
    """

    shard_bytes: sympy.Expr
    sent_bytes: sympy.Expr
    communication_us: sympy.Expr
    copied_bytes: sympy.Expr
    copies_us: sympy.Expr


def formulas(plan: Plan) -> Formulas:
    """See `Plan.formulas`.

    Raises:
        ConfigError: If the model has run, or its mesh has two dimensions.
    """
    if plan.traced is None or any(
        unit.policy.arrangement.replicate_dim is not None or unit.policy.arrangement.kept_over > 1
        for unit in plan.traced.units
    ):
        raise ConfigError(
            "formulas are made of a plan by explain() for a plain model on a 1-D mesh",
            where="Plan.formulas()",
            instead="explain() the plain model before it is sharded",
        )
    if any(unit.policy.mixed_precision.gather_dtype is not None for unit in plan.traced.units):
        raise ConfigError(
            "which parameters are sent in 8 bits depends on the number of ranks",
            where="Plan.formulas()",
            instead="explain() in a world of each size, or without gather_dtype",
        )
    slots = {unit.parameter_name(slot): slot for unit in plan.traced.units for slot in unit.slots}
    link = make_link("open", GB_PER_S, "a symbol")
    every = [c for graph in plan.graphs for c in graph.collectives]
    sent = [_sent_bytes(c, slots) for c in every if c.kind not in COPIES]
    times = [
        collective_us(b, RANKS, launch_us=link.launch.value, hop_us=link.hop.value, bytes_per_s=link.bytes_per_s)
        for b in sent
    ]
    held = [_extent(slot) * slot.parameter.element_size() for slot in slots.values()]
    bus = plan.hardware.device.host
    copied = [sympy.Add(*_copied_bytes(c, slots)) for c in every if c.kind in COPIES]
    copies = [copy_us(b, launch_us=bus.launch.value, bytes_per_s=bus.bytes_per_s) for b in copied]
    return Formulas(sympy.Add(*held), sympy.Add(*sent), sympy.Add(*times), sympy.Add(*copied), sympy.Add(*copies))


def _sent_bytes(collective: Collective, slots: dict[str, ParameterSlot]) -> sympy.Expr:
    whole = sympy.Add(*_message_bytes(collective, slots)) * RANKS
    return sympy.expand(whole * share_of_others(RANKS))


def _message_bytes(collective: Collective, slots: dict[str, ParameterSlot]) -> Iterator[sympy.Expr]:
    for name in collective.parameters:
        spec = slots[name].spec
        dtype = spec.param_dtype if collective.kind is Kind.GATHER else spec.reduce_dtype
        yield _extent(slots[name]) * dtype.itemsize


def _copied_bytes(copy: Collective, slots: dict[str, ParameterSlot]) -> Iterator[sympy.Expr]:
    """Copies are made as parameters are stored."""
    return (_extent(slots[name]) * slots[name].parameter.element_size() for name in copy.parameters)


def _extent(slot: ParameterSlot) -> sympy.Expr:
    """Elements of a parameter's slot on each rank, as `parameters/layout.py` rounds them."""
    spec = slot.spec
    step = ALIGNMENT_BYTES // min(d.itemsize for d in (slot.parameter.dtype, spec.param_dtype, spec.reduce_dtype))
    if spec.dim is None:
        return sympy.Integer(step)
    others = math.prod(spec.shape[: spec.dim]) * math.prod(spec.shape[spec.dim + 1 :])
    numel = sympy.ceiling(sympy.Integer(spec.shape[spec.dim]) / RANKS) * others
    return step * sympy.Max(sympy.ceiling(numel / step), 1)
