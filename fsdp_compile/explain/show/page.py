"""The report as plain data, and as one page: HTML, style, script and data in a single file that loads nothing."""

from __future__ import annotations

import dataclasses
import enum
import html
import json
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from typing import Any

from fsdp_compile.cost.memory import Holder
from fsdp_compile.explain.plan_data import PlanData
from fsdp_compile.explain.report import Collective, GraphPlan, MemoryCurve, Volume

_DERIVED: dict[type, tuple[str, ...]] = {
    PlanData: ("step_us", "busy_us", "peak_bytes", "host_bytes", "numbers", "links", "lanes"),
    Volume: ("total_bytes",),
    Collective: ("lane", "time_us"),
    GraphPlan: ("copied_bytes",),
}


def to_plain(value: Any) -> Any:
    """Dataclasses as dicts, enums as their values, everything else as JSON has it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.repr] + _derived(value)
        return {name: to_plain(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {_key(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    if isinstance(value, enum.Enum):
        return value.value
    return value


def _derived(value: object) -> list[str]:
    return [name for kind, names in _DERIVED.items() if isinstance(value, kind) for name in names]


def _key(key: Any) -> str:
    return str(key.value) if isinstance(key, enum.Enum) else str(key)


_POINTS = 900
"""Memory is drawn with about this many points per graph; each is the largest sum of its stretch of time."""


def page(plan: PlanData) -> str:
    """The text of the page."""
    parts = {
        "TITLE": html.escape(f"{plan.title} on {plan.world_size} ranks"),
        "STYLE": _asset("page.css"),
        "SCRIPT": _asset("draw.js") + _asset("tables.js"),
        "DATA": json.dumps(page_data(plan), separators=(",", ":")).replace("<", "\\u003c"),
    }
    text = _asset("page.html")
    for name, value in parts.items():
        text = text.replace(f"<!--{name}-->", value)
    return text


def page_data(plan: PlanData) -> dict[str, Any]:
    """What the script draws: the report, with one clock for all graphs and thinned memory curves."""
    data = to_plain(plan)
    offset = 0.0
    for drawn, graph in zip(data["graphs"], plan.graphs, strict=True):
        drawn["offset_us"] = offset
        drawn["memory"]["curve"] = list(_thinned(graph.memory, graph.end_us))
        del drawn["memory"]["time_us"], drawn["memory"]["live_bytes"]
        offset += graph.end_us
    data["holders"] = [holder.value for holder in Holder if _is_held(plan.graphs, holder)]
    return data


def _is_held(graphs: Sequence[GraphPlan], holder: Holder) -> bool:
    return any(holder in graph.memory.live_bytes for graph in graphs)


def _thinned(memory: MemoryCurve, end_us: float) -> Iterator[dict[str, Any]]:
    """The node with the most live bytes out of each stretch of time."""
    total = [sum(column) for column in zip(*memory.live_bytes.values(), strict=True)]
    width = max(end_us, 1e-9) / _POINTS
    best: dict[int, int] = {}
    for index, time_us in enumerate(memory.time_us):
        stretch = int(time_us / width)
        if stretch not in best or total[index] > total[best[stretch]]:
            best[stretch] = index
    for index in best.values():
        yield {
            "time_us": memory.time_us[index],
            "bytes": {holder.value: live[index] for holder, live in memory.live_bytes.items() if live[index]},
        }


def _asset(name: str) -> str:
    return resources.files("fsdp_compile.explain").joinpath("assets", name).read_text(encoding="utf-8")
