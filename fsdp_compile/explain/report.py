"""The parts of a plan: plain frozen data, times in us and sizes in byte; `derived` are properties that are shown."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import ClassVar

from fsdp_compile.cost.communicate import Communication, Kind
from fsdp_compile.cost.copies import Copy, Way
from fsdp_compile.cost.hardware import Quantity
from fsdp_compile.cost.memory import Holder
from fsdp_compile.cost.timeline import Times
from fsdp_compile.ir.graph import Phase


class Exposure(enum.Enum):
    """Whether compute waits for a collective, and why."""

    HIDDEN = "hidden"
    NO_COMPUTE = "no compute between start and wait"
    QUEUED = "behind other collectives"
    TOO_SHORT = "too little compute between start and wait"


@dataclasses.dataclass(frozen=True)
class Place:
    """A node of a graph.

    Attributes:
        where: The module that it computes for, or the unit that it serves; may be empty.
        time_us: When compute reaches it, from the start of its graph.
    """

    node: str
    index: int
    where: str
    time_us: float


@dataclasses.dataclass(frozen=True)
class Message:
    """What is sent in one message: one large parameter in memory of its own, or several small ones packed.

    Attributes:
        size_bytes: Bytes of the whole.
    """

    parameters: tuple[str, ...]
    size_bytes: int


@dataclasses.dataclass(frozen=True)
class Collective(Communication, Times):
    """One bucket: a collective with all its messages; or one copy between host and device, or one of the program's own.

    Attributes:
        unit: The unit that it serves; several have commas between them. Of the program's own, the module.
        wait: Where it is first waited for.
        last_use: For gathers, the last node that uses the gathered memory.
        reshard: For gathers, where the memory is freed; `None` if it stays unsharded.
        reason: What compute covers of it, or why it does not.
    """

    unit: str
    messages: tuple[Message, ...]
    dtype: str
    start: Place
    wait: Place | None
    last_use: Place | None
    reshard: Place | None
    exposure: Exposure
    reason: str
    derived: ClassVar = ("lane", "time_us")

    @property
    def lane(self) -> str:
        """Link and group: collectives of one lane run one after the other, lanes of one link share its bandwidth."""
        return f"{self.link}: {self.group}"

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
    """Memory that is live at the peak: the node that allocates it, its module, its use and its size."""

    node: str
    where: str
    holder: Holder
    size_bytes: int


@dataclasses.dataclass(frozen=True)
class MemoryCurve:
    """Live bytes along a graph.

    Attributes:
        peak: The node that runs at the peak.
        at_peak: Bytes at the peak by their use.
        largest: The largest pieces at the peak.
        time_us: For each node, when compute reaches it.
        live_bytes: For each use of memory, bytes while each node runs.
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
        region: Number of the compiled region; more than 0 after graph breaks.
        flops: Floating-point operations of one rank.
        compute_us: Computing alone.
        communication_us: Time of the busiest link.
        exposed_us: How long compute stands still.
        collectives: In the order in which they start.
        spans: The compute lane.
        copies: Copies into collectives and out of them; casts are no copies.
        own: Collectives that the program has of its own (tensor parallelism), without messages.
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
    own: tuple[Collective, ...]
    derived: ClassVar = ("copied_bytes",)

    @property
    def sent(self) -> tuple[Collective, ...]:
        """All collectives and copies, the program's own last."""
        return (*self.collectives, *self.own)

    @property
    def copied_bytes(self) -> Mapping[Way, int]:
        """Bytes of all copies, by where they go; 0 where nothing is copied."""
        return {way: sum(copy.size_bytes for copy in self.copies if copy.way is way) for way in Way}


@dataclasses.dataclass(frozen=True)
class UnitPlan:
    """One unit.

    Attributes:
        parameters: Number of parameters.
        numel: Elements of all of them.
        stored: Dtypes in which shards are stored.
        sent: Dtypes in which parameters are gathered.
        reduced: Dtypes in which gradients are reduced; empty if all are frozen.
        full_bytes: Full parameters in their stored dtype.
        shard_bytes: Shards of one rank, padding included.
        padding_bytes: Padding in that: to whole rows on every rank, and to aligned offsets.
        host_bytes: Host memory of one rank for shards and, when training, their gradients; 0 if the unit is not
            offloaded.
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
    """Bytes that one rank sends in a step, by kind of collective.

    Attributes:
        full_sharding_bytes: What gathering every parameter twice and reducing its gradient once sends:
            `(2 b_p + b_g) P (N-1)/N`, and with replicas the least all-reduce of the shards in addition. A plan that
            keeps a unit, or does not gather what backward does not need, sends less.
    """

    sent_bytes: Mapping[Kind, float]
    full_sharding_bytes: float
    derived: ClassVar = ("total_bytes",)

    @property
    def total_bytes(self) -> float:
        """All kinds together."""
        return sum(self.sent_bytes.values())


@dataclasses.dataclass(frozen=True)
class Number(Quantity):
    """A number that times were estimated with, `what` of a device or of a link."""

    of: str
    what: str


@dataclasses.dataclass(frozen=True)
class Skipped:
    """Something that is not done, and why."""

    what: str
    why: str
