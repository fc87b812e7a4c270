"""A default process group of any size in one process, on a network that takes time.

    with emulated_world(8, Network(Link(bytes_per_s=1e9, latency_s=50e-6))) as world:
        ...                        # FSDP2, FSDP1, DDP, functional collectives
        world.traffic.total_bytes  # what this rank has sent

This process is rank 0. Collectives end after latency and bytes over bandwidth, by the ring algorithms' volumes, while
the process computes. Outputs are what they would be if every other rank had brought the same (`outputs.py`), so that
training runs on sensible numbers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks._torch import fake_store
from benchmarks.network import outputs
from benchmarks.network.carrier import Carrier, CpuCarrier, CudaCarrier, Fill
from benchmarks.network.clock import Clock, WallClock
from benchmarks.network.traffic import Kind, Traffic, sent_bytes
from benchmarks.network.wire import Link, Wire

BACKEND = "emulated"


class Lanes(enum.Enum):
    """Which collectives queue behind each other."""

    ONE = "one"
    """All that use one link."""
    PER_GROUP = "per_group"
    """Those of one process group; groups that send at the same moment share the bandwidth."""


@dataclasses.dataclass(frozen=True)
class Network:
    """Links of each rank.

    Attributes:
        link: Used by groups that leave a node, and by all if `node` is not given.
        node: Used by groups whose ranks all are in one node.
        ranks_per_node: Size of a node, where `node` is given.
        lanes: Which collectives queue behind each other.
    """

    link: Link
    node: Link | None = None
    ranks_per_node: int = 8
    lanes: Lanes = Lanes.PER_GROUP


class World:
    """The emulated network of this process.

    Attributes:
        traffic: What has been sent since the start or the last `reset()`.
    """

    def __init__(self, network: Network, device: torch.device, clock: Clock) -> None:
        self.network = network
        self.traffic = Traffic()
        self._carrier: Carrier = CudaCarrier(device) if device.type == "cuda" else CpuCarrier(clock, self.traffic)
        self._fabric = Wire(network.link)
        self._node = Wire(network.node) if network.node else self._fabric

    def reset(self) -> None:
        """Forgets what was sent."""
        self.traffic.clear()

    def change(self, link: Link, node: Link | None = None) -> None:
        """Gives the network another link, between steps: nothing may be under way.

        Args:
            link: As in `Network`.
            node: The same; `None` leaves what is there.

        Raises:
            ValueError: If `node` is given and all groups of this network use one link.
        """
        if node is not None and self.network.node is None:
            raise ValueError("the network was made without a link inside of nodes: Network(link, node=...)")
        self.network = dataclasses.replace(self.network, link=link, node=node or self.network.node)
        self._fabric.link = link
        if node is not None:
            self._node.link = node

    def start(
        self,
        group: EmulatedGroup,
        kind: Kind,
        size_bytes: int,
        fill: Fill,
        outputs: list[torch.Tensor],
    ) -> dist.Work:
        """Begins a collective of `size_bytes` in all."""
        sent = sent_bytes(kind, size_bytes, group.size())
        nodes = {rank // self.network.ranks_per_node for rank in group.ranks}
        inside = self.network.node is not None and len(nodes) == 1
        self.traffic.note(kind, sent, in_node=inside)
        lane = group.group_name if self.network.lanes is Lanes.PER_GROUP else ""
        return self._carrier.start(self._node if inside else self._fabric, lane, sent, fill, outputs)

    def close(self) -> None:
        """Ends threads."""
        self._carrier.close()


class EmulatedGroup(dist.ProcessGroup):
    """A process group whose other ranks do not exist."""

    def __init__(self, world: World, rank: int, ranks: Sequence[int]) -> None:
        super().__init__(rank, len(ranks))
        self.ranks = tuple(ranks)
        self._world = world
        self._name = ""

    # Torch asks Python groups for these, and does not let them keep what it sets.

    @property
    def group_name(self) -> str:
        """The name that torch gave."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def getBackendName(self) -> str:  # noqa: N802
        """Name of the backend."""
        return BACKEND

    # Gathers

    def all_gather_single(self, output: torch.Tensor, own: torch.Tensor, opts: Any = None) -> dist.Work:  # noqa: ARG002
        """Gathers one tensor."""
        return self._gather([output], [own])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self,
        gathered: list[torch.Tensor],
        own: list[torch.Tensor],
        opts: Any = None,  # noqa: ARG002
    ) -> dist.Work:
        """Gathers several tensors in one call."""
        return self._gather(gathered, own)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather(
        self,
        gathered: list[list[torch.Tensor]],
        own: list[torch.Tensor],
        opts: Any = None,  # noqa: ARG002
    ) -> dist.Work:
        """Gathers into a list of tensors."""

        def fill() -> None:
            for places, tensor in zip(gathered, own, strict=True):
                for place in places:
                    place.copy_(tensor.detach())

        flat = [place for places in gathered for place in places]
        return self._start(Kind.ALL_GATHER, outputs.total_bytes(flat), fill, flat)

    def _gather(self, gathered: list[torch.Tensor], own: list[torch.Tensor]) -> dist.Work:
        def fill() -> None:
            for output, tensor in zip(gathered, own, strict=True):
                outputs.gather(output, tensor)

        return self._start(Kind.ALL_GATHER, outputs.total_bytes(gathered), fill, gathered)

    # Reductions

    def reduce_scatter_single(self, output: torch.Tensor, own: torch.Tensor, opts: Any) -> dist.Work:
        """Reduces one tensor and keeps this rank's part."""
        return self._reduce_scatter([output], [own], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, reduced: list[torch.Tensor], own: list[torch.Tensor], opts: Any
    ) -> dist.Work:
        """Reduces several tensors in one call."""
        return self._reduce_scatter(reduced, own, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter(self, reduced: list[torch.Tensor], own: list[list[torch.Tensor]], opts: Any) -> dist.Work:
        """Reduces a list of tensors, one for each rank."""
        factor = outputs.scale(opts.reduceOp, self.size())

        def fill() -> None:
            for output, parts in zip(reduced, own, strict=True):
                outputs.reduce_into(output, parts[self.rank()], factor)

        size_bytes = outputs.total_bytes([tensor for parts in own for tensor in parts])
        return self._start(Kind.REDUCE_SCATTER, size_bytes, fill, reduced)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        """Reduces in place."""
        factor = outputs.scale(opts.reduceOp, self.size())

        def fill() -> None:
            for tensor in tensors:
                outputs.reduce_into(tensor, tensor, factor)

        return self._start(Kind.ALL_REDUCE, outputs.total_bytes(tensors), fill, tensors)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        """Reduces several tensors in place."""
        return self.allreduce(tensors, opts)

    def _reduce_scatter(self, reduced: list[torch.Tensor], own: list[torch.Tensor], opts: Any) -> dist.Work:
        factor = outputs.scale(opts.reduceOp, self.size())

        def fill() -> None:
            for output, tensor in zip(reduced, own, strict=True):
                outputs.reduce_into(output, outputs.part(tensor, self.rank(), self.size()), factor)

        return self._start(Kind.REDUCE_SCATTER, outputs.total_bytes(own), fill, reduced)

    # Others

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:  # noqa: ARG002
        """Leaves what is there, which the root has too."""
        return self._start(Kind.BROADCAST, outputs.total_bytes(tensors), _nothing, tensors)

    def scatter(self, scattered: list[torch.Tensor], own: list[list[torch.Tensor]], opts: Any = None) -> dist.Work:  # noqa: ARG002
        """Takes this rank's tensor of the root's list."""

        def fill() -> None:
            for output, parts in zip(scattered, own, strict=False):  # only the root has parts
                output.copy_(parts[self.rank()])

        return self._start(Kind.SCATTER, outputs.total_bytes(scattered) * self.size(), fill, scattered)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        own: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,  # noqa: ARG002
    ) -> dist.Work:
        """Exchanges parts, of equal size if no sizes are given."""
        received = output_splits or [len(output) // self.size()] * self.size()
        sent = input_splits or [len(own) // self.size()] * self.size()

        def fill() -> None:
            outputs.exchange(output, own, received, sent, self.rank())

        return self._start(Kind.ALL_TO_ALL, outputs.total_bytes([own]), fill, [output])

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> dist.Work:  # noqa: ARG002
        """Costs the latency."""
        return self._start(Kind.BARRIER, 0, _nothing, [])

    def _start(self, kind: Kind, size_bytes: int, fill: Fill, results: list[torch.Tensor]) -> dist.Work:
        return self._world.start(self, kind, size_bytes, fill, results)


@contextlib.contextmanager
def emulated_world(
    ranks: int, network: Network, *, device: str | torch.device = "cpu", clock: Clock | None = None
) -> Iterator[World]:
    """Be rank 0 of an emulated default group.

    Args:
        ranks: Size of the group.
        network: How fast it is.
        device: Where tensors are; "cuda" uses a stream.
        clock: A `VirtualClock` for time that stands still while this process computes; CPU only.

    Yields:
        The network, with the count of what is sent.
    """
    world = World(network, torch.device(device), clock or WallClock())
    # Registered anew each time: groups belong to the world that is there when torch makes them.
    dist.Backend.register_backend(
        BACKEND, lambda opts, _: _make(world, opts), extended_api=True, devices=["cpu", "cuda"]
    )
    dist.init_process_group(BACKEND, store=fake_store(), rank=0, world_size=ranks)
    try:
        yield world
    finally:
        dist.destroy_process_group()
        world.close()


def _make(world: World, opts: Any) -> EmulatedGroup:
    ranks = list(opts.global_ranks_in_group) or list(range(opts.group_size))
    return EmulatedGroup(world, opts.group_rank, ranks)


def _nothing() -> None:
    pass
