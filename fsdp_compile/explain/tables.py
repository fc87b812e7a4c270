"""How a report is shown: as text that fits 80 columns, as plain data, and as one page that loads nothing."""

from __future__ import annotations

import dataclasses
import enum
import html
import io
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any, Final

from rich import box
from rich import table as rich_table
from rich.console import Console, RenderableType

from fsdp_compile.cost.communicate import COPIES, Kind
from fsdp_compile.cost.copies import Way
from fsdp_compile.cost.memory import Holder
from fsdp_compile.explain.report import Collective, Exposure, GraphPlan, MemoryCurve
from fsdp_compile.ir.graph import Phase

if TYPE_CHECKING:
    from fsdp_compile.explain.plan import Plan


def size(size_bytes: float) -> str:
    """Bytes with three or four digits: "1.49 GB" (powers of 1000)."""
    return _scaled(size_bytes, (1e9, " GB"), (1e6, " MB"), (1e3, " kB"), (1, " B"))


def time(us: float) -> str:
    """Times: "850 us", "12.3 ms", "1.52 s"."""
    return _scaled(us, (1e6, " s"), (1e3, " ms"), (1, " us"))


def count(number: float) -> str:
    """Large counts: "8.03 B"."""
    return _scaled(number, (1e9, " B"), (1e6, " M"), (1e3, " k"), (1, ""))


def _scaled(value: float, *units: tuple[float, str]) -> str:
    for scale, unit in units[:-1]:
        if abs(value) >= scale:
            digits = 2 - (abs(value) >= 10 * scale) - (abs(value) >= 100 * scale)
            return f"{value / scale:.{digits}f}{unit}"
    return f"{value:.0f}{units[-1][1]}"


def share(part: float, whole: float) -> str:
    """Percent of a whole, one decimal; "-" of nothing."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of text; columns whose names end in a space align right."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    def text(self) -> rich_table.Table:
        """The table for a console."""
        shown = rich_table.Table(title=self.title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
        shown.pad_edge, shown.padding = False, (0, 1, 0, 0)
        for column in self.columns:
            right = column.endswith(" ")
            shown.add_column(column.strip(), justify="right" if right else "left", no_wrap=right, overflow="fold")
        for row in self.rows:
            shown.add_row(*row)
        return shown


_LEGEND: Final = """own: messages of one parameter; pk.: parameters that share one message
numbers: nodes where it starts > is waited for > is last used > is freed
behind: so much compute covers it; queued: the link was busy that long
"""


def as_text(parts: Iterable[RenderableType], *, width: int) -> str:
    """Tables and lines as plain text of `width` columns."""
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, force_terminal=False, highlight=False, markup=False)
    for part in parts:
        console.print(part)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def parts(plan: Plan) -> Iterator[RenderableType]:
    """Everything that is shown, in order."""
    device = plan.hardware.device.name
    yield verdict(plan)
    yield f"{plan.title} on {plan.world_size} ranks, {device}, {plan.links}: estimates, nothing was run\n"
    first = rich_table.Table(box=None, show_header=False, pad_edge=False)
    first.add_column(no_wrap=True)
    first.add_column(overflow="fold")
    for name, value, more in summary(plan):
        first.add_row(name, f"{value}{more}")
    yield first
    yield units(plan).text()
    for graph in plan.graphs:
        title = graph.phase.value if len(plan.forward) == 1 else f"{graph.phase.value}, region {graph.region}"
        yield _collectives(title, graph).text()
        yield _peak(title, graph).text()
    if any(graph.collectives for graph in plan.graphs):
        yield _LEGEND
    for table in (copied(plan), lanes(plan), numbers(plan), skipped(plan)):
        if table.rows:
            yield table.text()


def verdict(plan: Plan) -> str:
    """One line: whether forward and backward fit into a device."""
    memory = plan.hardware.device.memory.value
    more = "without optimizer state"
    if plan.peak_bytes <= memory:
        return f"fits: {size(plan.peak_bytes)} of {size(memory)} per device, {more}"
    return f"does not fit: short by {size(plan.peak_bytes - memory)} per device of {size(memory)}, {more}"


def summary(plan: Plan) -> Iterator[tuple[str, str, str]]:
    """The first screen: what a row is about, its number, and what to know of it."""
    held, peak = plan.shard_bytes, max(plan.graphs, key=lambda g: g.memory.peak_bytes, default=None)
    padding = share(sum(unit.padding_bytes for unit in plan.units), held)
    numel = count(sum(unit.numel for unit in plan.units))
    yield "parameters", numel, f" in {len(plan.units)} units; {size(held)} per rank, padding {padding}"
    compute = time(plan.compute_us)
    yield "step", time(plan.step_us), f" = compute {compute} + exposed communication {time(plan.exposed_us)}"
    own = [c for graph in plan.graphs for c in graph.own]
    if own:
        exposed = time(sum(c.exposed_us for c in own))
        yield "of the program", f"{len(own)} collectives", f", {exposed} of {_on_links(own)} exposed"
    busy = share(plan.busy_us, plan.step_us)
    yield "compute or link", time(plan.busy_us), f" ({busy} of the step), the larger of the two; the rest waits"
    if peak is not None:
        has = size(plan.hardware.device.memory.value)
        yield "peak memory", size(plan.peak_bytes), f" in {peak.phase.value}, without optimizer state; of {has}"
    if plan.host_bytes:
        bus = plan.hardware.device.host.name
        yield "host memory", size(plan.host_bytes), f" of shards and gradients, without optimizer state; over {bus}"
    sent = ", ".join(f"{kind.value} {size(b)}" for kind, b in plan.volume.sent_bytes.items()) or "nothing"
    yield "sent per rank", size(plan.volume.total_bytes), f": {sent}"
    twice = size(plan.volume.full_sharding_bytes)
    yield "FSDP2 would send", twice, ": each parameter gathered twice and reduced once"


def _on_links(collectives: Sequence[Collective]) -> str:
    return time(sum(c.time_us for c in collectives))


def lanes(plan: Plan) -> Table:
    """What each group sends, those of one link below each other; no rows where there is one lane."""
    rows = []
    every = sorted((c for graph in plan.graphs for c in graph.sent), key=lambda c: (c.lane, c.kind.value))
    for (_, kind), same in itertools.groupby(every, key=lambda c: (c.lane, c.kind)):
        alike = list(same)
        exposed_us, sent_bytes = sum(c.exposed_us for c in alike), sum(c.sent_bytes for c in alike)
        link, group, number = alike[0].link, alike[0].group.removeprefix("fsdp."), str(len(alike))
        rows.append((link, group, _SHORT[kind], number, size(sent_bytes), _on_links(alike), time(exposed_us)))
    columns = ("link", "group", "what", "number ", "sent ", "on link ", "exposed ")
    return Table("lanes", columns, rows if len(plan.lanes) > 1 else [])


def units(plan: Plan) -> Table:
    """Neighbours that are alike share a row."""
    rows = []
    shape = lambda u: (u.parameters, u.numel, u.stored, u.sent, u.reduced, u.shard_bytes)  # noqa: E731
    for _, same in itertools.groupby(plan.units, key=shape):
        alike = list(same)
        unit = alike[0]
        dtypes = ["/".join(names).replace("float", "f") or "-" for names in (unit.stored, unit.sent, unit.reduced)]
        name, numbers = _names([u.name for u in alike]), (str(unit.parameters), count(unit.numel))
        rows.append((name, *numbers, ", ".join(dtypes), size(unit.full_bytes), size(unit.shard_bytes)))
    return Table("units", ("unit", "parameters ", "elements ", "stored, sent, reduced", "full ", "per rank "), rows)


def _collectives(title: str, graph: GraphPlan) -> Table:
    copies = sum(c.kind in COPIES for c in graph.collectives)
    heading = (
        f"{title}: {time(graph.end_us)}, of which {time(graph.exposed_us)} exposed; "
        f"{len(graph.collectives) - copies} collectives, {f'{copies} copies, ' * bool(copies)}{graph.nodes} nodes"
    )
    several_links = len({c.link for c in graph.collectives if c.kind not in COPIES}) > 1
    by_kind = sorted(graph.collectives, key=lambda c: list(Kind).index(c.kind))  # so that layers stand in a row
    rows = []
    for _, same in itertools.groupby(by_kind, key=_alike):
        group = list(same)
        first = group[0]
        exposed = "hidden" if first.exposure is Exposure.HIDDEN else time(first.exposed_us) + " ea." * (len(group) > 1)
        nodes = (first.start, first.wait, first.last_use, first.reshard)
        places = ">".join(str(place.index) for place in nodes if place is not None)
        rows.append((
            _names([c.unit for c in group]),
            "\n".join(filter(None, (_SHORT[first.kind], _layout(first), first.link * several_links))),
            size(first.size_bytes),
            time(first.time_us),
            exposed,
            f"{first.reason}\n{places}",
        ))  # fmt: skip
    return Table(heading, ("unit", "what", "bytes ", "on link ", "exposed ", "because"), rows)


def _alike(c: Collective) -> tuple[object, ...]:
    """Equal for neighbours that share a row: sizes the same, times to a fifth of a millisecond."""
    return c.kind, c.size_bytes, c.exposure, round(c.exposed_us / 200), round(c.computed_us / 200)


_SHORT: Final = {
    Kind.GATHER: "gather",
    Kind.REDUCE: "reduce",
    Kind.REPLICATE: "all-reduce",
    Kind.EXCHANGE: "exchange",
    Kind.ALL_TO_ALL: "all-to-all",
    Kind.COPY_IN: "copy in",
    Kind.COPY_OUT: "copy out",
}


def _layout(collective: Collective) -> str:
    counts = [len(message.parameters) for message in collective.messages]
    own = counts.count(1)
    packed = sum(counts) - own
    return " + ".join(filter(None, (f"{own} own" * bool(own), f"{packed} pk." * bool(packed))))


def _peak(title: str, graph: GraphPlan) -> Table:
    memory = graph.memory
    where = f" ({memory.peak.where})" if memory.peak.where else ""
    rows = []
    for holder, held in sorted(memory.at_peak.items(), key=lambda item: -item[1]):
        mine = [f"%{a.node} {size(a.size_bytes)}" for a in memory.largest if a.holder is holder]
        rows.append((holder.value, size(held), ", ".join(mine[:2])))
    heading = f"{title}: peak {size(memory.peak_bytes)} at %{memory.peak.node}{where}"
    return Table(heading, ("held for", "bytes ", "largest"), rows)


def copied(plan: Plan) -> Table:
    """Bytes that graphs only move; into and out of reductions in backward alone."""
    rows = [
        (graph.phase.value, way.value, size(graph.copied_bytes[way]), str(sum(c.way is way for c in graph.copies)))
        for graph in plan.graphs
        for way in (Way if graph.collectives else ())
        if graph.phase is Phase.BACKWARD or way in (Way.INTO_GATHERS, Way.OUT_OF_GATHERS)
    ]
    return Table("copied around collectives", ("graph", "way", "bytes ", "nodes "), rows)


def numbers(plan: Plan) -> Table:
    """What was estimated with, and where it comes from."""
    rows = []
    for of, same in itertools.groupby(plan.numbers, key=lambda number: number.of):
        for index, number in enumerate(same):
            what = f"{of}: {number.what}" if index == 0 else number.what
            rows.append((what, f"{number.value:.4g} {number.unit}", number.source))
    return Table("estimated with", ("what", "value", "from"), rows)


def skipped(plan: Plan) -> Table:
    """What is not done, and why."""
    return Table("skipped", ("what", "why"), [(item.what, item.why) for item in plan.skipped])


def _names(names: Sequence[str]) -> str:
    """One name, or the first of several, the end of the last, and how many they are."""
    return names[0] if len(names) == 1 else f"{names[0]}..{names[-1].rpartition('.')[2]} ({len(names)})"


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


def page(plan: Plan, headline: str = "") -> str:
    """The text of the page, below a headline of the caller's, or the verdict of the plan."""
    parts = {
        "TITLE": html.escape(f"{plan.title} on {plan.world_size} ranks"),
        "STYLE": _asset("page.css"),
        "SCRIPT": _asset("page.js"),
        "DATA": json.dumps(page_data(plan, headline), separators=(",", ":")).replace("<", "\\u003c"),
    }
    text = _asset("page.html")
    for name, value in parts.items():
        text = text.replace(f"<!--{name}-->", value)
    return text


def _asset(name: str) -> str:
    return resources.files("fsdp_compile.explain").joinpath("assets", name).read_text(encoding="utf-8")


def page_data(plan: Plan, headline: str = "") -> dict[str, Any]:
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
    data["verdict"] = headline or verdict(plan)
    data["summary"] = list(summary(plan))
    shown = (units, lanes, copied, skipped, numbers)
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
