"""Units, their parameter groups, and the model that they are parts of.

    module -> ModuleState -> ModelState -> FSDPUnit -> FSDPParamGroup -> FSDPParam -> nn.Parameter

References the other way are weak, so that `del model` frees its memory at once.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compile._torch.tensors import ViewPlace, local_tensor
from fsdp_compile.comm.gather_extension import GatherExtension, is_extended
from fsdp_compile.comm.groups import RankStore
from fsdp_compile.comm.tensor_parallel import TensorParallel
from fsdp_compile.layout.flat_layout import local_part
from fsdp_compile.layout.spec import GradPlacement, Reshard, UnshardSpec, Update
from fsdp_compile.ops.comm_hook import Registered
from fsdp_compile.runtime.grad_state import GradState
from fsdp_compile.runtime.group_state import (
    CommSettings,
    ComparedAs,
    ParamState,
    ReduceGroup,
    UnitPolicy,
    UnshardedState,
    UpdateState,
    WrapSource,
)
from fsdp_compile.runtime.module_refs import IgnoredParams, ModuleRefs


@dataclasses.dataclass(eq=False)
class FSDPParam:
    """One sharded parameter, and its place in its group's flat parameter.

    Attributes:
        name: Relative to its unit's root module.
        module_refs: More than one if it is tied.
        parameter: The DTensor parameter that users, optimizers and checkpoints see.
        spec: Where it lies and how it is gathered.
        rank: This rank's place in the shard group.
        sharded_size: Shape of this rank's part, without padding; rows may be fewer than on other ranks, or none.
        sharded_view: The view of the flat parameter that is the DTensor's local tensor.
        dtensor_storage: The DTensor's own, empty storage, which `parameter.data = ...` replaces.
        eval_spec: How it is gathered in eval mode, where that differs.
        grad_dtype: Dtype of its `.grad`, where that is not its own.
        position: Its place in the order of registration, among the parameters of its group.
        is_read_before: Whether a graph from before it was sharded may send it a gradient.
        tensor_parallel: How it was laid out as a DTensor before it was sharded; the spec's shape is this rank's part's.
        extension: How it is gathered, if its class says that; `sharded_view` is a tensor with memory of its own then.
    """

    name: str
    module_refs: ModuleRefs
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
    tensor_parallel: TensorParallel | None = None
    extension: GatherExtension | None = None

    @property
    def dtensor(self) -> DTensor:
        """The parameter as a `DTensor`, for type checkers."""
        assert isinstance(self.parameter, DTensor)
        return self.parameter

    def own_part(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a plain tensor of the parameter's shape that every rank has; a view where it can be."""
        part = whole if self.tensor_parallel is None else self.tensor_parallel.own_part(whole)
        return local_part(part, self.spec.dim, self.spec.size, self.rank)

    def eval_read(self, attribute: str) -> dict[str, str]:
        """For a module that has it as `attribute`: the text by which eval mode reads it, where that differs."""
        return {} if self.eval_spec is None else {attribute: self.eval_spec.text}

    @functools.cached_property
    def place(self) -> ViewPlace:
        """Its place in a contiguous tensor that is laid out like the flat parameter."""
        size = self.sharded_size
        return size, tuple(math.prod(size[dim + 1 :]) for dim in range(len(size))), self.spec.offset


class FSDPParamGroup:
    """The parameters of one unit that share a dtype and trainability, in one 1-D buffer per rank.

    Attributes:
        flat_param: The buffer, `[numel]`, the same size on every rank; the leaf of autograd.
        params: The parameters in it, by offset.
        grads: Changed by `gradients`, `accumulation` and `kernels` alone.
        unsharded: Unsharded values between calls; changed by `unshard` alone.
        update_state: Of updates in backward; changed by `update_in_backward` alone.
        compared: `None` if no other rank has parts of it, or none that is a process.
        is_replaced: Whether its parameters lie in other groups now, while forwards that read it wait for backward.
    """

    # Compiled code sees the buffer under other identities; only its address tells which group it is.
    _by_address: ClassVar[weakref.WeakValueDictionary[int, FSDPParamGroup]] = weakref.WeakValueDictionary()

    def __init__(self, unit: FSDPUnit, flat_param: nn.Parameter, params: Iterable[FSDPParam]) -> None:
        self._unit = weakref.ref(unit)
        self.flat_param = flat_param
        self.params = tuple(params)
        self.grads = GradState([param.spec for param in self.params])
        self.unsharded = UnshardedState()
        self.update_state = UpdateState()
        self.compared: ComparedAs | None = None
        self.is_replaced = False
        if flat_param.device.type != "meta":
            FSDPParamGroup._by_address[flat_param.data_ptr()] = self

    @property
    def unit(self) -> FSDPUnit:
        """The unit that it belongs to."""
        unit = self._unit()
        assert unit is not None
        return unit

    @staticmethod
    def of(flat_param: torch.Tensor) -> FSDPParamGroup | None:
        """The group whose flat parameter shares the memory of a tensor."""
        if type(flat_param) not in (torch.Tensor, nn.Parameter) or flat_param.is_meta:
            return None
        found = FSDPParamGroup._by_address.get(flat_param.data_ptr())
        return found if found is not None and found.flat_param.numel() == flat_param.numel() else None

    @staticmethod
    def alive() -> list[FSDPParamGroup]:
        """Every parameter group of this process that has memory."""
        return [group for group in dict.fromkeys(FSDPParamGroup._by_address.values()) if group._unit() is not None]

    @property
    def is_extended(self) -> bool:
        """Whether its parameters have all-gather extensions: then the flat parameter has no memory."""
        return self.params[0].extension is not None

    def params_at(self, offsets: Collection[int]) -> Sequence[FSDPParam]:
        """The parameters that lie at `offsets`."""
        # The usual case, in every backward.
        if len(offsets) == len(self.params):
            return self.params
        return [param for param in self.params if param.spec.offset in offsets]

    @property
    def has_pending_grads(self) -> bool:
        """Whether there are gradients that have not reached the parameters, or an update that waits for them."""
        return self.grads.is_pending or self.update_state.has_new_grads or self.flat_param.grad is not None

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left of earlier passes, and the next ones do nothing special for it."""
        unit, update = self.unit, self.update_state
        is_updated_alone = update.update is Update.IN_BACKWARD or update.is_updated
        is_unsharded = not self.unsharded.is_sharded or unit.stays_unsharded
        return unit.comm_settings.last_backward and not (is_updated_alone or is_unsharded or self.has_pending_grads)

    def is_broken(self) -> bool:
        """Whether a parameter is no longer its view of the buffer: replaced, converted, moved, frozen or unfrozen."""
        trainable = self.flat_param.requires_grad
        for param in self.params:
            parameter = param.parameter
            if local_tensor(parameter) is not param.sharded_view or parameter.requires_grad is not trainable:  # type: ignore[arg-type]
                return True
            is_other = is_extended(param.sharded_view) is not (param.extension is not None)  # methods were put on it
            if is_other or parameter.untyped_storage() is not param.dtensor_storage:
                return True
            if any(module._parameters.get(attribute) is not parameter for module, attribute in param.module_refs):
                return True
        return False


def sharded_parameters() -> dict[torch.Tensor, FSDPParam]:
    """Every sharded parameter of this process that has memory."""
    groups = [group for group in FSDPParamGroup.alive() if not group.is_replaced]
    return {param.parameter: param for group in groups for param in group.params}


class ModelState:
    """The state of one sharded model in a step: one for each outermost module that `fully_shard` was called on.

    Attributes:
        units: In registration order of their roots.
        layout_version: Changes with the layout of parameters and with who has them: view checks are stale then.
        queued_in_backwards: The backward passes whose end `post_backward_final_callback` is queued for.
        compared_in_backward: The backward pass at whose end ranks compare what they did.
        pre_forward: Called with the outermost module of each forward before it starts.
        before_next_forward: Called once: ranks compare what they have sharded.
        ignored: The parameters that calls of `fully_shard` on it ignored.
        post_optim_event: What the next all-gathers wait for (`set_post_optim_event`), if anything.
        announced_backwards: How often `set_is_last_backward(False)` was called since a pipeline stage was last reduced.
        backwards_with_grads: Backward passes since then that made gradients of parameters.
    """

    def __init__(self, pre_forward: Callable[[nn.Module], None] = lambda _: None) -> None:
        self.units: tuple[FSDPUnit, ...] = ()
        self.layout_version = 0
        self.queued_in_backwards: set[int] = set()
        self.compared_in_backward: int | None = None
        self.pre_forward = pre_forward
        self.before_next_forward: list[Callable[[], None]] = []
        self.ignored = IgnoredParams()
        self.post_optim_event: torch.Event | None = None
        self.announced_backwards = 0
        self.backwards_with_grads = 0
        self._pending: weakref.WeakSet[FSDPParamGroup] = weakref.WeakSet()
        # Autograd runs hooks on a thread of each device, and models may be trained on several threads.
        self._lock = threading.RLock()

    def adopt(self, units: Iterable[FSDPUnit]) -> None:
        """Makes units parts of this model, in the place of its earlier ones."""
        self.units = tuple(units)
        for unit in self.units:
            if unit.model is not self:
                unit.model.note_layout()
                self.before_next_forward.extend(unit.model.before_next_forward)
                unit.model.before_next_forward.clear()
                unit.model = self
                # The groups may be pending in the model that they come from, which is asked no more.
                for group in unit.param_groups:
                    self.mark_pending(group)

    def wait_for_optimizer(self) -> None:
        """Makes the current stream, for which all-gathers wait, wait for the event of the optimizer, once."""
        event, self.post_optim_event = self.post_optim_event, None
        if event is not None:
            event.wait()

    def note_layout(self) -> None:
        """Makes view checks of the model stale."""
        self.layout_version += 1

    def mark_pending(self, group: FSDPParamGroup) -> None:
        """Records that a group may have work at the end of backward or before the next forward."""
        with self._lock:
            self._pending.add(group)

    def is_any_pending(self) -> bool:
        """Whether any group may have work."""
        if not self._pending:
            return False
        with self._lock:
            for group in [group for group in self._pending if group.is_idle]:
                self._pending.discard(group)
            return bool(self._pending)

    def pending_in(self, units: Iterable[FSDPUnit]) -> list[FSDPParamGroup]:
        """The groups of some units that may have work, in the units' order, which is the same on all ranks."""
        with self._lock:
            if not self.is_any_pending():
                return []
            return [group for unit in units for group in unit.param_groups if group in self._pending]


@dataclasses.dataclass(eq=False)
class FSDPUnit:
    """The parameters that are gathered together, reduced together and freed together.

    Attributes:
        name: Fully qualified name of the root in the outermost sharded module, empty for that; of several, joined.
        other_roots: Further modules that `fully_shard([root, ...])` put into the unit.
        root_names: Names of all roots, if there are several; those of parameters start with the number of theirs then.
        param_groups: One for each dtype and trainability.
        replaced_groups: Earlier ones that autograd may still send gradients to.
        hook: The user's reduction (`register_comm_hook`).
        forward_prefetch: Units whose all-gathers start where this one is used first in forward.
        backward_prefetch: The same in backward.
        sharded_with: The arguments of `fully_shard` among the options of the compile that made it, if one did.
        compiled_regions: Its compiled graphs, by the parameter groups that they read; `lower` fills it.
        numbers: Which of the units of each place where ranks meet, alike on all; `number_in_call`: of its mesh.
    """

    root_ref: weakref.ref[nn.Module]
    name: str
    policy: UnitPolicy
    wrap_source: WrapSource
    model_ref: weakref.ref[ModelState]
    param_groups: list[FSDPParamGroup] = dataclasses.field(default_factory=list)
    replaced_groups: list[FSDPParamGroup] = dataclasses.field(default_factory=list)
    param_state: ParamState = ParamState.SHARDED
    hook: Registered | None = None
    comm_settings: CommSettings = dataclasses.field(default_factory=CommSettings)
    reduce_group: ReduceGroup = ReduceGroup.SHARED
    forward_prefetch: tuple[weakref.ref[FSDPUnit], ...] = ()
    backward_prefetch: tuple[weakref.ref[FSDPUnit], ...] = ()
    sharded_with: dict[str, Any] | None = None
    other_roots: tuple[weakref.ref[nn.Module], ...] = ()
    root_names: tuple[str, ...] = ()
    compiled_regions: dict[tuple[int, ...], Any] = dataclasses.field(default_factory=dict)
    numbers: dict[RankStore, int] = dataclasses.field(default_factory=dict)
    number_in_call: int = 1

    def prefetched(self, field: Literal["forward_prefetch", "backward_prefetch"]) -> tuple[str, ...]:
        """Titles of the units of one of these two fields that are not deleted."""
        references: tuple[weakref.ref[FSDPUnit], ...] = getattr(self, field)
        return tuple(unit.title for reference in references if (unit := reference()) is not None)

    @property
    def root(self) -> nn.Module:
        """The module that the unit is named after."""
        root = self.root_ref()
        assert root is not None
        return root

    def has_root(self, module: nn.Module) -> bool:
        """Whether the unit was made by a call on a module, alone or with others."""
        return any(reference() is module for reference in (self.root_ref, *self.other_roots))

    def rename(self, names: Mapping[int, str]) -> None:
        """Names it after its roots; `names` are the fully qualified ones, by `id`."""
        if not self.other_roots:
            self.name = names.get(id(self.root_ref()), self.name)  # it may have been cut off, and keeps its name then
            return
        # A root that is deleted has no parameters left to name.
        self.root_names = tuple(names.get(id(reference()), "") for reference in (self.root_ref, *self.other_roots))
        self.name = "+".join(self.root_names)

    @property
    def model(self) -> ModelState:
        """The model that it is a part of."""
        model = self.model_ref()
        assert model is not None
        return model

    @model.setter
    def model(self, model: ModelState) -> None:
        self.model_ref = weakref.ref(model)

    @property
    def grad_placement(self) -> GradPlacement:
        """How far its gradients are reduced now."""
        if not self.comm_settings.reduce_gradients:
            return GradPlacement.UNREDUCED
        if self.policy.mesh.ndim == 2 and self.policy.mesh.size(0) > 1 and not self.comm_settings.all_reduce:
            return GradPlacement.REDUCE_SCATTERED
        return GradPlacement.REDUCED

    @property
    def divide(self) -> float | None:
        """What sums of gradients are divided by, where collectives do not average by themselves."""
        if self.comm_settings.divide is None and self.comm_settings.sum_only:
            return float(self.policy.mesh.size())
        return self.comm_settings.divide

    @property
    def stays_unsharded(self) -> bool:
        """Whether unsharded parameters outlive backward."""
        # As FSDP1's ZeRO-2 between microbatches: no update follows a backward that does not reduce.
        keeps_for_backward = self.policy.mesh_placement.reshard is Reshard.AFTER_BACKWARD
        is_accumulating = keeps_for_backward and self.grad_placement is GradPlacement.UNREDUCED
        return is_accumulating or not self.comm_settings.reshard_after_backward

    @property
    def params(self) -> Iterator[FSDPParam]:
        """All parameters of the unit."""
        return (param for group in self.param_groups for param in group.params)

    @property
    def title(self) -> str:
        """Name for messages: never empty, and of no other unit of the model."""
        return (self.name or "(root)") + (f"#{self.number_in_call}" if self.number_in_call > 1 else "")

    def parameter_name(self, param: FSDPParam) -> str:
        """Fully qualified name of a parameter in the outermost sharded module."""
        root, name = self.name, param.name
        if self.root_names:
            number, _, name = name.partition(".")
            root = self.root_names[int(number)]
        return f"{root}.{name}" if root else name

    @property
    def shard_bytes(self) -> int:
        """Bytes of the unit's parameters on this rank, padding included."""
        return sum(group.flat_param.numel() * group.flat_param.element_size() for group in self.param_groups)

    @property
    def full_bytes(self) -> int:
        """Bytes of the unit's unsharded parameters in their stored dtype."""
        return sum(param.spec.numel * param.parameter.element_size() for param in self.params)
