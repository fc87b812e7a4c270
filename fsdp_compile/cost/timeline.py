"""Simulates a graph on its lanes: compute in program order, and one queue of collectives for each process group.

compute       | a ------ | wait | b ------ |
fsdp.shard.0  |  gather ---------|

Groups that send on one link share its bandwidth equally while both send. Collectives that the program has of its own
(tensor parallelism) have the lane of their group in the same way.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping

from torch import fx

from fsdp_compile.cost.communicate import (
    COPIES,
    Communication,
    Kind,
    communication,
    is_own,
    is_start,
    own_communication,
    own_start_of,
)
from fsdp_compile.cost.compute import NodeCost, node_costs
from fsdp_compile.cost.fusion import Kernels
from fsdp_compile.cost.hardware import Hardware
from fsdp_compile.ir.graph import ITEMS, WAITS, Role, StepGraph, role_of


class SharedLink:
    """Times of the collectives of one link: each lane sends one after the other, and lanes share the bandwidth."""

    def __init__(self) -> None:
        self._now_us = 0.0
        self._lanes: dict[str, list[Hashable]] = {}
        self._left_us: dict[Hashable, float] = {}  # the time that is left for a collective with the link for itself
        self._begins_us: dict[Hashable, float] = {}
        self._ends_us: dict[Hashable, float] = {}

    def start(self, key: Hashable, lane: str, time_us: float, now_us: float) -> None:
        """Queues a collective on a lane; calls must be in the order of time."""
        self._play(now_us)
        queue = self._lanes.setdefault(lane, [])
        if not queue:
            self._begins_us[key] = self._now_us
        queue.append(key)
        self._left_us[key] = time_us

    def span_us(self, key: Hashable, now_us: float) -> tuple[float, float]:
        """When a collective begins and ends, if nothing else starts before it has ended."""
        self._play(now_us)
        while key not in self._ends_us:
            self._end_next(float("inf"))
        return self._begins_us[key], self._ends_us[key]

    def _play(self, until_us: float) -> None:
        while self._end_next(until_us):
            pass
        self._now_us = max(self._now_us, until_us)

    def _end_next(self, until_us: float) -> bool:
        """Goes on to the end of the collective that ends next, or part of the way."""
        queues = [queue for queue in self._lanes.values() if queue]
        if not queues:
            return False
        least_us = min(self._left_us[queue[0]] for queue in queues)
        # Each of n sends at 1/n of the bandwidth, so the shortest takes n times its own time.
        end_us = self._now_us + least_us * len(queues)
        if end_us > until_us:
            for queue in queues:
                self._left_us[queue[0]] -= max(0.0, until_us - self._now_us) / len(queues)
            return False
        self._now_us = end_us
        for queue in queues:
            self._left_us[queue[0]] -= least_us
            if self._left_us[queue[0]] <= 0.0:
                self._ends_us[queue.pop(0)] = end_us
                if queue:
                    self._begins_us[queue[0]] = end_us
        return True


@dataclasses.dataclass(frozen=True)
class Compute:
    """Occupies the compute lane."""

    key: Hashable
    time_us: float


@dataclasses.dataclass(frozen=True)
class Start:
    """Queues a collective on a lane and goes on.

    Attributes:
        time_us: How long it takes when it has the link for itself.
        link: The link that lanes share; empty for a lane with a link of its own.
    """

    key: Hashable
    lane: str
    time_us: float
    link: str = ""

    @property
    def sent_on(self) -> str:
        """The link that it is sent on: the lane itself, where that has a link of its own."""
        return self.link or self.lane


@dataclasses.dataclass(frozen=True)
class Wait:
    """Blocks the compute lane until the collective `start` is done."""

    key: Hashable
    start: Hashable


Event = Compute | Start | Wait


@dataclasses.dataclass(frozen=True)
class Times:
    """When a collective runs, in us from the start of the schedule.

    Attributes:
        issued_us: When compute reached its start.
        begin_us: When the lane was free for it.
        waited_us: When compute first reached a wait for it; `None` if nothing waits.
        exposed_us: How long compute stood still in its waits.
        computed_us: Time that compute spent computing between start and first wait.
    """

    issued_us: float
    begin_us: float
    end_us: float
    waited_us: float | None
    exposed_us: float
    computed_us: float

    @property
    def queued_us(self) -> float:
        """Time behind other collectives of the lane."""
        return self.begin_us - self.issued_us


@dataclasses.dataclass(frozen=True)
class Timeline:
    """A simulated schedule; compute is done at `computed_until_us`, and both it and every lane at `end_us`.

    Attributes:
        reached_us: When compute reached each event.
        transfers: Of each collective.
        busy_us: Time that each link was busy.
        compute_us: Time of all computing.
    """

    reached_us: dict[Hashable, float]
    transfers: dict[Hashable, Times]
    busy_us: dict[str, float]
    compute_us: float
    computed_until_us: float
    end_us: float

    @property
    def exposed_us(self) -> float:
        """How long compute stood still."""
        return sum(transfer.exposed_us for transfer in self.transfers.values())


def simulate(events: Iterable[Event]) -> Timeline:
    """Simulates events in program order; keys are unique, and a wait comes after its start."""
    now = computed = 0.0
    links: dict[str, SharedLink] = {}
    busy: dict[str, float] = {}
    reached: dict[Hashable, float] = {}
    started: dict[Hashable, tuple[Start, float, float]] = {}
    waited: dict[Hashable, tuple[float, float]] = {}
    stood: dict[Hashable, float] = {}
    for event in events:
        reached[event.key] = now
        match event:
            case Compute():
                now += event.time_us
                computed += event.time_us
            case Start():
                links.setdefault(event.sent_on, SharedLink()).start(event.key, event.lane, event.time_us, now)
                busy[event.sent_on] = busy.get(event.sent_on, 0.0) + event.time_us
                started[event.key] = (event, now, computed)
            case Wait():
                start, _, computed_before = started[event.start]
                _, end_us = links[start.sent_on].span_us(event.start, now)
                waited.setdefault(event.start, (now, computed - computed_before))
                stood[event.start] = stood.get(event.start, 0.0) + max(0.0, end_us - now)
                now = max(now, end_us)
    transfers: dict[Hashable, Times] = {}
    for key, (start, issued_us, _) in started.items():
        begin_us, end_us = links[start.sent_on].span_us(key, now)
        waited_us, between_us = waited.get(key, (None, 0.0))
        transfers[key] = Times(issued_us, begin_us, end_us, waited_us, stood.get(key, 0.0), between_us)
    return Timeline(reached, transfers, busy, computed, now, max([now, *(t.end_us for t in transfers.values())]))


_WAITS = (*WAITS, Role.OFFLOAD_IN_WAIT, Role.OFFLOAD_OUT_WAIT)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Costs of every node, what nodes start, the program's `own` collectives apart, and a timeline of nodes."""

    costs: Mapping[fx.Node, NodeCost]
    communications: Mapping[fx.Node, Communication]
    own: Mapping[fx.Node, Communication]
    timeline: Timeline


def schedule(step: StepGraph, hardware: Hardware, kernels: Kernels) -> Schedule:
    """Estimates when every node of a graph runs."""
    costs = node_costs(step.graph, hardware, kernels)
    communications = {node: communication(node, hardware) for node in step.graph.nodes if is_start(node)}
    own = {node: own_communication(node, hardware) for node in step.graph.nodes if is_own(node)}
    return Schedule(costs, communications, own, simulate(_events(step.graph, costs, {**communications, **own})))


def times_us(graph: fx.Graph, hardware: Hardware, kernels: Kernels) -> dict[fx.Node, float]:
    """How long each node holds compute up where nothing of ours is sent.

    That is its computing, or, where it waits for a collective of the program's own, what nothing hides of that.
    """
    own = {node: own_communication(node, hardware) for node in graph.nodes if is_own(node)}
    events = list(_events(graph, node_costs(graph, hardware, kernels), own))
    # Between two events only the first one takes time.
    timeline = simulate(events)
    reached = [*(timeline.reached_us[event.key] for event in events), timeline.computed_until_us]
    return dict(zip(graph.nodes, (after - at for at, after in itertools.pairwise(reached)), strict=True))


def _events(
    graph: fx.Graph, costs: Mapping[fx.Node, NodeCost], sent: Mapping[fx.Node, Communication]
) -> Iterator[Event]:
    """The nodes of a graph in which only what is in `sent` takes time on a link."""
    for node in graph.nodes:
        waited = waited_for(node)
        if node in sent:
            started = sent[node]
            # Copies in both directions pass each other on the bus.
            link = started.group if started.kind in COPIES else started.link
            yield Start(node, started.group, started.alone_us, link)
            # An exchange has no wait of its own: it blocks compute until it is done.
            if started.kind is Kind.EXCHANGE:
                yield Wait((node, "done"), node)
        elif waited in sent:
            yield Wait(node, waited)
        else:
            yield Compute(node, costs[node].time_us)


def waited_for(node: fx.Node) -> fx.Node | None:
    """The collective or the copy that a node waits for; `None` for one that waits for none."""
    if role_of(node) not in _WAITS:
        return own_start_of(node)
    while not is_start(node):
        node = node.all_input_nodes[0]
    return node


def waits_of(start: fx.Node) -> list[fx.Node]:
    """The waits for a collective, in the order of its messages."""
    running = [start, *(u for u in start.users if role_of(u) in ITEMS)]
    return [user for node in running for user in node.users if role_of(user) in _WAITS]
