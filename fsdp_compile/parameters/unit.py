"""A unit: the parameters that are gathered together, reduced together and freed together."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_compile.parameters.flat import FlatShard, ParameterSlot
from fsdp_compile.parameters.hooks import Registered
from fsdp_compile.parameters.offload import Offload
from fsdp_compile.parameters.precision import MixedPrecision
from fsdp_compile.parameters.spec import Reshard, Sync
from fsdp_compile.parameters.strategy import Arrangement


@dataclasses.dataclass(frozen=True)
class UnitPolicy:
    """How the parameters of a unit are stored, sent and reduced.

    Attributes:
        arrangement: Over which ranks, and what is kept for backward.
        mixed_precision: Dtypes; `None` in it keeps the parameter's own.
        offload: Whether shards live on the host; `None` keeps them on the mesh's device.
    """

    arrangement: Arrangement
    mixed_precision: MixedPrecision
    offload: Offload | None = None

    @property
    def mesh(self) -> DeviceMesh:
        """The ranks."""
        return self.arrangement.mesh

    @property
    def size(self) -> int:
        """Ranks in the shard group."""
        return self.arrangement.size

    @property
    def rank(self) -> int:
        """This rank's place in the shard group."""
        return self.arrangement.rank


@dataclasses.dataclass
class Accumulation:
    """What the next forward and backward passes do with gradients and parameters; users change it between steps.

    Attributes:
        reduce_gradients: Whether gradients are summed over ranks at all.
        all_reduce: Whether they are summed over replicas.
        last_backward: Whether the next backward hands gradients over to the parameters.
        reshard_after_backward: Whether gathered parameters are freed after backward.
        divide: What the sum of gradients is divided by; `None` for the number of ranks.
        sum_only: Whether collectives may only sum, so that the division is a step of its own.
    """

    reduce_gradients: bool = True
    all_reduce: bool = True
    last_backward: bool = True
    reshard_after_backward: bool = True
    divide: float | None = None
    sum_only: bool = False


class Origin(enum.Enum):
    """Why a unit exists."""

    CALL = "call"
    """A person chose it: `fully_shard` was called on its root module, or a wrap policy named it."""
    SPLIT = "split"
    """The automatic split of a larger model made it."""


class ReduceQueue(enum.Enum):
    """Which process group reduce-scatters gradients; collectives of one group wait for each other."""

    SHARED = "shared"
    """The one that gathers parameters."""
    OWN = "own"
    """A second one of the same ranks."""


class Holding(enum.Enum):
    """What the modules of a unit hold."""

    SHARDS = "shards"
    """DTensors, views of the unit's flat shards."""
    FULL = "full"
    """Plain, full parameters, inside of `full_params`."""


@dataclasses.dataclass(eq=False)
class Unit:
    """One unit and its flat shards.

    Attributes:
        root: The module that the unit is named after.
        name: Fully qualified name of `root` in the outermost sharded module; empty for that module itself.
        policy: How its parameters are stored, sent and reduced.
        origin: Why it exists.
        flats: One flat shard per dtype and trainability.
        holding: What its modules hold at the moment.
        accumulation: What happens to gradients and gathered parameters between steps.
        outermost: The outermost sharded module that it is part of.
        of_model: All units of that module, as they stand there.
        hook: A reduction of the user's.
        reduce_queue: Which process group reduces its gradients.
        forward_prefetch: Units whose gathers start where this one is used first in forward.
        backward_prefetch: The same in backward.
    """

    root: nn.Module
    name: str
    policy: UnitPolicy
    origin: Origin
    flats: list[FlatShard] = dataclasses.field(default_factory=list)
    holding: Holding = Holding.SHARDS
    hook: Registered | None = None
    accumulation: Accumulation = dataclasses.field(default_factory=Accumulation)
    outermost: nn.Module | None = None
    of_model: tuple[Unit, ...] = ()
    reduce_queue: ReduceQueue = ReduceQueue.SHARED
    forward_prefetch: tuple[Unit, ...] = ()
    backward_prefetch: tuple[Unit, ...] = ()

    def __post_init__(self) -> None:
        self.outermost = self.outermost or self.root
        self.of_model = self.of_model or (self,)

    @property
    def sync(self) -> Sync:
        """Over which ranks its gradients are summed now."""
        if not self.accumulation.reduce_gradients:
            return Sync.NONE
        has_replicas = self.policy.mesh.ndim == 2 and self.policy.mesh.size(0) > 1
        return Sync.SHARD if has_replicas and not self.accumulation.all_reduce else Sync.ALL

    @property
    def divide(self) -> float | None:
        """What sums of gradients are divided by, where collectives do not average by themselves."""
        if self.accumulation.divide is None and self.accumulation.sum_only:
            return float(self.policy.mesh.size())
        return self.accumulation.divide

    @property
    def keeps_parameters(self) -> bool:
        """Whether gathered parameters outlive backward: on request, and between microbatches as FSDP1's ZeRO-2 does."""
        keeps_for_backward = self.policy.arrangement.reshard is Reshard.AFTER_BACKWARD
        return not self.accumulation.reshard_after_backward or (keeps_for_backward and self.sync is Sync.NONE)

    @property
    def slots(self) -> Iterator[ParameterSlot]:
        """All parameters of the unit."""
        return (slot for flat in self.flats for slot in flat.slots)

    @property
    def title(self) -> str:
        """Name for people: never empty."""
        return self.name or "(root)"

    def parameter_name(self, slot: ParameterSlot) -> str:
        """Fully qualified name of a parameter in the outermost sharded module."""
        return f"{self.name}.{slot.name}" if self.name else slot.name

    @property
    def shard_bytes(self) -> int:
        """Bytes that this rank holds of the unit's parameters, padding included."""
        return sum(flat.leaf.numel() * flat.leaf.element_size() for flat in self.flats)

    @property
    def full_bytes(self) -> int:
        """Bytes of the unit's full parameters in their stored dtype."""
        return sum(slot.parameter.numel() * slot.parameter.element_size() for slot in self.slots)


def titles(units: Iterable[Unit]) -> tuple[str, ...]:
    """Their names for people."""
    return tuple(unit.title for unit in units)


def device_of(unit: Unit) -> torch.device:
    """Where the unit's flat shards live."""
    return unit.flats[0].leaf.device
