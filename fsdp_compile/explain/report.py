"""The parts of a plan: plain frozen data, times in us and sizes in byte."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping

from fsdp_compile.cost.communicate import Kind
from fsdp_compile.cost.copies import Copy, Way
from fsdp_compile.cost.memory import Holder
from fsdp_compile.ir.graph import Phase


class Layout(enum.Enum):
    """How parameters travel."""

    OWN = "own message"
    """One large parameter, into memory of its own."""
    PACKED = "packed"
    """Several small parameters side by side in one message."""


class Exposure(enum.Enum):
    """Whether compute stands still for a collective, and why."""

    HIDDEN = "hidden"
    NO_COMPUTE = "no compute between start and wait"
    QUEUED = "behind other collectives"
    TOO_SHORT = "too little compute between start and wait"


@dataclasses.dataclass(frozen=True)
class Place:
    """A node of a graph.

    Attributes:
        node: Its name.
        index: Its position.
        where: The module that it computes for, or the unit that it serves; may be empty.
        time_us: When compute reaches it, from the start of its graph.
    """

    node: str
    index: int
    where: str
    time_us: float


@dataclasses.dataclass(frozen=True)
class Message:
    """What is sent in one piece: parameters, layout, and the bytes of the whole."""

    parameters: tuple[str, ...]
    layout: Layout
    size_bytes: int


@dataclasses.dataclass(frozen=True)
class Collective:
    """One bucket: a collective with all its messages; or one copy between host and device.

    Attributes:
        kind: What it does.
        unit: The unit that it serves; several have commas between them.
        messages: What travels.
        dtype: Dtype of the messages.
        group: Alias of the process group; of a copy, the direction.
        ranks: Size of the group; of a copy, 1.
        size_bytes: Bytes of the whole, on all ranks together, padding included.
        sent_bytes: Bytes that each rank sends.
        start: Where it starts.
        wait: Where it is first waited for.
        last_use: For gathers, the last node that uses the gathered memory.
        reshard: For gathers, where the memory is freed; `None` if it is kept.
        issued_us: When compute reaches the start, from the start of the graph.
        begin_us: When the lane is free for it.
        end_us: When it is done.
        computed_us: Computing between start and first wait.
        exposed_us: How long compute stands still for it.
        exposure: Why.
        reason: The same in words and numbers.
    """

    kind: Kind
    unit: str
    messages: tuple[Message, ...]
    dtype: str
    group: str
    ranks: int
    size_bytes: int
    sent_bytes: float
    start: Place
    wait: Place | None
    last_use: Place | None
    reshard: Place | None
    issued_us: float
    begin_us: float
    end_us: float
    computed_us: float
    exposed_us: float
    exposure: Exposure
    reason: str

    @property
    def time_us(self) -> float:
        """Time on the link."""
        return self.end_us - self.begin_us

    @property
    def units(self) -> tuple[str, ...]:
        """The units that it serves."""
        return tuple(self.unit.split(", "))

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of all parameters in it."""
        return tuple(name for message in self.messages for name in message.parameters)


@dataclasses.dataclass(frozen=True)
class Allocation:
    """Memory that is live at the peak: the node that made it, for whom, and its size."""

    node: str
    where: str
    holder: Holder
    size_bytes: int


@dataclasses.dataclass(frozen=True)
class MemoryCurve:
    """Live bytes along a graph.

    Attributes:
        peak_bytes: The largest sum.
        peak: The node that runs then.
        at_peak: The sum by what memory is held for.
        largest: The largest pieces at the peak.
        time_us: For each node, when compute reaches it.
        live_bytes: For each holder, bytes while each node runs.
    """

    peak_bytes: int
    peak: Place
    at_peak: Mapping[Holder, int]
    largest: tuple[Allocation, ...]
    time_us: tuple[float, ...]
    live_bytes: Mapping[Holder, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Span:
    """Computing for one module without a break, in us from the start of the graph."""

    where: str
    first: str
    last: str
    begin_us: float
    end_us: float
    flops: int


@dataclasses.dataclass(frozen=True)
class GraphPlan:
    """One forward or backward graph.

    Attributes:
        phase: Which.
        region: Number of the compiled region; more than 0 after graph breaks.
        nodes: Number of nodes.
        flops: Floating-point operations of one rank.
        compute_us: Computing alone.
        communication_us: Time of the busiest link.
        exposed_us: How long compute stands still.
        end_us: Estimated duration.
        collectives: In the order in which they start.
        memory: Live bytes.
        spans: The compute lane.
        copies: What is only moved on the way into collectives and out of them; casts are no copies.
    """

    phase: Phase
    region: int
    nodes: int
    flops: int
    compute_us: float
    communication_us: float
    exposed_us: float
    end_us: float
    collectives: tuple[Collective, ...]
    memory: MemoryCurve
    spans: tuple[Span, ...]
    copies: tuple[Copy, ...]

    @property
    def copied_bytes(self) -> Mapping[Way, int]:
        """Bytes of all copies, by what they are on the way to; 0 where nothing is copied."""
        return {way: sum(copy.size_bytes for copy in self.copies if copy.way is way) for way in Way}


@dataclasses.dataclass(frozen=True)
class UnitPlan:
    """One unit.

    Attributes:
        name: Its module.
        parameters: Number of parameters.
        numel: Elements of all of them.
        stored: Dtypes in which shards are stored.
        sent: Dtypes in which parameters are gathered.
        reduced: Dtypes in which gradients are reduced; empty if all are frozen.
        full_bytes: Full parameters in their stored dtype.
        shard_bytes: What one rank holds, padding included.
        padding_bytes: Padding in that: to whole rows on every rank, and to aligned offsets.
        host_bytes: What one rank holds in the memory of the host of shards and, when training, of their gradients; 0 if
            the unit is not offloaded.
    """

    name: str
    parameters: int
    numel: int
    stored: tuple[str, ...]
    sent: tuple[str, ...]
    reduced: tuple[str, ...]
    full_bytes: int
    shard_bytes: int
    padding_bytes: int
    host_bytes: int


@dataclasses.dataclass(frozen=True)
class Volume:
    """Bytes that one rank sends in a step.

    Attributes:
        sent_bytes: By kind of collective.
        floor_bytes: `(2 b_p + b_g) P (N-1)/N`, and with replicas the least all-reduce of the shards besides.
    """

    sent_bytes: Mapping[Kind, float]
    floor_bytes: float

    @property
    def total_bytes(self) -> float:
        """All kinds together."""
        return sum(self.sent_bytes.values())


@dataclasses.dataclass(frozen=True)
class Skipped:
    """Something that is not done, and why."""

    what: str
    why: str
