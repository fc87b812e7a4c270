"""The only module that imports private names of torch.

Everything here was checked on torch 2.11, 2.13 and 2.15; where the versions differ, a comment says how.
"""

from __future__ import annotations

import operator
import os
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from types import FrameType
from typing import Any

import sympy
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives
from torch import fx
from torch._C._distributed_c10d import _register_process_group, _resolve_process_group
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo import convert_frame, symbolic_convert
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.eval_frame import OptimizedModule, skip_code
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.descriptors import SavedForBackwardsAOTOutput
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, detect_fake_mode
from torch._inductor import config as inductor_config
from torch._inductor import list_mode_options
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files
from torch._logging._internal import trace_structured_artifact
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

__all__ = [
    "CheckpointPolicy",
    "CustomPartitionerFn",
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "OptimizedModule",
    "SavedForBackwardsAOTOutput",
    "TorchDispatchMode",
    "TracingContext",
    "aot_autograd",
    "collectives",
    "compile_fx",
    "compile_fx_inner",
    "detect_fake_mode",
    "functorch_config",
    "get_hash_for_files",
    "inductor_config",
    "list_mode_options",
    "make_dtensor",
    "min_cut_rematerialization_partition",
    "register_group_alias",
    "set_local_tensor",
    "skip_code",
    "tree_leaves",
]

OpOverload = torch._ops.OpOverload
_LOCAL = operator.attrgetter("_local_tensor")
_GRAD: Any = torch.Tensor.grad  # a descriptor: what `.grad` is, whatever a subclass says
collectives = torch.ops._c10d_functional
"""Functional collectives as graph nodes: each returns a tensor (or a list) that `wait_tensor` completes."""


def make_dtensor(local: torch.Tensor, like: DTensor, *, requires_grad: bool = False) -> DTensor:
    """Wraps `local` as a DTensor of the mesh, placements and global shape of `like`, without a check or a copy."""
    spec = like._spec
    if local.dtype != like.dtype:
        meta = TensorMeta(like.shape, like.stride(), local.dtype)
        spec = DTensorSpec(spec.mesh, spec.placements, meta)
    return DTensor.__new__(DTensor, local, spec, requires_grad=requires_grad)


def new_dtensor(local: torch.Tensor, mesh: dist.DeviceMesh, placements: tuple[Any, ...], shape: torch.Size) -> DTensor:
    """A DTensor of global `shape` (contiguous) over this rank's `local` part; no communication, no check."""
    stride = torch.empty(shape, device="meta").stride()
    spec = DTensorSpec(mesh, placements, TensorMeta(shape, stride, local.dtype))
    return DTensor(local, spec, requires_grad=False)


def local_tensor(parameter: DTensor) -> torch.Tensor:
    """The very tensor that a DTensor holds, without autograd and without a view."""
    return parameter._local_tensor


def hold_locals(parameters: Iterable[DTensor], locals_: Iterable[torch.Tensor]) -> bool:
    """Whether each DTensor holds the very tensor that is given for it."""
    return all(map(operator.is_, map(_LOCAL, parameters), locals_))


def set_local_tensor(parameter: DTensor, local: torch.Tensor) -> None:
    """Makes an existing DTensor hold `local`, keeping its identity (optimizers hold parameters by identity)."""
    parameter._local_tensor = local


ViewPlace = tuple[tuple[int, ...], tuple[int, ...], int]
"""Shape, strides and first element of a view, in elements of a contiguous tensor."""


def views_of(tensor: torch.Tensor, places: Sequence[ViewPlace]) -> list[torch.Tensor]:
    """Views of a tensor that has no history."""
    begin = tensor.storage_offset()
    return [tensor.as_strided(shape, strides, begin + offset) for shape, strides, offset in places]


def is_plain_fake(value: object) -> bool:
    """Whether a value is a fake tensor about which its shape, strides, dtype and device say everything."""
    return (
        type(value) is FakeTensor
        and value.layout is torch.strided
        and not (value.requires_grad or value.dtype.is_complex)
        and value.constant is None
        and value.real_tensor is None
    )


def fake_tensor(
    like: FakeTensor, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, *, begin: Any = None
) -> FakeTensor:
    """A fake tensor on the device of another, made as torch makes those whose types it has cached.

    Args:
        like: The other one.
        shape: Sizes.
        strides: In elements.
        dtype: Of the elements.
        begin: The first element in the memory of `like`, which is shared; `None` for memory of its own.
    """
    mode, device = like.fake_mode, like.device
    with in_kernel_invocation_manager(mode):
        if begin is None:
            made = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        else:
            made = torch.empty((), dtype=dtype, device="meta")
            made.set_(like.untyped_storage(), begin, shape, strides)
    return FakeTensor(mode, made, device)


def memory_id(tensor: torch.Tensor) -> int:
    """A number that tensors share which are views of one memory; fake tensors have memory in this sense, too."""
    held = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return held.untyped_storage()._cdata


def move_hooks(old: torch.Tensor, new: torch.Tensor) -> None:
    """Gives `new` the gradient hooks that users registered on `old`."""
    for hook in (old._backward_hooks or {}).values():
        new.register_hook(hook)
    for hook in (getattr(old, "_post_accumulate_grad_hooks", None) or {}).values():
        new.register_post_accumulate_grad_hook(hook)


def backward_in_progress() -> int:
    """A number that identifies the backward pass that this thread is running; -1 outside of any."""
    return torch._C._current_graph_task_id()


def below_autograd() -> AbstractContextManager[None]:
    """Operators called inside go straight to their device's implementation."""
    return torch._C._AutoDispatchBelowAutograd()  # type: ignore[no-any-return, unused-ignore]


def is_accumulated_in_this_backward(leaf: torch.Tensor) -> bool:
    """Whether the backward pass that this thread is running puts a gradient into `leaf.grad`."""
    node = torch.autograd.graph.get_gradient_edge(leaf).node
    return torch._C._will_engine_execute_node(node)


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Whether users registered hooks on a parameter's gradient."""
    return bool(parameter._backward_hooks) or bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def after_this_backward(call: Callable[[], None]) -> None:
    """Calls `call` when the backward pass that this thread is running has made all gradients."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def is_saved_by_autograd(tensor: torch.Tensor) -> bool:
    """Whether something besides the Python object holds a leaf: an autograd graph that has read it."""
    return tensor._use_count() > 1  # type: ignore[attr-defined]


def own_gradient(leaf: torch.Tensor) -> torch.Tensor | None:
    """What autograd has accumulated into a leaf, whatever its class says `.grad` is."""
    with plain_torch_functions():
        return _GRAD.__get__(leaf)


def clear_own_gradient(leaf: torch.Tensor) -> None:
    """Forgets what autograd has accumulated into a leaf, whatever its class says `.grad` is."""
    with plain_torch_functions():
        _GRAD.__set__(leaf, None)


def allow_any_gradient_dtype(leaf: torch.Tensor) -> None:
    """Lets `leaf.grad` have another dtype than the leaf."""
    leaf.grad_dtype = None  # type: ignore[attr-defined, unused-ignore]  # newer than some stubs


def by_device_and_dtype(
    tensors: Iterable[torch.Tensor],
) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    """Tensors in their order, grouped as the operators below take them."""
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return groups


def foreach_norm(tensors: list[torch.Tensor], order: float, dtype: torch.dtype) -> list[torch.Tensor]:
    """The norm of each of some tensors of one dtype, accumulated and returned in `dtype`."""
    return list(torch._foreach_norm(tensors, order, dtype=dtype))


def foreach_mul_(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiplies tensors of one device and dtype in place by a 0-d tensor of theirs."""
    torch._foreach_mul_(tensors, factor)


def unscale_and_check(tensors: list[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """Multiplies tensors of one device and dtype in place; sets `found_inf` to 1 if a value is not finite."""
    torch._amp_foreach_non_finite_check_and_unscale_(tensors, found_inf, inv_scale)


def plain_torch_functions() -> Any:
    """A context in which `__torch_function__` of subclasses is not asked."""
    return torch._C.DisableTorchFunctionSubclass()


def fake_store() -> dist.Store:
    """The store of a default group of backend "fake", whose other ranks do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    return FakeStore()


def default_store() -> dist.Store:
    """The store through which the ranks of the default process group found each other."""
    return dist.distributed_c10d._get_default_store()


def resolve_group(name: str) -> dist.ProcessGroup | None:
    """The process group that is registered under `name`, or `None`."""
    try:
        return _resolve_process_group(name)  # type: ignore[arg-type, unused-ignore]
    except RuntimeError:
        return None


_SERIAL_GLOO = "fsdp_serial_gloo"


def serial_gloo_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A second gloo group of the same ranks whose collectives run one after the other, on one thread.

    Gloo runs the collectives of a group on two threads, and with several in flight it corrupts its heap now and then
    (`docs/versions.md`). Collectives still run beside computation. The number of threads can only be set on the backend
    itself: `new_group` does not pass options on to gloo.
    """
    if _SERIAL_GLOO not in dist.Backend.backend_list:
        dist.Backend.register_backend(_SERIAL_GLOO, _make_serial_gloo, devices=["cpu"])
    ranks = dist.get_process_group_ranks(group)
    made = dist.new_group(ranks, backend=f"cpu:{_SERIAL_GLOO}", use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made


def _gloo_devices() -> list[Any]:
    """What gloo listens on: the interfaces that its variable names, as in torch's own groups, or the default."""
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if not names:
        return [dist.ProcessGroupGloo.create_default_device()]
    return [dist.ProcessGroupGloo.create_device(interface=name) for name in names]


def _make_serial_gloo(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = _gloo_devices()
    options._threads = 1
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, size, options)


def register_group_alias(name: str, group: dist.ProcessGroup) -> None:
    """Registers a second, rank-independent name under which graphs find `group`."""
    _register_process_group(name, group)  # type: ignore[arg-type, unused-ignore]


def root_frame_locals() -> Mapping[str, Any] | None:
    """Locals of the frame that Dynamo is compiling right now."""
    translator = _root_translator()
    return None if translator is None else translator.f_locals


def root_frame_globals() -> Mapping[str, Any]:
    """Globals of the frame that Dynamo is compiling right now."""
    translator = _root_translator()
    return {} if translator is None else translator.f_globals


def caller_of_root_frame() -> FrameType | None:
    """The Python frame that called the function which Dynamo is compiling right now."""
    translator = _root_translator()
    stack = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        stack.append(frame)
        frame = frame.f_back
    compiling = [i for i, f in enumerate(stack) if f.f_code.co_filename == convert_frame.__file__]
    above = stack[compiling[-1] + 1 :] if compiling else []
    return next((f for f in above if translator is None or f.f_code is not translator.f_code), None)


def restart_trace() -> TensorifyScalarRestartAnalysis:
    """The exception that makes Dynamo trace the current frame again from its start.

    Dynamo lets this one kind pass unchanged through a backend call. The log of earlier graph breaks is cleared, since
    the new trace sees other classes and takes other paths.
    """
    translator = _root_translator()
    if translator is not None:
        translator.speculation_log.clear()
    return TensorifyScalarRestartAnalysis(restart_reason="fsdp_compile sharded the model")


def _root_translator() -> Any:
    try:
        return symbolic_convert.InstructionTranslator.current_tx()
    except AttributeError:
        return None


def backend_of(compiled: OptimizedModule) -> object:
    """The function that was given to `torch.compile`, or looked up by the name that was."""
    found: Any = getattr(compiled.dynamo_ctx, "callback", None)
    while hasattr(found, "_torchdynamo_orig_backend"):
        found = found._torchdynamo_orig_backend
    return getattr(found, "compiler_fn", found)


def was_looked_at(code: types.CodeType) -> bool:
    """Whether Dynamo has tried to compile a function since it was last reset, whatever became of that."""
    return code in convert_frame.input_codes


def calls_are_compiled() -> bool:
    """Whether Dynamo looks at the frames that this thread enters."""
    return callable(get_eval_frame_callback())


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Adds a text to torch's structured trace, which tlparse shows; `text` is called only if a trace is written."""
    trace_structured_artifact(name, "string", payload_fn=text)


def let_size_vary(tensor: torch.Tensor, dim: int) -> None:
    """Asks Dynamo to trace a dimension as a symbol; it may still find out that only one size is possible."""
    torch._dynamo.maybe_mark_dynamic(tensor, dim)  # type: ignore[no-untyped-call, unused-ignore]


def symbol_of(size: int | torch.SymInt) -> sympy.Symbol | None:
    """The symbol that was made for a size, also if it has turned out to have one value only."""
    made = size.node._expr if isinstance(size, torch.SymInt) else None
    return made if isinstance(made, sympy.Symbol) else None


def source_prefixes(placeholder: fx.Node) -> list[str]:
    """Expressions over `L` (locals) and `G` (globals) that lead to a graph input, shortest first, itself last."""
    source = getattr(placeholder, "_dynamo_source", None)
    found: list[str] = []
    while source is not None:
        name = source.name
        found.append(name() if callable(name) else name)  # a method up to 2.11, a property later
        source = getattr(source, "base", None)
    return found[::-1]
