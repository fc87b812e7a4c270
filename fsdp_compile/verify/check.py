"""Runs all rules on a graph and reports every complaint at once."""

from __future__ import annotations

from fsdp_compile.ir.graph import StepGraph


def check(step: StepGraph) -> None:
    """todo."""
