"""Gradients that earlier microbatches have left unreduced: no graph of a further microbatch sees their memory.

Autograd adds the gradients that such a graph returns to them when it has ended, so that both are there until then. A
graph that reduces takes them as inputs.
"""

from __future__ import annotations

from fsdp_compile.ir.graph import Role, StepGraph, require
from fsdp_compile.layout.spec import GradPlacement, UnshardSpec


def accumulates(step: StepGraph) -> bool:
    """Whether a graph leaves gradients unreduced, so that no update follows it."""
    return bool(_unreduced(step))


def accumulated_bytes(step: StepGraph) -> int:
    """Bytes of the full gradients of earlier microbatches; the first one of a step is planned as if it had them."""
    return sum(spec.size * spec.extent * spec.unreduced_dtype.itemsize for spec in _unreduced(step))


def _unreduced(step: StepGraph) -> list[UnshardSpec]:
    specs = (spec for flat in step.nodes(Role.FLAT) for spec in require(flat).specs)
    return [spec for spec in specs if spec.grad_placement is GradPlacement.UNREDUCED]
