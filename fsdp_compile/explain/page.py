"""The report as plain data, and as one page that loads nothing: HTML, style, script and data."""

from __future__ import annotations

import dataclasses
import enum
import html
import json
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import TYPE_CHECKING, Any, Final

from fsdp_compile.cost.memory import Holder
from fsdp_compile.explain import tables
from fsdp_compile.explain.report import MemoryCurve

if TYPE_CHECKING:
    from fsdp_compile.explain.plan import Plan

_POINTS: Final = 900
"""Memory is drawn with about this many points per graph; each is the largest sum of its stretch of time."""


def to_plain(value: Any) -> Any:
    """Dataclasses as dicts, enums as their values, everything else as JSON has it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.repr]
        return {name: to_plain(getattr(value, name)) for name in (*names, *getattr(value, "derived", ()))}
    if isinstance(value, Mapping):
        return {str(to_plain(key)): to_plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    return value.value if isinstance(value, enum.Enum) else value


def page(plan: Plan, verdict: str = "") -> str:
    """The text of the page, with a verdict of the caller's on top, or that of the plan alone."""
    parts = {
        "TITLE": html.escape(f"{plan.title} on {plan.world_size} ranks"),
        "STYLE": _asset("page.css"),
        "SCRIPT": _asset("page.js"),
        "DATA": json.dumps(page_data(plan, verdict), separators=(",", ":")).replace("<", "\\u003c"),
    }
    text = _asset("page.html")
    for name, value in parts.items():
        text = text.replace(f"<!--{name}-->", value)
    return text


def _asset(name: str) -> str:
    return resources.files("fsdp_compile.explain").joinpath("assets", name).read_text(encoding="utf-8")


def page_data(plan: Plan, verdict: str = "") -> dict[str, Any]:
    """What the script draws: the report, with one clock for all graphs and thinned memory curves, and tables."""
    data = to_plain(plan)
    offset = 0.0
    for drawn, graph in zip(data["graphs"], plan.graphs, strict=True):
        drawn["offset_us"] = offset
        drawn["memory"]["curve"] = list(_thinned(graph.memory, graph.end_us))
        del drawn["memory"]["time_us"], drawn["memory"]["live_bytes"]
        offset += graph.end_us
    used = {holder for graph in plan.graphs for holder in graph.memory.live_bytes}
    data["holders"] = [holder.value for holder in Holder if holder in used]
    data["verdict"] = verdict or tables.verdict(plan)
    data["summary"] = list(tables.summary(plan))
    shown = (tables.units, tables.lanes, tables.copied, tables.skipped, tables.numbers)
    data["tables"] = [to_plain(table(plan)) for table in shown]
    return data


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
