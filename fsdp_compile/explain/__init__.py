"""The plan of a model as a report: units, collectives, time, memory and volume."""

from fsdp_compile.explain.api import explain
from fsdp_compile.explain.plan import Plan

__all__ = ["Plan", "explain"]
