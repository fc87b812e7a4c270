"""A unit, its parameter groups and their parameters."""

from __future__ import annotations

import dataclasses
import functools
import math
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_compile._torch.autograd import backward_in_progress
from fsdp_compile._torch.tensors import ViewPlace, local_tensor, views_of
from fsdp_compile.comm.mesh import MeshPlacement
from fsdp_compile.config.policy import MixedPrecision, Offload
from fsdp_compile.layout.spec import GradPlacement, Reshard, UnshardSpec, Update
from fsdp_compile.ops.comm_hook import Registered
from fsdp_compile.runtime.group_state import (
    CommSettings,
    ParamState,
    PendingGrads,
    ReduceGroup,
    UpdateState,
    WrapSource,
)

if TYPE_CHECKING:
    from fsdp_compile.runtime.group_state import PendingAllGather, UnshardedParams

READS = "_fsdp_reads"
"""Attribute of a sharded module: parameter name to (flat parameter, text of its `UnshardSpec`, parameter group)."""
EVAL_READS = "_fsdp_eval_reads"
"""Attribute of a sharded module: parameter name to the text of the read that eval mode makes, where it is another."""
UNSHARD_ARGS = "_fsdp_variants"
"""Attribute of a sharded module: parameter name to what its reads take besides (`variants.py`); absent by default."""
_layouts = [0]


def note_layout() -> None:
    """Says that what was remembered of modules is stale."""
    _layouts[0] += 1


def layouts() -> int:
    """How often anything was laid out, so that what is remembered of modules can be told stale."""
    return _layouts[0]


@dataclasses.dataclass(eq=False)
class FSDPParam:
    """One managed parameter and its place.

    Attributes:
        name: Name of the parameter relative to its unit's root module.
        module_refs: Every (module, attribute) that holds it; more than one if it is tied.
        parameter: The DTensor parameter that users, optimizers and checkpoints see.
        spec: Where it lies and how it is gathered.
        rank: This rank's place in the shard group.
        sharded_size: Shape of this rank's part, without padding; rows may be fewer than on other ranks, or none.
        sharded_view: The view of the flat parameter that the DTensor holds.
        dtensor_storage: The DTensor's own, empty storage; `parameter.data = ...` replaces it and leaves `sharded_view`
            behind.
        eval_spec: How it is gathered in eval mode, where that differs.
        grad_dtype: Dtype of its `.grad`, where that is not its own.
        position: Its place in the order of registration, among the parameters of its parameter group.
        is_read_before: Whether a graph from before it was sharded may send it a gradient.
    """

    name: str
    module_refs: list[tuple[nn.Module, str]]
    parameter: nn.Parameter
    spec: UnshardSpec
    rank: int
    sharded_size: tuple[int, ...]
    sharded_view: torch.Tensor
    dtensor_storage: torch.UntypedStorage | None = None
    eval_spec: UnshardSpec | None = None
    grad_dtype: torch.dtype | None = None
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

    def view_of(self, group: torch.Tensor) -> torch.Tensor:
        """This parameter's part of a contiguous tensor, without a history, that is laid out like its flat parameter."""
        return views_of(group, [self.place])[0]

    @functools.cached_property
    def place(self) -> ViewPlace:
        """Where in a contiguous tensor that is laid out like its flat parameter this parameter's part is."""
        strides = tuple(math.prod(self.sharded_size[dim + 1 :]) for dim in range(len(self.sharded_size)))
        return self.sharded_size, strides, self.spec.offset


class FSDPParamGroup:
    """The parameters of one unit that share a dtype and trainability, in one 1-D buffer per rank.

    Attributes:
        flat_param: The buffer, `[numel]`, the same size on every rank. Reads gather from it, autograd accumulates into
            it.
        parameters: The parameters in it, by offset.
        produced: Offsets of the parameters with a gradient of the backward pass `produced_in_backward`, by how far it is
            summed.
        produced_in_backward: Which backward pass that was.
        unwritten: Offsets of the parameters whose gradients wait in `flat_param.grad` for the last backward pass.
        unsharded_accumulated_grad: Full gradients that wait for their reduction.
        partial_reduce_output: Reduced gradients that wait for their sum over replicas.
        grad_accumulators: The leaves that gradients go to which are not summed over all ranks, by how far they are.
        unsharded_params: The full parameters, by offset, while they stay gathered between calls.
        all_gather: An all-gather of them that is still running.
        update_state: How far an update in backward is.
        unit: The unit that it belongs to.
    """

    _by_address: ClassVar[weakref.WeakValueDictionary[int, FSDPParamGroup]] = weakref.WeakValueDictionary()

    def __init__(self, unit: FSDPUnit, leaf: nn.Parameter, slots: Iterable[FSDPParam]) -> None:
        self.unit = unit
        self.flat_param = leaf
        self.params = tuple(slots)
        self.produced: dict[GradPlacement, set[int]] = {}
        self.produced_in_backward = -1
        self.unwritten: set[int] = set()
        specs = [param.spec for param in self.params]
        self.unsharded_accumulated_grad = PendingGrads(specs, specs[0].size if specs else 1)
        self.partial_reduce_output = PendingGrads(specs, 1)
        self.unsharded_params: UnshardedParams | None = None
        self.all_gather: PendingAllGather | None = None
        self.grad_accumulators: dict[GradPlacement, torch.Tensor] = {}
        self.update_state = UpdateState()
        if leaf.device.type != "meta":
            FSDPParamGroup._by_address[leaf.data_ptr()] = self

    @staticmethod
    def of(leaf: torch.Tensor) -> FSDPParamGroup | None:
        """The parameter group whose buffer a tensor is, by address: compiled code sees it under other identities."""
        if type(leaf) not in (torch.Tensor, nn.Parameter) or leaf.is_meta:
            return None
        found = FSDPParamGroup._by_address.get(leaf.data_ptr())
        return found if found is not None and found.flat_param.numel() == leaf.numel() else None

    @staticmethod
    def alive() -> list[FSDPParamGroup]:
        """Every parameter group of this process that is on a device."""
        return list(dict.fromkeys(FSDPParamGroup._by_address.values()))

    def mark_produced(self, offsets: Iterable[int], placement: GradPlacement) -> None:
        """Notes which parameters the gradient that is about to be accumulated covers; the others get none."""
        backward = backward_in_progress()
        if self.produced_in_backward != backward:
            # `torch.autograd.grad` with respect to inputs makes gradients that are never accumulated: forget them.
            self.produced, self.produced_in_backward = {placement: set(offsets)}, backward
        else:
            self.produced.setdefault(placement, set()).update(offsets)

    def take_produced(self, placement: GradPlacement) -> set[int]:
        """What `mark_produced` was told since this was asked last.

        All parameters if that was nothing: saved-tensor hooks gave backward a copy of the buffer, of an unknown group.
        Then zeros stand for "no gradient".
        """
        return self.produced.pop(placement, None) or {param.spec.offset for param in self.params}

    def params_at(self, offsets: Collection[int]) -> Sequence[FSDPParam]:
        """The parameters that lie at `offsets`, which are mostly all."""
        if len(offsets) == len(self.params):
            return self.params
        return [param for param in self.params if param.spec.offset in offsets]

    @property
    def has_pending_grads(self) -> bool:
        """Whether there are gradients that have not reached the parameters."""
        return (
            self.unsharded_accumulated_grad.is_pending
            or self.partial_reduce_output.is_pending
            or self.update_state.has_new_grads
            or self.flat_param.grad is not None
        )

    @property
    def is_idle(self) -> bool:
        """Whether it has nothing of earlier passes, and the next ones do nothing out of the ordinary for it."""
        accumulation, progress = self.unit.comm_settings, self.update_state
        is_updated_alone = progress.update is Update.IN_BACKWARD or progress.is_updated
        is_kept = self.unsharded_params is not None or self.all_gather is not None or self.unit.stays_unsharded
        return accumulation.last_backward and not (is_updated_alone or is_kept or self.has_pending_grads)

    def is_broken(self) -> bool:
        """Whether some parameter is no longer its view of this buffer: replaced, converted, moved, frozen, thawed.

        Looks at identities alone, since it runs once per parameter at every step.
        """
        trainable = self.flat_param.requires_grad
        for param in self.params:
            parameter = param.parameter
            if local_tensor(parameter) is not param.sharded_view or parameter.requires_grad is not trainable:  # type: ignore[arg-type]
                return True
            if parameter.untyped_storage() is not param.dtensor_storage:
                return True
            for module, attribute in param.module_refs:
                if module._parameters.get(attribute) is not parameter:
                    return True
        return False


@dataclasses.dataclass(frozen=True)
class UnitPolicy:
    """How the parameters of a unit are stored, sent and reduced.

    Attributes:
        mesh_placement: Over which ranks, and what is kept for backward.
        mixed_precision: Dtypes; `None` in it keeps the parameter's own.
        offload: Whether shards live on the host; `None` keeps them on the mesh's device.
    """

    mesh_placement: MeshPlacement
    mixed_precision: MixedPrecision
    offload: Offload | None = None

    @property
    def mesh(self) -> DeviceMesh:
        """The ranks."""
        return self.mesh_placement.mesh

    @property
    def size(self) -> int:
        """Ranks in the shard group."""
        return self.mesh_placement.size

    @property
    def rank(self) -> int:
        """This rank's place in the shard group."""
        return self.mesh_placement.rank


@dataclasses.dataclass(eq=False)
class FSDPUnit:
    """One unit and its parameter groups.

    Attributes:
        root: The module that the unit is named after.
        name: Fully qualified name of `root` in the outermost sharded module; empty for that module itself.
        policy: How its parameters are stored, sent and reduced.
        wrap_source: Why it exists.
        groups: One parameter group per dtype and trainability.
        param_state: What its modules hold at the moment.
        comm_settings: What happens to gradients and gathered parameters between steps.
        outermost: The outermost sharded module that it is part of.
        of_model: All units of that module, as they stand there.
        hook: A reduction of the user's.
        reduce_group: Which process group reduces its gradients.
        forward_prefetch: Units whose gathers start where this one is used first in forward.
        backward_prefetch: The same in backward.
        sharded_by_backend: Whether a compile made it, with the options of that compile.
        compiled_regions: What compiled graphs of it hold, by the parameter groups that they read; `lower` fills it.
    """

    root: nn.Module
    name: str
    policy: UnitPolicy
    wrap_source: WrapSource
    param_groups: list[FSDPParamGroup] = dataclasses.field(default_factory=list)
    param_state: ParamState = ParamState.SHARDED
    hook: Registered | None = None
    comm_settings: CommSettings = dataclasses.field(default_factory=CommSettings)
    outermost: nn.Module | None = None
    of_model: tuple[FSDPUnit, ...] = ()
    reduce_group: ReduceGroup = ReduceGroup.SHARED
    forward_prefetch: tuple[FSDPUnit, ...] = ()
    backward_prefetch: tuple[FSDPUnit, ...] = ()
    sharded_by_backend: bool = False
    compiled_regions: dict[tuple[int, ...], Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.outermost = self.outermost or self.root
        self.of_model = self.of_model or (self,)

    @property
    def grad_placement(self) -> GradPlacement:
        """Over which ranks its gradients are summed now."""
        if not self.comm_settings.reduce_gradients:
            return GradPlacement.UNREDUCED
        has_replicas = self.policy.mesh.ndim == 2 and self.policy.mesh.size(0) > 1
        return (
            GradPlacement.REDUCE_SCATTERED
            if has_replicas and not self.comm_settings.all_reduce
            else GradPlacement.REDUCED
        )

    @property
    def divide(self) -> float | None:
        """What sums of gradients are divided by, where collectives do not average by themselves."""
        if self.comm_settings.divide is None and self.comm_settings.sum_only:
            return float(self.policy.mesh.size())
        return self.comm_settings.divide

    @property
    def stays_unsharded(self) -> bool:
        """Whether gathered parameters outlive backward: on request, and between microbatches as FSDP1's ZeRO-2 does."""
        keeps_for_backward = self.policy.mesh_placement.reshard is Reshard.AFTER_BACKWARD
        return not self.comm_settings.reshard_after_backward or (
            keeps_for_backward and self.grad_placement is GradPlacement.UNREDUCED
        )

    @property
    def params(self) -> Iterator[FSDPParam]:
        """All parameters of the unit."""
        return (param for group in self.param_groups for param in group.params)

    @property
    def title(self) -> str:
        """Name for people: never empty."""
        return self.name or "(root)"

    def parameter_name(self, param: FSDPParam) -> str:
        """Fully qualified name of a parameter in the outermost sharded module."""
        return f"{self.name}.{param.name}" if self.name else param.name

    @property
    def shard_bytes(self) -> int:
        """Bytes that this rank holds of the unit's parameters, padding included."""
        return sum(group.flat_param.numel() * group.flat_param.element_size() for group in self.param_groups)

    @property
    def full_bytes(self) -> int:
        """Bytes of the unit's full parameters in their stored dtype."""
        return sum(param.parameter.numel() * param.parameter.element_size() for param in self.params)


def titles(units: Iterable[FSDPUnit]) -> tuple[str, ...]:
    """Their names for people."""
    return tuple(unit.title for unit in units)


def device_of(unit: FSDPUnit) -> torch.device:
    """Where the unit's parameter groups live."""
    return unit.param_groups[0].flat_param.device
