"""The interface of passes."""

from __future__ import annotations

from typing import Protocol, TypeVar

from fsdp_compile.ir.graph import Stage, StepGraph

PlanT = TypeVar("PlanT")


class GraphPass(Protocol[PlanT]):
    """One rewrite of a forward or backward graph.

    Attributes:
        name: As users write it, such as "insert-collectives".
        ensures: How far it leaves a graph: the verifier's rules for that stage hold.
    """

    name: str
    ensures: Stage

    @property
    def requires(self) -> Stage | None:
        """How far the graphs that it takes have come; `None` for those of AOTAutograd, which have markers."""
        ...

    def plan(self, step: StepGraph) -> PlanT:
        """Decides what to do; reads the graph and changes nothing."""
        ...

    def apply(self, step: StepGraph, plan: PlanT) -> None:
        """Does what the plan says, and decides nothing."""
        ...
