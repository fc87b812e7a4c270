"""Whose values a parameter begins with."""

from __future__ import annotations

import enum

from fsdp_compile.errors import ConfigError


class Source(enum.Enum):
    """Whose values count when a model is sharded or initialized."""

    EACH_RANK = "each rank"
    """Every rank keeps its part of what it has itself."""
    FIRST_RANK = "first rank"
    """Every rank gets its part of what the first rank of the mesh has (`sync_module_states=True`)."""

    @classmethod
    def of(cls, sync_module_states: object) -> Source:
        """What FSDP1's flag asks for.

        Raises:
            ConfigError: If it is no flag.
        """
        if not isinstance(sync_module_states, bool):
            raise ConfigError(
                f"sync_module_states is {sync_module_states!r}",
                where="fully_shard(sync_module_states=...)",
                instead="True or False, the same on every rank",
            )
        return cls.FIRST_RANK if sync_module_states else cls.EACH_RANK
