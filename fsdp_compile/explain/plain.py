"""The report as plain data."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from fsdp_compile.explain.plan import Plan
from fsdp_compile.explain.report import Collective, GraphPlan, Volume

_DERIVED: dict[type, tuple[str, ...]] = {
    Plan: ("step_us", "floor_us", "peak_bytes", "host_bytes"),
    Volume: ("total_bytes",),
    Collective: ("time_us",),
    GraphPlan: ("copied_bytes",),
}


def to_plain(value: Any) -> Any:
    """Dataclasses as dicts, enums as their values, everything else as JSON has it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.repr] + list(_DERIVED.get(type(value), ()))
        return {name: to_plain(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {_key(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    if isinstance(value, enum.Enum):
        return value.value
    return value


def _key(key: Any) -> str:
    return str(key.value) if isinstance(key, enum.Enum) else str(key)
