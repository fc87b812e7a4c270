"""What options mean to passes: budgets in byte, "auto" for one graph, and the limits that the result must keep."""

from __future__ import annotations

import dataclasses
from typing import Final

from fsdp_compile.config.prefetch import Ahead, FSDPPrefetch
from fsdp_compile.cost.fusion import Fusion
from fsdp_compile.cost.hardware import hardware_of
from fsdp_compile.ir.graph import Phase, Role, StepGraph, require
from fsdp_compile.layout.flat_layout import ReduceLayout
from fsdp_compile.options import FSDPOptions
from fsdp_compile.passes.bucketing.grouping import worth_joining_bytes
from fsdp_compile.verify.facts import Limits

PROMISES: Final = {
    Ahead.AT_NEED: Limits(prefetch=0),
    Ahead.BEFORE_COMPUTE: Limits(prefetch=1),
    Ahead.AFTER_COMPUTE: Limits(prefetch=0, alone=True),
    Ahead.AT_ONCE: Limits(),
}
"""The most that each of FSDP1's rules gathers ahead."""
FUSION: Final = {"inductor": Fusion.KERNELS, "eager": Fusion.NONE}
"""How graphs are run, by `FSDPOptions.lower`."""


def budget_bytes(options: FSDPOptions) -> int | None:
    """The budget of a device in byte, if there is one."""
    return None if options.memory_budget_gb is None else round(options.memory_budget_gb * 1e9)


def join_bytes(options: FSDPOptions) -> int:
    """Bytes up to which units share collectives; 0 for "auto", which `for_graph` replaces by a number."""
    return 0 if options.bucket_mb == "auto" else round(options.bucket_mb * 1e6)


def for_graph(step: StepGraph, options: FSDPOptions) -> FSDPOptions:
    """Options with "auto" decided for one graph: the same on every rank."""
    if options.prefetch == "auto" and options.hardware is None:
        options = dataclasses.replace(options, hardware=hardware_of(step))
    if options.bucket_mb != "auto":
        return options
    specs = [spec for flat in step.nodes(Role.FLAT) for spec in require(flat).specs]
    counts_units = options.prefetch != "auto" or any(s.forward_prefetch or s.backward_prefetch for s in specs)
    # Buckets that share a collective are in memory longer, which a budget may not have room for.
    if counts_units or options.memory_budget_gb is not None or not specs:
        return dataclasses.replace(options, bucket_mb=0.0)
    largest = max((each for spec in specs for each in (spec.shard_ranks, spec.replicate_ranks)), key=lambda r: r.size)
    worth_bytes = worth_joining_bytes(options.planned_for or hardware_of(step), largest)
    return dataclasses.replace(options, bucket_mb=worth_bytes / 1e6)


def limits_of(phase: Phase, options: FSDPOptions) -> Limits:
    """The limits of a graph, except for the budget that a planned schedule finds by itself."""
    promised = Limits()
    if isinstance(options.prefetch, int):
        promised = Limits(prefetch=options.prefetch)
    elif isinstance(options.prefetch, FSDPPrefetch):
        promised = PROMISES[options.prefetch.in_forward if phase is Phase.FORWARD else options.prefetch.in_backward]
    layout = ReduceLayout(options.reduce_layout)
    return dataclasses.replace(promised, reduce_layout=layout, joined_bytes=join_bytes(options))
