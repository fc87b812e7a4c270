"""Private names of torch's autograd."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from fsdp_compile._torch.fully_shard_params import HAS_GRAD_DTYPES

backward_in_progress: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward pass that this thread is running; -1 outside of any."""
profiler_runs: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined, unused-ignore]
"""Whether torch's profiler records what this thread does."""
below_autograd: Callable[[], AbstractContextManager[None]] = torch._C._AutoDispatchBelowAutograd
"""A context in which operators go straight to their device's kernels."""


@contextmanager
def outside_of_selective_checkpointing() -> Iterator[None]:
    """A context that is in no mode of selective checkpointing, which would look for each operator among its own."""
    modes = _get_current_dispatch_mode_stack()
    selects = any(isinstance(mode, _CachingTorchDispatchMode | _CachedTorchDispatchMode) for mode in modes)
    with _disable_current_modes() if selects else nullcontext():
        yield


@contextmanager
def outside_of_transforms() -> Iterator[None]:
    """A context that is in no `torch.func` transform and in no `torch.inference_mode()`, whatever is around it."""
    grad = torch.is_grad_enabled()
    with temporarily_clear_interpreter_stack(), torch.inference_mode(mode=False), torch.set_grad_enabled(grad):
        yield


def leave_unused_undefined(inputs: Iterable[object], outputs: Iterable[object]) -> None:
    """Makes the backward of a graph that AOTAutograd compiled get `None` instead of zeros for outputs without gradient.

    The inputs and outputs are those of one call.
    """
    others = {value.grad_fn for value in inputs if isinstance(value, torch.Tensor)}
    for value in outputs:
        node = value.grad_fn if isinstance(value, torch.Tensor) else None
        if node is None or node in others:  # an input that is returned
            continue
        if not _is_compiled(node) and node.next_functions:
            node = node.next_functions[0][0]  # a view, of what the graph has computed or of an input
        if node is not None and _is_compiled(node) and node not in others:
            node.set_materialize_grads(False)  # type: ignore[attr-defined]
            return


def _is_compiled(node: torch.autograd.graph.Node) -> bool:
    return type(node).__name__ == "CompiledFunctionBackward"


def after_this_backward(call: Callable[[], object]) -> None:
    """Calls `call` when the current backward pass has made all gradients."""
    torch.autograd.Variable._execution_engine.queue_callback(functools.partial(_call_in_python, call))


def after_outermost_backward(call: Callable[[], object]) -> None:
    """As `after_this_backward`, but when those end, too, in which it runs: reentrant checkpointing nests them."""

    def end() -> None:
        node: Any = torch._C._current_autograd_node()
        if node is None:
            call()
            return

        def after_node(*_: object) -> None:
            hook.remove()
            after_outermost_backward(call)

        hook = node.register_hook(after_node)

    after_this_backward(end)


@torch.compiler.disable
def _call_in_python(call: Callable[[], object]) -> None:
    # Dynamo watches a backward that a compiled function calls.
    call()


def is_saved_by_autograd(tensor: torch.Tensor) -> bool:
    """Whether an autograd graph has read a leaf and still refers to it."""
    # One use is the Python object's.
    return tensor._use_count() > 1  # type: ignore[attr-defined]


def allow_any_gradient_dtype(leaf: torch.Tensor) -> None:
    """Lets `leaf.grad` have another dtype than the leaf."""
    leaf.grad_dtype = None  # type: ignore[attr-defined, unused-ignore]  # newer than some stubs


def set_gradient_dtype(ctx: Any, dtype: torch.dtype | None) -> None:
    """Lets the gradient of a function's only output have a dtype that is not the output's; any for `None`.

    As FSDP2 does for gathered parameters since torch 2.15; before, nothing is set.
    """
    if HAS_GRAD_DTYPES:
        ctx.set_output_grad_dtype(dtype)


def will_accumulate(node: torch.autograd.graph.Node | None) -> bool:
    """Whether the backward that runs puts a gradient into the leaf of an AccumulateGrad node.

    False in `torch.autograd.grad`, which returns gradients of leaves.
    """
    if node is None:
        return False
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return False
