"""Parameter groups: the shards of a unit in one flat buffer, of which FSDP2's parameters are views.

    FSDPParam of torch     DTensor `layers.0.weight` (leaf of autograd)     shard: flat[0:4096]
    FSDPParam of torch     DTensor `layers.0.bias`                          shard: flat[4096:4160]
    ParamGroup             flat [4160], and `edge`: the same memory, with a history that leads to both DTensors

Compiled graphs take `edge`, gather slices of it, and return its gradient; FSDP2 uses the views. Neither copies.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compile._torch import fully_shard as fsdp2
from fsdp_compile._torch import fully_shard_params as torch_params
from fsdp_compile._torch.autograd import allow_any_gradient_dtype
from fsdp_compile._torch.dynamo import keep_sizes_fixed
from fsdp_compile._torch.tensors import local_tensor, make_dtensor, set_local_tensor
from fsdp_compile.comm.dtensor_layouts import DTensorLayout
from fsdp_compile.comm.groups import GroupRole, alias_of
from fsdp_compile.errors import UnsupportedModelError
from fsdp_compile.fsdp2 import edge
from fsdp_compile.fsdp2.module_class import parametrized_late
from fsdp_compile.fsdp2.pending import PendingGrads
from fsdp_compile.fsdp2.updates import Updates
from fsdp_compile.layout.flat_layout import is_large, plan_layout, shard_numel
from fsdp_compile.layout.spec import GradPlacement, Reshard, UnshardSpec, Update
from fsdp_compile.layout.wire_formats import ASKED, WireFormat
from fsdp_compile.ops.comm_hook import Registered

if TYPE_CHECKING:
    from fsdp_compile.fsdp2.unit import Unit


@dataclasses.dataclass(eq=False)
class Param:
    """One parameter of a group.

    Attributes:
        of_torch: FSDP2's object for it.
        name: From the root of its model.
        spec: Where it lies in the flat buffer, and how it is gathered and reduced.
        parameter: The DTensor parameter that the group's edge leads to.
        view: The view of the flat buffer that is the DTensor's local tensor; rows may be fewer than on other ranks.
        layout: Of the gathered parameter, if that is a DTensor over further ranks (tensor parallel), too.
        first_text: Of the spec when the model was taken over: how the module's class reads it.
    """

    of_torch: torch_params.TorchParam
    name: str
    spec: UnshardSpec
    parameter: nn.Parameter
    view: torch.Tensor
    layout: DTensorLayout | None
    first_text: str

    @property
    def refs(self) -> list[tuple[nn.Module, str]]:
        """The modules that register it, with its name in each."""
        return torch_params.refs_of(self.of_torch)

    @property
    def is_moved(self) -> bool:
        """Whether the DTensor is another one, or no longer the view of the flat buffer (`.to()`, `assign=True`)."""
        now = torch_params.sharded_param(self.of_torch)
        return now is not self.parameter or local_tensor(now) is not self.view  # type: ignore[arg-type]

    def update_shard_data(self) -> None:
        """Makes FSDP2 use the values of a DTensor that is no longer the view of the flat buffer."""
        local = local_tensor(torch_params.sharded_param(self.of_torch))  # type: ignore[arg-type]
        padded = local.new_zeros(torch_params.padded_shape(self.of_torch))
        dim = self.spec.dim or 0
        padded.narrow(dim, 0, local.size(dim) if local.numel() else 0).copy_(local)
        torch_params.set_shard_data(self.of_torch, padded.view(-1))


class ParamGroup:
    """The parameters of one FSDP2 group that share dtypes and were trainable, or frozen, together.

    Attributes:
        of_torch: FSDP2's parameter group.
        unit: What it is gathered with.
        title: Of the unit, for graphs and errors.
        flat: The buffer, `[numel]`, the same size on every rank.
        edge: The same memory, with a history that leads to the DTensors.
        params: In the order of registration.
        pending: Gradients that wait for (the rest of) their reduction.
        updates: Updates in backward.
        gathered: By offset, full parameters that the user has gathered before the next compiled forward.
    """

    # Compiled code sees the buffer under other identities; its address tells which group it is.
    _by_address: ClassVar[weakref.WeakValueDictionary[int, ParamGroup]] = weakref.WeakValueDictionary()

    def __init__(
        self, unit: Unit, of_torch: fsdp2.TorchGroup, members: Sequence[torch_params.TorchParam], titles: dict[int, str]
    ) -> None:
        self._unit = weakref.ref(unit)
        self.of_torch = of_torch
        self.title = unit.title
        self.size = fsdp2.placement_of(of_torch).shards.size
        self.updates = Updates(self)
        stored = torch_params.sharded_param(members[0]).dtype
        self._members = members
        common = self._common_spec(self.updates.wanted(map(torch_params.sharded_param, members)))
        forms: list[dict[str, Any]] = [
            {"shape": torch_params.shape_of(p), "dim": torch_params.shard_dim(p)} for p in members
        ]
        wire = self._wire_format(stored)
        places = plan_layout(
            [shard_numel(**form, size=self.size) for form in forms],
            stored=stored,
            sent=common.param_dtype,
            reduced=common.reduce_dtype,
            per_byte=0 if wire is None else wire.per_byte,
        )
        device = torch_params.shard_data(members[0]).device
        pins = torch_params.pins_memory(members[0]) and device.type != "meta"
        flat = torch.zeros(max(map(sum, places)), dtype=stored, device=device)
        self.flat = flat.pin_memory() if pins else flat
        self.params: list[Param] = []
        for each, form, (offset, extent) in zip(members, forms, places, strict=True):
            spec = dataclasses.replace(common, offset=offset, extent=extent, **form)
            # Its module may have the gathered parameter registered.
            module, attribute = torch_params.refs_of(each)[0]
            name = f"{titles.get(id(module), '')}.{attribute}".removeprefix(".")
            self.params.append(self._move_in(each, name, self._in_format(spec)))
        self.pending = PendingGrads(self)
        self.gathered: dict[int, torch.Tensor] = {}
        self.edge = self.flat
        self.make_edge()
        self._note_address()

    @property
    def unit(self) -> Unit:
        """The unit that it belongs to."""
        unit = self._unit()
        assert unit is not None
        return unit

    @property
    def number(self) -> int:
        """Its place among the groups of the unit."""
        return self.unit.groups.index(self)

    @staticmethod
    def of(flat: object) -> ParamGroup | None:
        """The group whose flat buffer a tensor is, under whatever identity."""
        if type(flat) not in (torch.Tensor, nn.Parameter) or flat.is_meta:  # type: ignore[attr-defined]
            return None
        found = ParamGroup._by_address.get(flat.data_ptr())  # type: ignore[attr-defined]
        return found if found is not None and found.flat.numel() == flat.numel() else None  # type: ignore[attr-defined]

    @staticmethod
    def has_padding_between(view: torch.Tensor, begin: int, end: int) -> bool:
        """Whether some elements of the memory of a view are padding of a group's flat buffer, and nothing else."""
        group = ParamGroup._by_address.get(view.untyped_storage().data_ptr())
        return group is not None and begin < end and not any(begin <= p.spec.offset < end for p in group.params)

    def give_memory(self, flat: torch.Tensor) -> None:
        """Puts a buffer with an address in the place of one on meta, where FSDP2's shards stay: for plans."""
        self.flat = flat
        self.make_edge()
        self._note_address()

    def _note_address(self) -> None:
        if self.flat.device.type != "meta":
            ParamGroup._by_address[self.flat.data_ptr()] = self

    @property
    def is_trainable(self) -> bool:
        """Whether graphs make gradients of it."""
        return self.edge.requires_grad

    def grad_placement(self) -> GradPlacement:
        """How far settings ask for gradients to be reduced."""
        if not fsdp2.reduces(self.of_torch):
            return GradPlacement.UNREDUCED
        return GradPlacement.REDUCED if fsdp2.all_reduces(self.of_torch) else GradPlacement.REDUCE_SCATTERED

    def params_at(self, offsets: Collection[int]) -> list[Param]:
        """The parameters at some offsets."""
        return [param for param in self.params if param.spec.offset in offsets]

    def refresh_specs(self) -> None:
        """Follows settings that users have changed on FSDP2's objects."""
        common = self._common_spec(self.updates.wanted(param.parameter for param in self.params))
        for param in self.params:
            old = param.spec
            place = dataclasses.replace(common, offset=old.offset, extent=old.extent, shape=old.shape, dim=old.dim)
            param.spec = self._in_format(place)

    def _wire_format(self, stored: torch.dtype) -> WireFormat | None:
        """The format in which large parameters are sent; `None` for their dtype."""
        chosen = fsdp2.own_setting(self.unit.state, "gather_dtype", default=None)
        return ASKED[chosen] if chosen is not None and stored.is_floating_point and self.size > 1 else None

    def _in_format(self, spec: UnshardSpec) -> UnshardSpec:
        """A spec, of a parameter that is sent in the unit's format if it is large."""
        wire = self._wire_format(self.flat.dtype)
        if wire is None or not is_large(spec.shape, spec.dim, spec.size, self.flat.dtype):
            return spec
        return dataclasses.replace(spec, gather_format=wire.name)

    def eval_spec(self, param: Param) -> UnshardSpec | None:
        """How a module in eval mode reads a parameter, if not as in training (`full_precision_in_eval`)."""
        if not fsdp2.own_setting(self.unit.state, "full_precision_in_eval", default=False):
            return None
        found = dataclasses.replace(param.spec, param_dtype=self.flat.dtype, gather_format="")
        return None if found == param.spec else found

    def _common_spec(self, update: Update) -> UnshardSpec:
        """What all parameters of the group share."""
        where = fsdp2.placement_of(self.of_torch)
        state, reduced = self.unit.state, torch_params.reduce_dtype(self._members[0])
        reshard = Reshard.AFTER_FORWARD if where.reshards else Reshard.AFTER_BACKWARD
        if where.reshards and fsdp2.own_setting(state, "auto_reshard", default=False):
            reshard = Reshard.AUTO
        apart = where.reduces_apart or fsdp2.own_setting(state, "separate_reduce_group", default=False)
        hook: Registered | None = fsdp2.kept(state, "comm_hook")
        # What a hook compresses is the message; sums of microbatches in 16 bits would stop growing.
        compressed = None if hook is None or hook.compresses_to == reduced else hook.compresses_to
        device = self.of_torch.device.type
        return UnshardSpec(
            offset=0,
            extent=0,
            shape=(),
            dim=None,
            size=where.shards.size,
            group=_alias(where.shards, "shard"),
            stride=where.shards.stride,
            replicas=where.replicas.size,
            replicate_group=_alias(where.replicas, "replicate"),
            replicate_stride=where.replicas.stride,
            param_dtype=torch_params.param_dtype(self._members[0]),
            reduce_dtype=compressed or reduced,
            accumulate_dtype=None if compressed is None else reduced,
            hook="" if hook is None else hook.key,
            reshard=reshard,
            post_forward_size=where.post_forward.size,
            post_forward_group=_alias(where.post_forward, "post_forward"),
            divide=fsdp2.divide_factor(self.of_torch),
            update=update,
            forward_prefetch=self.unit.prefetched[0],
            backward_prefetch=self.unit.prefetched[1],
            compute=device if fsdp2.offloads(self.of_torch) and device != "cpu" else "",
            reduce_group=_alias(where.shards, "reduce") if apart and where.shards.size > 1 else "",
        )

    @property
    def ends_backward(self) -> bool:
        """Whether there is something to do for it when a backward ends."""
        return fsdp2.reduces_unused(self.of_torch) or self._keeps_low_precision

    @property
    def _keeps_low_precision(self) -> bool:
        keeps = fsdp2.own_setting(self.unit.state, "keep_low_precision_grads", default=False)
        return bool(keeps) and self.params[0].spec.param_dtype != self.flat.dtype

    def end_backward(self) -> None:
        """At the end of a backward: makes of `.grad`, if it has reduced gradients fully, what settings say."""
        if self.grad_placement() is not GradPlacement.REDUCED:
            return
        for param in self.params:
            leaf = param.parameter
            if leaf.grad is None and leaf.requires_grad and fsdp2.reduces_unused(self.of_torch):
                leaf.grad = make_dtensor(torch.zeros_like(param.view), leaf)
            if self._keeps_low_precision and leaf.grad is not None and leaf.grad.dtype != param.spec.param_dtype:
                allow_any_gradient_dtype(leaf)
                leaf.grad = leaf.grad.to(param.spec.param_dtype)

    def _move_in(self, each: torch_params.TorchParam, name: str, spec: UnshardSpec, first_text: str = "") -> Param:
        """Moves one shard of FSDP2's into the buffer, and makes FSDP2 and the DTensor use it there."""
        parameter = torch_params.sharded_param(each)
        local = local_tensor(parameter)  # type: ignore[arg-type]
        piece = self.flat[spec.offset : spec.offset + spec.shard_numel]
        piece.copy_(torch_params.shard_data(each).view(-1))
        padded = piece.view(torch_params.padded_shape(each))
        view = padded.narrow(spec.dim or 0, 0, local.size(spec.dim or 0) if local.numel() else 0)
        # `.data` first: the wrapper's own storage offset must be that of its local tensor, or Dynamo cannot fake it.
        parameter.data = make_dtensor(view, parameter)
        torch_params.set_shard_data(each, piece)
        set_local_tensor(parameter, view)  # type: ignore[arg-type]
        # A shard begins inside of the buffer. Dynamo would take where for a symbol, and read it in the wrong place.
        keep_sizes_fixed(parameter)
        gathered, layout = torch_params.unsharded_spec(each), None
        if gathered is not None:
            dims = torch_params.data_parallel_dims(each)
            others = [p for i, p in enumerate(gathered.placements) if i not in dims]
            # FSDP2 sums the uses of a parameter in this dtype, too, if sums over other ranks may follow.
            dtype = spec.unreduced_dtype if any(p.is_replicate() for p in others) else spec.summed_dtype
            layout = DTensorLayout.of(gathered.mesh, gathered.placements, gathered.shape, dims, dtype)
        return Param(each, name, spec, parameter, view, layout, first_text or spec.text)

    def make_edge(self) -> None:
        """Makes the tensor that graphs take: the buffer's memory, with a history that leads to the DTensors."""
        self.tie_again()
        parameters = [torch_params.sharded_param(each) for each in self._members]
        self.edge = edge.of_group(self, parameters)
        for param, parameter in zip(self.params, parameters, strict=True):
            param.parameter = parameter
        self._seen = torch_params.seen_params(self._members)

    @property
    def is_converted(self) -> bool:
        """Whether parameters have another dtype, or are on another device, since the group was made."""
        if not self.is_changed:
            return False
        moved: list[Any] = [torch_params.sharded_param(p.of_torch) for p in self.params if p.is_moved]
        found = [local_tensor(each) for each in moved]
        return any((local.dtype, local.device) != (self.flat.dtype, self.flat.device) for local in found)

    @property
    def is_changed(self) -> bool:
        """Whether `follow_parameters` has something to follow."""
        return torch_params.are_changed(self._seen)

    @property
    def is_registered(self) -> bool:
        """Whether modules have the sharded parameters, as between forwards."""
        return torch_params.are_registered(self._members)

    def tie_again(self) -> None:
        """Makes a tied parameter that was loaded at each of its places one again."""
        torch_params.tie_again(self._members)

    def refuse_parametrized(self) -> None:
        """Raises `UnsupportedModelError` if a parameter was parametrized since it was sharded."""
        for param in self.params:
            if torch_params.is_parametrized(param.of_torch):
                raise parametrized_late(param.name)

    def follow_parameters(self) -> bool:
        """Follows parameters that were replaced, frozen or thawed; returns whether the edge is another one.

        Raises:
            UnsupportedModelError: If a parameter has another shape, dtype or device now.
        """
        if not self.is_changed:
            return False
        if self.is_converted:
            raise UnsupportedModelError(
                "parameters were converted since the last call of a compiled function, whose graph is for the old ones",
                where=f"unit {self.title}",
                instead="torch.compile(model) in the place of a compiled function, or one uncompiled forward of the "
                "model after the conversion",
            )
        for i, param in enumerate(self.params):
            if not param.is_moved:
                continue
            local = local_tensor(torch_params.sharded_param(param.of_torch))  # type: ignore[arg-type]
            if local.shape != param.view.shape:
                raise UnsupportedModelError(
                    f"a sharded parameter was replaced by one of another shape: {list(local.shape)} on this rank, "
                    f"not {list(param.view.shape)}",
                    where=param.name,
                    instead="change shapes before fully_shard()",
                )
            param.update_shard_data()
            self.params[i] = self._move_in(param.of_torch, param.name, param.spec, param.first_text)
        # After `swap_tensors` a parameter is the same object, and the edge leads to what was in it.
        self.make_edge()
        return True

    def sharded_grads(self, flat_grad: torch.Tensor, offsets: Collection[int]) -> list[DTensor | None]:
        """The gradients of all parameters as DTensors, views of a flat gradient; `None` but for those at `offsets`."""
        if flat_grad.dtype != self.flat.dtype or flat_grad.device != self.flat.device:
            flat_grad = flat_grad.to(self.flat)
        begin = flat_grad.storage_offset()
        grads: list[DTensor | None] = []
        for param in self.params:  # in each backward: no call of Python for each parameter that can be spared
            offset, view, leaf = param.spec.offset, param.view, param.parameter
            own = flat_grad.as_strided(view.shape, view.stride(), begin + offset) if offset in offsets else None
            grads.append(None if own is None else make_dtensor(own, leaf))
        return grads


def _alias(ranks: fsdp2.Ranks, role: GroupRole) -> str:
    return "" if ranks.group is None else alias_of(ranks.group, role)
