"""A unit, its parameter groups and their parameters."""

from __future__ import annotations

import dataclasses
import functools
import math
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_compile._torch.autograd import backward_in_progress
from fsdp_compile._torch.tensors import ViewPlace, local_tensor, views_of
from fsdp_compile.comm.mesh import Arrangement
from fsdp_compile.config.policy import MixedPrecision, Offload
from fsdp_compile.layout.spec import ReadSpec, Reshard, Sync, Update
from fsdp_compile.ops.comm_hook import Registered
from fsdp_compile.runtime.group_state import Accumulation, HeldGradients, Holding, Origin, Progress, ReduceQueue

if TYPE_CHECKING:
    from fsdp_compile.runtime.group_state import KeptParameters, RunningGather

READS = "_fsdp_reads"
"""Attribute of a sharded module: parameter name to (flat shard's leaf, text of its `ReadSpec`, flat shard)."""
EVAL_READS = "_fsdp_eval_reads"
"""Attribute of a sharded module: parameter name to the text of the read that eval mode makes, where it is another."""
VARIANTS = "_fsdp_variants"
"""Attribute of a sharded module: parameter name to what its reads take besides (`variants.py`); absent by default."""
_layouts = [0]


def note_layout() -> None:
    """Says that what was remembered of modules is stale."""
    _layouts[0] += 1


def layouts() -> int:
    """How often anything was laid out, so that what is remembered of modules can be told stale."""
    return _layouts[0]


@dataclasses.dataclass(eq=False)
class ParameterSlot:
    """One managed parameter and its place.

    Attributes:
        name: Name of the parameter relative to its unit's root module.
        owners: Every (module, attribute) that holds it; more than one if it is tied.
        parameter: The DTensor parameter that users, optimizers and checkpoints see.
        spec: Where it lies and how it is gathered.
        rank: This rank's place in the shard group.
        local_shape: Shape of this rank's part, without padding; rows may be fewer than on other ranks, or none.
        local: The view of the flat shard that the DTensor holds.
        shell: The DTensor's own, empty storage; `parameter.data = ...` replaces it and leaves `local` behind.
        eval_spec: How it is gathered in eval mode, where that differs.
        kept_gradient_dtype: Dtype of its `.grad`, where that is not its own.
        position: Its place in the order of registration, among the parameters of its flat shard.
        is_read_before: Whether a graph from before it was sharded may send it a gradient.
    """

    name: str
    owners: list[tuple[nn.Module, str]]
    parameter: nn.Parameter
    spec: ReadSpec
    rank: int
    local_shape: tuple[int, ...]
    local: torch.Tensor
    shell: torch.UntypedStorage | None = None
    eval_spec: ReadSpec | None = None
    kept_gradient_dtype: torch.dtype | None = None
    position: int = 0
    is_read_before: bool = False

    @property
    def dtensor(self) -> DTensor:
        """The parameter, typed as what it also is."""
        assert isinstance(self.parameter, DTensor)
        return self.parameter

    def eval_read(self, attribute: str) -> dict[str, str]:
        """For a module that holds it as `attribute`: the text by which eval mode reads it, where that differs."""
        return {} if self.eval_spec is None else {attribute: self.eval_spec.text}

    def view_of(self, flat: torch.Tensor) -> torch.Tensor:
        """This parameter's part of a contiguous tensor, without a history, that is laid out like its flat shard."""
        return views_of(flat, [self.place])[0]

    @functools.cached_property
    def place(self) -> ViewPlace:
        """Where in a contiguous tensor that is laid out like its flat shard this parameter's part is."""
        strides = tuple(math.prod(self.local_shape[dim + 1 :]) for dim in range(len(self.local_shape)))
        return self.local_shape, strides, self.spec.offset


class FlatShard:
    """The parameters of one unit that share a dtype and trainability, in one 1-D buffer per rank.

    Attributes:
        leaf: The buffer, `[numel]`, the same size on every rank. Reads gather from it, autograd accumulates into it.
        slots: The parameters in it, by offset.
        arrived: Offsets of the slots that got a gradient in the backward pass `noted_in`, by how far it is summed.
        noted_in: Which backward pass that was.
        undelivered: Offsets of the slots whose gradients wait in `leaf.grad` for the last backward pass.
        held: Full gradients that wait for their reduction.
        partial: Reduced gradients that wait for their sum over replicas.
        holders: The leaves that gradients go to which are not summed over all ranks, by how far they are.
        kept: The full parameters, by offset, while they stay gathered between calls.
        arriving: An all-gather of them that is still running.
        progress: How far an update in backward is.
        unit: The unit that it belongs to.
    """

    _by_address: ClassVar[weakref.WeakValueDictionary[int, FlatShard]] = weakref.WeakValueDictionary()

    def __init__(self, unit: Unit, leaf: nn.Parameter, slots: Iterable[ParameterSlot]) -> None:
        self.unit = unit
        self.leaf = leaf
        self.slots = tuple(slots)
        self.arrived: dict[Sync, set[int]] = {}
        self.noted_in = -1
        self.undelivered: set[int] = set()
        specs = [slot.spec for slot in self.slots]
        self.held = HeldGradients(specs, specs[0].size if specs else 1)
        self.partial = HeldGradients(specs, 1)
        self.kept: KeptParameters | None = None
        self.arriving: RunningGather | None = None
        self.holders: dict[Sync, torch.Tensor] = {}
        self.progress = Progress()
        if leaf.device.type != "meta":
            FlatShard._by_address[leaf.data_ptr()] = self

    @staticmethod
    def of(leaf: torch.Tensor) -> FlatShard | None:
        """The flat shard whose buffer a tensor is, by address: compiled code sees the buffer under other identities."""
        if type(leaf) not in (torch.Tensor, nn.Parameter) or leaf.is_meta:
            return None
        found = FlatShard._by_address.get(leaf.data_ptr())
        return found if found is not None and found.leaf.numel() == leaf.numel() else None

    @staticmethod
    def alive() -> list[FlatShard]:
        """Every flat shard of this process that is on a device."""
        return list(dict.fromkeys(FlatShard._by_address.values()))

    def note_gradients(self, offsets: Iterable[int], sync: Sync) -> None:
        """Notes which slots the gradient that is about to be accumulated covers; the others get none."""
        backward = backward_in_progress()
        if self.noted_in != backward:
            # `torch.autograd.grad` with respect to inputs makes gradients that are never accumulated: forget them.
            self.arrived, self.noted_in = {sync: set(offsets)}, backward
        else:
            self.arrived.setdefault(sync, set()).update(offsets)

    def noted_gradients(self, sync: Sync) -> set[int]:
        """What `note_gradients` was told since this was asked last.

        All slots if that was nothing: saved-tensor hooks gave backward a copy of the buffer, whose owner is unknown.
        Then zeros stand for "no gradient".
        """
        return self.arrived.pop(sync, None) or {slot.spec.offset for slot in self.slots}

    def slots_at(self, offsets: Collection[int]) -> Sequence[ParameterSlot]:
        """The slots that lie at `offsets`, which are mostly all."""
        if len(offsets) == len(self.slots):
            return self.slots
        return [slot for slot in self.slots if slot.spec.offset in offsets]

    @property
    def owes_gradients(self) -> bool:
        """Whether there are gradients that have not reached the parameters."""
        return self.held.owes or self.partial.owes or self.progress.is_due or self.leaf.grad is not None

    @property
    def is_settled(self) -> bool:
        """Whether it has nothing of earlier passes, and the next ones do nothing out of the ordinary for it."""
        accumulation, progress = self.unit.accumulation, self.progress
        is_updated_alone = progress.update is Update.IN_BACKWARD or progress.is_done
        is_kept = self.kept is not None or self.arriving is not None or self.unit.keeps_parameters
        return accumulation.last_backward and not (is_updated_alone or is_kept or self.owes_gradients)

    def is_broken(self) -> bool:
        """Whether some parameter is no longer its view of this buffer: replaced, converted, moved, frozen, thawed.

        Looks at identities alone, since it runs once per parameter at every step.
        """
        trainable = self.leaf.requires_grad
        for slot in self.slots:
            parameter = slot.parameter
            if local_tensor(parameter) is not slot.local or parameter.requires_grad is not trainable:  # type: ignore[arg-type]
                return True
            if parameter.untyped_storage() is not slot.shell:
                return True
            for module, attribute in slot.owners:
                if module._parameters.get(attribute) is not parameter:
                    return True
        return False


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
