"""Settings of a unit, and the states of a parameter group: unsharded values, updates in backward, comparisons."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping

import torch
from torch.distributed.device_mesh import DeviceMesh

from fsdp_compile.comm.gather_extension import StartedGather
from fsdp_compile.comm.groups import RankStore
from fsdp_compile.comm.mesh import MeshPlacement
from fsdp_compile.config.policy import MixedPrecision, Offload
from fsdp_compile.errors import InvariantError
from fsdp_compile.layout.spec import Update


@dataclasses.dataclass(frozen=True)
class UnitPolicy:
    """How the parameters of a unit are stored, sent and reduced.

    Attributes:
        mixed_precision: Dtypes; `None` stands for the parameter's own.
        offload: Whether shards live on the host; `None` for the mesh's device.
    """

    mesh_placement: MeshPlacement
    mixed_precision: MixedPrecision
    offload: Offload | None = None

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of the unit."""
        return self.mesh_placement.mesh

    @property
    def size(self) -> int:
        """Ranks in the shard group."""
        return self.mesh_placement.size

    @property
    def rank(self) -> int:
        """This rank's place in the shard group."""
        return self.mesh_placement.rank


@dataclasses.dataclass
class CommSettings:
    """What the next forward and backward do with gradients and parameters; users change it between steps.

    Attributes:
        reduce_gradients: Whether gradients are summed over ranks at all.
        all_reduce: Whether they are summed over replicas.
        last_backward: Whether the next backward writes gradients to the parameters' `.grad`.
        divide: What the sum of gradients is divided by; `None` for the number of ranks.
        sum_only: Whether collectives may only sum, so that the division is a step of its own.
    """

    reduce_gradients: bool = True
    all_reduce: bool = True
    last_backward: bool = True
    reshard_after_backward: bool = True
    divide: float | None = None
    sum_only: bool = False


class WrapSource(enum.Enum):
    """Why a unit exists."""

    CALL = "call"
    """`fully_shard` was called on its root module, or a wrap policy named it."""
    SPLIT = "split"
    """The automatic split of a larger model made it."""


class ReduceGroup(enum.Enum):
    """Which process group reduce-scatters gradients; collectives of one group wait for each other."""

    SHARED = "shared"
    """The one of the all-gathers."""
    OWN = "own"
    """A second one of the same ranks."""


class ParamState(enum.Enum):
    """Which parameters the modules of a unit have registered."""

    SHARDED = "sharded"
    """DTensors, views of the unit's parameter groups."""
    UNSHARDED = "unsharded"
    """Plain, full parameters, inside of `full_params`."""


@dataclasses.dataclass(frozen=True)
class UnshardedParams:
    """Unsharded parameters by offset, and the version of the sharded ones that they were gathered from."""

    values: Mapping[int, torch.Tensor]
    version: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class PendingAllGather:
    """All-gathers of all parameters of a group that were started and not yet waited for.

    Attributes:
        messages: For each parameter, its message; of a quantized parameter its elements, then its scales.
        version: Of the sharded parameters when it was started.
        extended: Of parameters with all-gather extensions, in the place of `messages`.
    """

    messages: tuple[tuple[torch.Tensor, ...], ...]
    version: tuple[int, ...]
    extended: tuple[StartedGather, ...] = ()


class UnshardedState:
    """Whether the parameters of one group are gathered between calls: SHARDED -> GATHERING -> UNSHARDED -> SHARDED.

    Attributes:
        all_gather: The all-gather that is running: GATHERING.
        params: The unsharded parameters: UNSHARDED.
    """

    def __init__(self) -> None:
        self.all_gather: PendingAllGather | None = None
        self.params: UnshardedParams | None = None

    @property
    def is_sharded(self) -> bool:
        """Whether nothing is gathered or being gathered."""
        return self.all_gather is None and self.params is None

    def start(self, all_gather: PendingAllGather) -> None:
        """Enters GATHERING; outdated unsharded parameters are freed."""
        if self.all_gather is not None:
            raise InvariantError("an all-gather was started while another one of the same parameters runs")
        self.all_gather, self.params = all_gather, None

    def finish(self, params: UnshardedParams) -> None:
        """Enters UNSHARDED."""
        if self.all_gather is None:
            raise InvariantError("an all-gather was finished that was not started")
        self.all_gather, self.params = None, params

    def free(self) -> None:
        """Enters SHARDED."""
        if self.all_gather is not None:
            # The all-gather would write into memory that is used for something else by then.
            raise InvariantError("parameters were freed while their all-gather runs")
        self.params = None


@dataclasses.dataclass(frozen=True)
class ComparedAs:
    """How ranks compare what they gather and reduce of a parameter group (`runtime/read_order.py`).

    Attributes:
        shard: Where the ranks of the shard group meet; `None` for one rank.
        replicate: Where the replicas meet; `None` if there are none.
        numbers: Its number in each of the two: the same on all ranks that meet there, and of no other parameter group.
    """

    shard: RankStore | None
    replicate: RankStore | None
    numbers: Mapping[RankStore, int]


@dataclasses.dataclass
class UpdateState:
    """How far the update in backward of one parameter group is.

    Attributes:
        update: When it is updated, as in the specs of its parameters.
        open_forwards: Forwards that have read it and whose backward has not run; reads outside of compiled graphs count
            until the update.
        has_new_grads: Whether parameters got gradients since the last update.
        is_updated: Whether it was updated since the last forward.
        expects_late_grad: Whether code that read a parameter before it was sharded may still send it a gradient.
    """

    update: Update = Update.AFTER_BACKWARD
    open_forwards: int = 0
    has_new_grads: bool = False
    is_updated: bool = False
    expects_late_grad: bool = False
