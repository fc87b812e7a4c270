"""The interface of passes."""

from __future__ import annotations

from typing import Protocol, TypeVar

from fsdp_compile.ir.graph import Stage, StepGraph

PlanT = TypeVar("PlanT")


class GraphPass(Protocol[PlanT]):
    """One rewrite of a forward or backward graph.

    Attributes:
        name: As users write it, such as "insert-collectives".
        requires: How far the graphs that it takes have come; `None` for those of AOTAutograd, which have markers.
        ensures: How far it leaves them. The verifier's rules for that stage hold.
    """

    name: str
    requires: Stage | None
    ensures: Stage

    def plan(self, step: StepGraph) -> PlanT:
        """Decides what to do; reads the graph and changes nothing."""
        ...

    def apply(self, step: StepGraph, plan: PlanT) -> None:
        """Does what the plan says, and decides nothing."""
        ...
