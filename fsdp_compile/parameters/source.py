"""Whose values a parameter begins with."""

from __future__ import annotations

import enum


class Source(enum.Enum):
    """Whose values count when a model is sharded or initialized."""

    EACH_RANK = "each rank"
    """Every rank keeps its part of what it has itself."""
    FIRST_RANK = "first rank"
    """Every rank gets its part of what the first rank of the mesh has (`sync_module_states=True`)."""
