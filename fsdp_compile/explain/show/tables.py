"""The report as text: tables that fit 80 columns, without colour unless a terminal shows them."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

from fsdp_compile.cost.communicate import COPIES, Kind
from fsdp_compile.cost.copies import Way
from fsdp_compile.explain.plan_data import PlanData
from fsdp_compile.explain.report import Collective, Exposure, GraphPlan, Layout
from fsdp_compile.ir.graph import Phase


def size(size_bytes: float) -> str:
    """Bytes with three or four digits: "1.49 GB" (powers of 1000)."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(size_bytes) >= scale:
            value = size_bytes / scale
            return (
                f"{value:.0f} {unit}"
                if value >= 100
                else f"{value:.1f} {unit}"
                if value >= 10
                else f"{value:.2f} {unit}"
            )
    return f"{size_bytes:.0f} B"


def time(us: float) -> str:
    """Times: "850 us", "12.3 ms", "1.52 s"."""
    if us >= 1e6:
        return f"{us / 1e6:.2f} s"
    if us >= 1e3:
        return f"{us / 1e3:.1f} ms" if us >= 1e4 else f"{us / 1e3:.2f} ms"
    return f"{us:.0f} us"


def count(number: float) -> str:
    """Large counts: "8.03 B"."""
    for unit, scale in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:.2f} {unit}"
    return f"{number:.0f}"


def share(part: float, whole: float) -> str:
    """Percent of a whole, one decimal; "-" of nothing."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


_LEGEND = """own: messages of one parameter; pk.: parameters that share one message
numbers: nodes where it starts > is waited for > is last used > is freed
behind: so much compute covers it; queued: the link was busy that long
"""


def render(plan: PlanData, *, width: int) -> str:
    """The report as plain text of `width` columns."""
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, force_terminal=False, highlight=False, markup=False)
    for part in parts(plan):
        console.print(part)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def parts(plan: PlanData) -> Iterator[RenderableType]:
    """Everything that is shown, in order."""
    device = plan.hardware.device.name
    yield f"{plan.title} on {plan.world_size} ranks, {device}, {plan.links}: estimates, nothing was run\n"
    yield _summary(plan)
    yield _units(plan)
    for graph in plan.graphs:
        title = graph.phase.value if len(plan.forward) == 1 else f"{graph.phase.value}, region {graph.region}"
        yield _collectives(title, graph)
        yield _peak(title, graph)
        if graph.collectives:
            yield f"{title}: copied {_copied(graph)}\n"
    if any(graph.collectives for graph in plan.graphs):
        yield _LEGEND
    if len(plan.lanes) > 1:
        yield _lanes(plan)
    yield _numbers(plan)
    if plan.skipped:
        yield _skipped(plan)


def _table(title: str, *columns: str) -> Table:
    """A table whose columns align right if their name ends in a space."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.padding = (0, 1, 0, 0)
    for column in columns:
        right = column.endswith(" ")
        table.add_column(column.strip(), justify="right" if right else "left", no_wrap=right, overflow="fold")
    return table


def _summary(plan: PlanData) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in _summary_rows(plan):
        table.add_row(name, text)
    return table


def _summary_rows(plan: PlanData) -> Iterator[tuple[str, str]]:
    exposed = sum(graph.exposed_us for graph in plan.graphs)
    compute = sum(graph.compute_us for graph in plan.graphs)
    link = sum(graph.communication_us for graph in plan.graphs)
    numel = sum(unit.numel for unit in plan.units)
    held = sum(unit.shard_bytes for unit in plan.units)
    padding = sum(unit.padding_bytes for unit in plan.units)
    yield (
        "parameters",
        f"{count(numel)} in {len(plan.units)} units; {size(held)} per rank, padding {share(padding, held)}",
    )
    if plan.sizes:
        yield "open sizes", ", ".join(f"{name} {number}" for name, number in plan.sizes.items())
    yield "step", f"{time(plan.step_us)} = compute {time(compute)} + exposed communication {time(exposed)}"
    own = [c for graph in plan.graphs for c in graph.own]
    if own:
        exposed_us = sum(c.exposed_us for c in own)
        yield "of the program", f"{len(own)} collectives, {time(exposed_us)} of {_on_links(own)} exposed"
    larger = f"larger of compute {time(compute)} and link {time(link)}"
    yield "busy", f"{time(plan.busy_us)}, the {larger}; busy / step = {share(plan.busy_us, plan.step_us)}"
    bound = plan.bound
    yield (
        "lower bound",
        f"{time(bound.time_us)} in the same memory; bound / step = {share(bound.time_us, plan.step_us)}",
    )
    peak = max(plan.graphs, key=lambda g: g.memory.peak_bytes, default=None)
    if peak is not None:
        has = size(plan.hardware.device.memory.value)
        yield "peak memory", f"{size(plan.peak_bytes)} in {peak.phase.value}, without optimizer state; of {has}"
    if plan.host_bytes:
        bus = plan.hardware.device.host.name
        yield "host memory", f"{size(plan.host_bytes)} of shards and gradients, without optimizer state; over {bus}"
    sent = ", ".join(f"{kind.value} {size(b)}" for kind, b in plan.volume.sent_bytes.items()) or "nothing"
    yield "sent per rank", f"{size(plan.volume.total_bytes)}: {sent}"
    ratio = share(bound.sent_bytes, plan.volume.total_bytes)
    yield "least sent", f"{size(bound.sent_bytes)} in the same memory; least / sent = {ratio}"
    yield "gathered twice", f"{size(plan.volume.full_sharding_bytes)} = (2 b_p + b_g) P (N-1)/N"


def _on_links(collectives: Sequence[Collective]) -> str:
    return time(sum(c.time_us for c in collectives))


def _lanes(plan: PlanData) -> Table:
    """What each group sends, those of one link below each other."""
    table = _table("lanes", "link", "group", "what", "number ", "sent ", "on link ", "exposed ")
    every = sorted((c for graph in plan.graphs for c in graph.sent), key=lambda c: (c.lane, c.kind.value))
    for (_, kind), same in itertools.groupby(every, key=lambda c: (c.lane, c.kind)):
        alike = list(same)
        exposed_us, sent_bytes = sum(c.exposed_us for c in alike), sum(c.sent_bytes for c in alike)
        link, group, number = alike[0].link, alike[0].group.removeprefix("fsdp."), str(len(alike))
        table.add_row(link, group, _SHORT[kind], number, size(sent_bytes), _on_links(alike), time(exposed_us))
    return table


def _units(plan: PlanData) -> Table:
    table = _table("units", "unit", "parameters ", "elements ", "stored, sent, reduced", "full ", "per rank ")
    shape = lambda u: (u.parameters, u.numel, u.stored, u.sent, u.reduced, u.shard_bytes)  # noqa: E731
    for _, same in itertools.groupby(plan.units, key=shape):
        alike = list(same)
        unit = alike[0]
        dtypes = ", ".join(_short("/".join(names)) or "-" for names in (unit.stored, unit.sent, unit.reduced))
        table.add_row(
            _names([u.name for u in alike]),
            str(unit.parameters),
            count(unit.numel),
            dtypes,
            size(unit.full_bytes),
            size(unit.shard_bytes),
        )
    return table


def _collectives(title: str, graph: GraphPlan) -> Table:
    copies = sum(c.kind in COPIES for c in graph.collectives)
    heading = (
        f"{title}: {time(graph.end_us)}, of which {time(graph.exposed_us)} exposed; "
        f"{len(graph.collectives) - copies} collectives, {f'{copies} copies, ' * bool(copies)}{graph.nodes} nodes"
    )
    table = _table(heading, "unit", "what", "bytes ", "on link ", "exposed ", "because")
    several_links = len({c.link for c in graph.collectives if c.kind not in COPIES}) > 1
    by_kind = sorted(graph.collectives, key=lambda c: list(Kind).index(c.kind))  # so that layers stand in a row
    for _, same in itertools.groupby(by_kind, key=_alike):
        group = list(same)
        first = group[0]
        table.add_row(
            _names([c.unit for c in group]),
            "\n".join(filter(None, (_SHORT[first.kind], _layout(first), first.link * several_links))),
            size(first.size_bytes),
            time(first.time_us),
            _exposed(group),
            f"{_because(first)}\n{_places(first)}",
        )
    return table


def _alike(c: Collective) -> tuple[object, ...]:
    """Equal for neighbours that share a row: sizes the same, times to a fifth of a millisecond."""
    return c.kind, c.size_bytes, c.exposure, round(c.exposed_us / 200), round(c.computed_us / 200)


_SHORT = {
    Kind.GATHER: "gather",
    Kind.REDUCE: "reduce",
    Kind.REPLICATE: "all-reduce",
    Kind.EXCHANGE: "exchange",
    Kind.ALL_TO_ALL: "all-to-all",
    Kind.COPY_IN: "copy in",
    Kind.COPY_OUT: "copy out",
}


def _short(dtype: str) -> str:
    return dtype.replace("float", "f")


def _exposed(group: Sequence[Collective]) -> str:
    if group[0].exposure is Exposure.HIDDEN:
        return "hidden"
    return time(group[0].exposed_us) if len(group) == 1 else f"{time(group[0].exposed_us)} ea."


def _because(collective: Collective) -> str:
    match collective.exposure:
        case Exposure.HIDDEN:
            return f"behind {time(collective.computed_us)}"
        case Exposure.NO_COMPUTE:
            return "no compute meanwhile"
        case Exposure.QUEUED:
            return f"queued {time(collective.begin_us - collective.issued_us)}"
        case Exposure.TOO_SHORT:
            return f"compute only {time(collective.computed_us)}"


def _places(collective: Collective) -> str:
    places = (collective.start, collective.wait, collective.last_use, collective.reshard)
    return ">".join(f"{place.index}" for place in places if place is not None)


def _layout(collective: Collective) -> str:
    own = sum(m.layout is Layout.OWN for m in collective.messages)
    packed = sum(len(m.parameters) for m in collective.messages if m.layout is Layout.PACKED)
    return " + ".join(filter(None, (f"{own} own" * bool(own), f"{packed} pk." * bool(packed))))


def _peak(title: str, graph: GraphPlan) -> Table:
    memory = graph.memory
    where = f" ({memory.peak.where})" if memory.peak.where else ""
    table = _table(
        f"{title}: peak {size(memory.peak_bytes)} at %{memory.peak.node}{where}", "held for", "bytes ", "largest"
    )
    for holder, held in sorted(memory.at_peak.items(), key=lambda item: -item[1]):
        mine = [a for a in memory.largest if a.holder is holder]
        table.add_row(holder.value, size(held), ", ".join(f"%{a.node} {size(a.size_bytes)}" for a in mine[:2]))
    return table


def _copied(graph: GraphPlan) -> str:
    ways = [way for way in Way if graph.phase is Phase.BACKWARD or way in (Way.INTO_GATHERS, Way.OUT_OF_GATHERS)]
    return ", ".join(f"{size(graph.copied_bytes[way])} {way.value}" for way in ways)


def _numbers(plan: PlanData) -> Table:
    table = _table("estimated with", "what", "value", "from")
    for of, same in itertools.groupby(plan.numbers, key=lambda number: number.of):
        for index, number in enumerate(same):
            what = f"{of}: {number.what}" if index == 0 else number.what
            table.add_row(what, f"{number.value:.4g} {number.unit}", number.source)
    return table


def _skipped(plan: PlanData) -> Table:
    table = _table("skipped", "what", "why")
    for item in plan.skipped:
        table.add_row(item.what, item.why)
    return table


def _names(names: Sequence[str]) -> str:
    """One name, or the first of several, the end of the last, and how many they are."""
    return names[0] if len(names) == 1 else f"{names[0]}..{names[-1].rpartition('.')[2]} ({len(names)})"
