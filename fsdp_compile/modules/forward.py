"""The forward of a sharded module. Inside of one, compiled or eager, reads of parameters gather."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fsdp_compile._torch.autograd import backward_in_progress
from fsdp_compile._torch.dynamo import call_of, is_on_stack, modules_being_called, skip_code
from fsdp_compile._torch.eval_frame import Compiler, call_compiled_by, calls_are_compiled, compiler_of_calls
from fsdp_compile.errors import UnsupportedModelError
from fsdp_compile.layout.profiler_ranges import Range, profiled
from fsdp_compile.modules.casts import Arguments, cast_inputs, cast_output
from fsdp_compile.modules.eager_reads import check_reads, hide_values, reads, show_values
from fsdp_compile.modules.stored_shards import refusal_of_shards
from fsdp_compile.runtime import checked_groups, read_order
from fsdp_compile.runtime.module_state import CompiledForward, state_of

_depth = threading.local()
_first_call = threading.local()


def in_forward() -> bool:
    """Whether this thread is inside the forward of a sharded module that runs eagerly."""
    return getattr(_depth, "value", 0) > 0 or _in_first_call()


def in_block_without_grad() -> bool:
    """Whether this thread has turned gradients off since it entered the outermost forward that runs eagerly."""
    return not torch.is_grad_enabled() and getattr(_depth, "had_grad", True)


def in_forward_until_return(frame: types.FrameType | None) -> None:
    """Counts as inside a forward until `frame` returns."""
    # The first call of a plain model entered its forward before anything was sharded: nothing has raised the depth.
    if frame is None or _in_first_call():  # which returns after this one
        return
    if not in_forward():
        _begin_outermost()
        checked_groups.forget()  # what a forward has left that failed before it began
    _first_call.frame = frame


def in_first_call(module: nn.Module, frame: types.FrameType | None) -> None:
    """Counts as inside a forward of a module that was sharded in its first call, until `frame` returns."""
    in_forward_until_return(frame)
    state = state_of(module)
    if frame is not None and state is not None and state.model is not None:
        # Else each part behind a graph break would check itself, and compare with other ranks in between.
        state.model.pre_forward(module)


def in_forward_during(module: nn.Module, frame: types.FrameType | None) -> None:
    """Counts as inside a forward until the running call of `module` returns, whose forward pre-hooks run now.

    Unlike `in_forward_until_return` alone, it does not keep the frame of the call, and with it what the call was given.
    """
    in_first_call(module, frame)
    running = [frame]

    def leave(_module: nn.Module, _args: Any, output: Any) -> None:
        if running and getattr(_first_call, "frame", None) is running[0]:
            _end_first_call()
        running.clear()
        if output is not None:  # else the call may have failed, and torch is going through these hooks
            handle.remove()

    skip_code(leave.__code__)
    handle = module.register_forward_hook(leave, always_call=True)


def _begin_outermost() -> None:
    # Reads of a call that an exception has ended may be left.
    reads.__dict__.clear()
    _depth.had_grad = torch.is_grad_enabled()


def _in_first_call() -> bool:
    waited_for = getattr(_first_call, "frame", None)
    if waited_for is None:
        return False
    if not is_on_stack(waited_for):
        _end_first_call()
        return False
    return True


def _end_first_call() -> None:
    _first_call.frame = None
    checked_groups.forget()


def call_in_forward(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls `function` as a forward, so that reads of sharded parameters in it gather."""
    _depth.value = getattr(_depth, "value", 0) + 1
    if _depth.value == 1 and not _in_first_call():
        _begin_outermost()
    try:
        output = function(*args, **kwargs)
    except RuntimeError as error:
        check_reads()  # a write into a gathered parameter may be why
        if (refusal := refusal_of_shards(error)) is not None:
            raise refusal from error
        raise
    else:
        if _depth.value == 1 and reads.__dict__:
            check_reads()
        if _depth.value == 1:
            read_order.compare_after_forward()
        return output
    finally:
        _depth.value -= 1
        if _depth.value == 0:
            reads.__dict__.clear()
            if not _in_first_call():
                checked_groups.forget()


def forward(self, *args, **kwargs):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN002, ANN003, ANN201
    """The `forward` of a sharded module's class."""
    if not torch.compiler.is_compiling():
        return run_eagerly(self, args, kwargs)
    # Looked up in each call: the class may get another forward, as when it is patched.
    return _trace(self, self._fsdp_original_class.forward, (self,), args, kwargs)


def _entering(own: Callable[..., Any]) -> Any:
    """A forward for a module's instance that calls `own`, in which reads gather."""

    # Not one function for all: `own` may call the forward that it has replaced, which may be one of these.
    def forward(self, *args, **kwargs):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN002, ANN003, ANN202
        if not torch.compiler.is_compiling():
            return run_eagerly(self, args, kwargs, own)
        return _trace(self, own, (), args, kwargs)

    functools.update_wrapper(forward, own)
    del forward.__wrapped__  # type: ignore[attr-defined]  # it is bound, and this is not
    with contextlib.suppress(TypeError, ValueError):  # of callables without a signature
        forward.__signature__ = _with_self(inspect.signature(own))  # type: ignore[attr-defined]
    return forward


def _with_self(signature: inspect.Signature) -> inspect.Signature:
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    return signature.replace(parameters=[itself, *signature.parameters.values()])


def enter_own_forward(module: nn.Module) -> bool:
    """Makes reads gather in a forward that the user assigned to the instance, which hides the class's.

    Returns:
        Whether there is one in which they did not yet.
    """
    own = module.__dict__.get("forward")
    if own is None or getattr(own, "__code__", None) is _ENTERING:
        return False
    object.__setattr__(module, "forward", types.MethodType(_entering(own), module))
    return True


def enter_running_forward() -> bool:
    """Enters a forward that was assigned to a module after it was sharded, if one runs now; returns whether one does.

    Assigning it calls nothing of this package: the first read in its first call is where it is noticed.
    """
    called = [module for module in modules_being_called() if module is not None and state_of(module) is not None]
    entered = [module for module in called if enter_own_forward(module)]
    frame = call_of(entered[-1]) if entered else None
    if frame is None:
        return False
    enter_method(entered[-1], frame)
    return True


def _trace(self, forward, bound, args, kwargs):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    casts = self._fsdp_casts
    if casts is None:
        return forward(*bound, *args, **kwargs)
    cast_args, cast_kwargs = cast_inputs(casts, self, (args, kwargs))
    return cast_output(casts, (args, kwargs), forward(*bound, *cast_args, **cast_kwargs))


def run_eagerly(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], own: Callable[..., Any] | None = None
) -> Any:
    """Runs a forward eagerly, the class's or the instance's `own`; compiled graphs may start around or below it."""
    outermost = not in_forward()
    # Once per step: modules below it are checked with it.
    shown = []
    if outermost or not _is_checked(module):
        shown = _pre_forward(module)
    elif calls_are_compiled():  # after a graph break: values that were swapped in since
        shown = _show_values(module)
    casts = module._fsdp_casts
    given: Arguments = (args, kwargs)
    if casts is not None:
        args, kwargs = torch.compiler.disable(cast_inputs)(casts, module, given)
    compiler, outermost = _as_before(module, outermost=outermost)
    called = own
    if called is None:
        entered = module._fsdp_outermost_forward if outermost else None
        called = types.MethodType(entered or module._fsdp_original_class.forward, module)
    try:
        if compiler is None:
            output = call_in_forward(called, args, kwargs)
        else:
            output = call_compiled_by(compiler, call_in_forward, called, args, kwargs)
    finally:
        if shown:
            hide_values(shown)
    return output if casts is None else torch.compiler.disable(cast_output)(casts, given, output)


def _as_before(module: nn.Module, *, outermost: bool) -> tuple[Compiler | None, bool]:
    """What is to compile a forward that activation checkpointing repeats now, and whether it was outermost before.

    Composable checkpointing works by hooks, at which graphs break, and the forward behind them is compiled. A backward
    is outside of compiled code, and a forward that it calls would save other tensors, uncompiled.
    """
    state = state_of(module)
    assert state is not None
    compiler = compiler_of_calls()
    if outermost and compiler is None and backward_in_progress() != -1:
        before = state.compiled_forward
        return (None, outermost) if before is None else (before.compiler(), before.is_outermost)
    state.compiled_forward = None if compiler is None else CompiledForward(weakref.ref(compiler), outermost)
    return None, outermost


def enter_method(module: nn.Module, frame: types.FrameType) -> None:
    """Makes reads gather in another method than `forward`, until the frame that calls it returns."""
    if in_forward() and _is_checked(module):
        return
    shown = _pre_forward(module)
    if shown:
        hide_values(shown)
        raise UnsupportedModelError(
            "a plain value stands in the place of a sharded parameter",
            where=f"parameter {shown[0][1]}, in a method that register_fsdp_forward_method() named",
            instead="call the module itself, or assign an nn.Parameter",
        )
    if not in_forward():
        in_forward_until_return(frame)


def leave_method(frame: types.FrameType) -> None:
    """Undoes `enter_method`, if the method that `frame` calls was the outermost."""
    if getattr(_first_call, "frame", None) is frame:
        _end_first_call()
        try:
            check_reads()
            read_order.compare_after_forward()
        finally:
            reads.__dict__.clear()


@torch.compiler.disable
def _is_checked(module: nn.Module) -> bool:
    """Whether the running forward has checked a module that it calls: one that it owns."""
    state = state_of(module)
    if state is None or state.model is None:
        return True
    return checked_groups.checked().issuperset((state.model, *(read.group for read in state.reads.values())))


@torch.compiler.disable
def _pre_forward(module: nn.Module) -> list[tuple[nn.Module, str]]:
    state = state_of(module)
    assert state is not None
    if not in_forward():
        checked_groups.forget()  # what a forward has left that failed before it began
    if state.model is not None:
        with profiled(Range.ROOT_PRE_FORWARD):
            state.model.pre_forward(module)
    return show_values(module) if state.view_check is None else []


_show_values = torch.compiler.disable(show_values)


def check_before_calls(caller: nn.Module, module: nn.Module) -> None:
    """Has the parameters of a sharded module checked before each call of `caller`, which enters its compiled code.

    The first of these calls has begun already.
    """
    shown: list[tuple[nn.Module, str]] = []

    def before_call(_caller: nn.Module, _args: Any) -> None:
        if not torch.compiler.is_compiling() and (not in_forward() or not _is_checked(module)):
            shown.extend(_pre_forward(module))

    def after_call(_caller: nn.Module, _args: Any, _output: Any) -> None:
        if shown:
            hide_values(shown)
            shown.clear()
        if not in_forward():
            checked_groups.forget()

    for hook in (before_call, after_call):
        skip_code(hook.__code__)
    caller.register_forward_pre_hook(before_call)
    caller.register_forward_hook(after_call, always_call=True)
    before_call(caller, ())


# Dynamo must not compile these frames by themselves: run eagerly they raise the depth that eager reads check, and the
# user's forward below them is compiled. Inlined from another frame, `forward` is traced like any function.
_ENTERING = _entering(nn.Module.forward).__code__
_functions = (
    call_in_forward,
    enter_running_forward,
    enter_method,
    forward,
    refusal_of_shards,
    run_eagerly,
    _as_before,
)
for _code in (_ENTERING, *(function.__code__ for function in _functions)):
    skip_code(_code)
