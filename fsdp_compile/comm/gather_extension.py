"""All-gather extensions: a parameter whose class says what is sent of a shard, and what is made of what arrives.

    inputs, metadata = shard.fsdp_pre_all_gather(mesh, size, stride, module, mp_policy)     say, 8 bits and a scale
    outputs = the all-gather of each input
    parameter, _ = shard.fsdp_post_all_gather(outputs, metadata, param_dtype)

The protocol is FSDP2's, which torchao's quantized and float8 parameters have. The two methods are of the shard's class,
or were put on the shard itself. Gradients are those of any parameter: plain, reduced in `reduce_dtype`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compile._torch.distributed import collectives
from fsdp_compile._torch.tensors import FakeTensor, FakeTensorMode, TorchDispatchMode, foreach_copy_, is_wrapper
from fsdp_compile.errors import ConfigError, UnsupportedModelError
from fsdp_compile.ops.gather_message import gather_message

PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"
_ALL_ARGUMENTS = 5
"""Of `fsdp_pre_all_gather`; an older form takes the mesh alone."""


def is_extended(tensor: torch.Tensor) -> bool:
    """Whether a parameter or a shard is more than its elements, or has methods of the protocol."""
    kind = type(tensor)
    is_plain = kind in (torch.Tensor, FakeTensor) or issubclass(kind, nn.Parameter)
    return not is_plain or hasattr(tensor, PRE) or hasattr(tensor, POST)


def is_traceable(shard: torch.Tensor) -> bool:
    """Whether compilers can put another tensor of its class in the place of a shard, with all that it wraps now."""
    if not is_wrapper(shard):
        return type(shard) in (torch.Tensor, FakeTensor)
    kept = {name for name, value in vars(shard).items() if isinstance(value, torch.Tensor)}
    try:
        names, context = shard.__tensor_flatten__()  # type: ignore[attr-defined]
        wrapped = {name: getattr(shard, name) for name in names}
        made = type(shard).__tensor_unflatten__(wrapped, context, shard.size(), shard.stride())  # type: ignore[attr-defined]
        remade, _ = made.__tensor_flatten__()
        FakeTensorMode().from_tensor(shard).__tensor_flatten__()  # type: ignore[attr-defined]  # without values
    except Exception:
        return False
    return type(made) is type(shard) and list(remade) == list(names) and kept <= set(names)


class _TracedMethods(TorchDispatchMode):
    """Refuses, in methods that are traced, collectives that write in place: graphs would not wait for them."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        if func.namespace == "c10d":
            raise UnsupportedModelError(
                f"a method of an all-gather extension calls a collective that writes in place ({func})",
                where=self._name,
                instead="torch.distributed._functional_collectives (all_reduce(x, 'max', mesh), say), which compilers "
                "trace; or fully_shard(model) without torch.compile",
            )
        return func(*args, **(kwargs or {}))


def part_of(whole: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    """The part of `rank` of `size` of a tensor of any class, by `torch.chunk`; no rows where these have run out."""
    parts = torch.chunk(whole, size)
    return parts[rank] if rank < len(parts) else whole.narrow(0, 0, 0)


def shard_of(whole: torch.Tensor, size: int, rank: int, device: torch.device) -> torch.Tensor:
    """The same in memory of its own, on a device."""
    part = part_of(whole, size, rank)
    # By the operators that FSDP2 takes for it: classes have these.
    own = whole.new_zeros(part.shape)
    if part.numel():
        own.copy_(part)
    return own if own.device == device else own.to(device)


def as_plain(tensor: torch.Tensor) -> torch.Tensor:
    """A plain tensor of what copying a tensor into one gives; the tensor itself if it wraps no others."""
    if not is_wrapper(tensor):
        return tensor
    plain = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    foreach_copy_([plain], [tensor])
    return plain


@dataclasses.dataclass(frozen=True)
class StartedGather:
    """All-gathers of one parameter that run.

    Attributes:
        outputs: Of its inputs; to be waited for.
        inputs: Shapes and dtypes of the inputs.
        metadata: The class's own.
    """

    outputs: tuple[torch.Tensor, ...]
    inputs: tuple[tuple[torch.Size, torch.dtype], ...]
    metadata: Any


@dataclasses.dataclass(frozen=True, eq=False)
class GatherExtension:
    """What the two methods of one parameter are called with.

    Attributes:
        name: Of the parameter, for errors.
        key: By which graphs know it.
        mesh: The ranks that it is sharded over; of one dimension.
        group: torch's name of their group; empty for one rank.
        shape: Of the full parameter.
        module: The first that registers it.
        precision: Of the unit.
        state: Stands for what the methods may ask for that is no tensor (`runtime/extended_reads.py`); empty until a
            forward begins.
        runs_in_traces: Whether the methods run with tensors without values in the place of the shard.
    """

    name: str
    key: str
    mesh: DeviceMesh
    group: str
    shape: torch.Size
    module: weakref.ref[nn.Module]
    precision: MixedPrecisionPolicy
    state: str = ""
    runs_in_traces: bool = True

    @property
    def stride(self) -> tuple[int, ...]:
        """Of the full parameter, contiguous."""
        return tuple(math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape)))

    @property
    def padded_rows(self) -> int:
        """Rows of each rank's part, with padding."""
        return -(-self.shape[0] // self.mesh.size())

    def start(self, shard: torch.Tensor, traced: torch.Tensor, spec: str) -> StartedGather:
        """Calls `fsdp_pre_all_gather`, and starts to gather what it returns.

        Args:
            shard: This rank's part, as it is stored.
            traced: The same, or what stands for it while a compiler traces.
            spec: Text of the parameter's `UnshardSpec`.

        Raises:
            ConfigError: If the methods are missing, or return what cannot be gathered.
        """
        method = self._method(PRE, shard, traced)
        arguments = len(inspect.signature(method).parameters)
        if arguments not in (1, _ALL_ARGUMENTS):
            raise self._error(
                f"it takes {arguments} arguments",
                "fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy)",
            )
        given = (self.mesh, self.shape, self.stride, self.module(), self.precision)
        with torch.no_grad(), self._watched(shard, traced):
            inputs, metadata = method(*given[:arguments])
            # FSDP2 takes a lone tensor, too: it goes through it by rows.
            inputs = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
            self._refuse_missing_rows(shard, inputs)
            sent = [as_plain(each) for each in inputs]
            outputs = tuple(self._gathered(each, "" if traced is shard else spec) for each in sent)
        return StartedGather(outputs, tuple((each.shape, each.dtype) for each in sent), metadata)

    def finish(
        self, shard: torch.Tensor, traced: torch.Tensor, started: StartedGather, param_dtype: torch.dtype
    ) -> torch.Tensor:
        """Waits for the all-gathers, and calls `fsdp_post_all_gather`.

        Args:
            shard: As in `start`.
            traced: As in `start`.
            started: What that returned.
            param_dtype: Of the unsharded parameter.

        Returns:
            The unsharded parameter, of `shape`: of whatever class the method returns, without history.
        """
        method = self._method(POST, shard, traced)
        is_running = traced is shard and bool(self.group)
        with torch.no_grad(), self._watched(shard, traced):
            outputs = tuple(
                (collectives.wait_tensor(output) if is_running else output).view(dtype).view(-1, *shape[1:])
                for output, (shape, dtype) in zip(started.outputs, started.inputs, strict=True)
            )
            returned = method(outputs, started.metadata, param_dtype)
            if not (isinstance(returned, Sequence) and returned and isinstance(returned[0], torch.Tensor)):
                raise self._error(
                    f"{POST} returned {type(returned).__name__}",
                    "a tuple of the unsharded parameter and the tensors that can be freed with it",
                )
            unsharded: torch.Tensor = returned[0]
            if unsharded.shape == self.shape:
                return unsharded
            if unsharded.shape[1:] != self.shape[1:] or unsharded.shape[0] < self.shape[0]:
                raise self._error(
                    f"{POST} returned a tensor of shape {tuple(unsharded.shape)}", f"one of {tuple(self.shape)}"
                )
            return torch.as_strided(unsharded, self.shape, self.stride, 0)

    def can_be_traced(self, shard: torch.Tensor, spec: str, param_dtype: torch.dtype) -> bool:
        """Whether the methods run with a fake tensor in the place of a shard; arguments as of `start` and `finish`.

        Methods that ask for values, that compute with tensors besides the shard's, or whose collectives write in place,
        do not.
        """
        try:
            with FakeTensorMode() as mode:
                traced = mode.from_tensor(shard)
                self.finish(shard, traced, self.start(shard, traced, spec), param_dtype)
        except Exception:
            return False
        return True

    def refuse_without_methods(self, shard: torch.Tensor) -> None:
        """Raises an error for a shard that has not both methods."""
        missing = [name for name in (PRE, POST) if not hasattr(shard, name)]
        if missing:
            kind = type(shard)
            raise UnsupportedModelError(
                f"a parameter is a {kind.__module__}.{kind.__qualname__}, a tensor subclass, and has no "
                f"{' and no '.join(missing)}, which say what is sent of it",
                where=self.name,
                instead="both methods of FSDP2's all-gather extensions on the class, or on the local tensors of the "
                "shards; plain parameters (each of its tensors registered by itself); or list it in ignored_params, "
                "then it is neither sharded nor averaged",
            )

    def _watched(self, shard: torch.Tensor, traced: torch.Tensor) -> AbstractContextManager[object]:
        return contextlib.nullcontext() if traced is shard else _TracedMethods(self.name)

    def _method(self, name: str, shard: torch.Tensor, traced: torch.Tensor) -> Any:
        self.refuse_without_methods(shard)
        if traced is shard:
            return getattr(shard, name)
        for attribute, value in vars(shard).items():
            # What its class does not say to be a part of it, tensors that stand for it have not.
            if not isinstance(value, torch.Tensor) and attribute not in (PRE, POST):
                setattr(traced, attribute, value)
        own = vars(shard).get(name)
        if own is None:
            return getattr(traced, name)
        if getattr(own, "__self__", None) is not shard:
            raise UnsupportedModelError(
                f"a shard has a {name} of its own that is not a method of it, and cannot be compiled for another "
                "tensor in its place",
                where=self.name,
                instead=f"shard.{name} = function.__get__(shard), or a method of its class",
            )
        return own.__func__.__get__(traced)

    def _refuse_missing_rows(self, shard: torch.Tensor, inputs: Sequence[torch.Tensor]) -> None:
        """Refuses what is as short as a shard with fewer rows than others': ranks would send different sizes."""
        rows = shard.shape[0]
        if rows != self.padded_rows and any(each.dim() > 0 and each.shape[0] == rows for each in inputs):
            raise self._error(
                f"{PRE} returned tensors of shapes {', '.join(str(tuple(each.shape)) for each in inputs)} on a rank "
                f"that has {rows} rows, and others have {self.padded_rows}",
                f"{self.padded_rows} rows on all ranks, padded at the end: -(-outer_size[0] // mesh.size())",
            )

    def _gathered(self, message: torch.Tensor, spec: str) -> torch.Tensor:
        """The all-gather of one message: started, or with a spec the marker of graphs."""
        message = message.contiguous().view(-1)
        if message.dtype.is_floating_point and message.dtype.itemsize == 1:
            message = message.view(torch.uint8)  # gloo knows no float8
        if not self.group:
            return message.clone()
        if spec:
            return gather_message(message, self.mesh.size(), self.group, spec)
        return collectives.all_gather_into_tensor(message, self.mesh.size(), self.group)

    def _error(self, what: str, instead: str) -> ConfigError:
        return ConfigError(what, where=f"{self.name}, {PRE}", instead=instead)
