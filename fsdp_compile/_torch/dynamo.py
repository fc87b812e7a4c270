"""Private names of Dynamo, AOTAutograd and Inductor."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

import sympy
import torch
from torch import fx, nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo import config as dynamo_config
from torch._dynamo import convert_frame, graph_break, symbolic_convert, trace_rules
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.distributed import DDPOptimizer
from torch._dynamo.comptime import comptime
from torch._dynamo.eval_frame import OptimizedModule, skip_code
from torch._dynamo.exc import SkipFrame
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.descriptors import (
    PlainAOTInput,
    SavedForBackwardsAOTOutput,
    SavedForBackwardsNoVcCheckAOTOutput,
)
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, detect_fake_mode
from torch._inductor import config as inductor_config
from torch._inductor import list_mode_options
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._logging._internal import trace_structured_artifact
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule  # its code is made when it is asked for
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.checkpoint import CheckpointPolicy


def is_saved_for_backward(description: object) -> bool:
    """Whether AOTAutograd describes an output of a forward graph as saved for backward, not returned."""
    # Of the second, autograd does not check the version.
    return isinstance(description, SavedForBackwardsAOTOutput | SavedForBackwardsNoVcCheckAOTOutput)


def updated_input(description: object) -> object | None:
    """The description of the input that an output is the new value of, as AOTAutograd describes it."""
    return getattr(description, "mutated_input", None)


def index_among_inputs(placeholder: fx.Node, position: int) -> int | None:
    """Which input of Dynamo's graph a placeholder of AOTAutograd's is; `None` if it is none.

    Tensors taken out of a DTensor are described otherwise, and so are the tokens that keep operators with side effects
    (the error checks of `torch.linalg`, say) in their order: these come first, and are numbered by themselves.
    `position` is that of the placeholder, and its index where it is not described.
    """
    described = placeholder.meta.get("desc")
    if described is None:
        return position
    return described.idx if isinstance(described, PlainAOTInput) else None


def index_of_source(described: object) -> int | None:
    """Of which input of Dynamo's graph an output of AOTAutograd's backward is the gradient, by its description."""
    source = getattr(described, "grad_of", None)
    return source.idx if isinstance(source, PlainAOTInput) else None


_MODULE_CALLS = frozenset({"__call__", "_call_impl"})
"""Names of the functions through which modules are called: `nn.Module`'s, and those of `torch.compile(module)`."""
_FORWARDS = _MODULE_CALLS | {"forward", "_wrapped_call_impl"}
"""Names of the functions in which a forward runs."""
_CANNOT_TELL = (NameError, AttributeError, LookupError, TypeError, SyntaxError)
"""Raised by expressions of Dynamo that are no Python, or need names which only its guards have."""


def stack() -> Iterator[FrameType]:
    """The Python frames of this thread, the caller's first."""
    frame = sys._getframe().f_back
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_on_stack(waited_for: FrameType) -> bool:
    """Whether a frame has not returned, seen from the thread that runs it."""
    # No generator: this runs in forwards that Dynamo watches, and it refuses to start a graph in one.
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame is not waited_for:
        frame = frame.f_back
    return frame is not None


skip_code(is_on_stack.__code__)


def modules_being_called() -> Iterator[nn.Module | None]:
    """Modules whose calls this thread is in, innermost first, with `None` where a call entered compiled code."""
    for frame in stack():
        name = frame.f_code.co_name
        if name == "compile_wrapper":
            yield None
        elif name in _MODULE_CALLS and isinstance(called := frame.f_locals.get("self"), nn.Module):
            yield called


def call_of(module: nn.Module) -> FrameType | None:
    """The Python frame of the outermost call of a module that this thread is in."""
    calls = [f for f in stack() if f.f_code.co_name in _MODULE_CALLS and f.f_locals.get("self") is module]
    return calls[-1] if calls else None


def values_on_the_way(placeholder: fx.Node) -> Iterator[object]:
    """The values along the path by which Dynamo found a graph input in the frame that it compiles, outermost first."""
    translator = root_translator()
    # Dynamo writes the path as expressions over the frame's locals and globals, and evaluates them itself for guards.
    scope = {"L": {}, "G": {}} if translator is None else {"L": translator.f_locals, "G": translator.f_globals}
    expressions: list[str] = []
    source = getattr(placeholder, "_dynamo_source", None)
    while source is not None:
        name = source.name
        expressions.append(name() if callable(name) else name)  # a method up to 2.11, a property later
        source = getattr(source, "base", None)
    for expression in reversed(expressions):
        try:
            yield eval(expression, dict(scope))
        except _CANNOT_TELL:
            continue


def root_translator() -> Any:
    """What traces the frame; `None` if this thread runs neither Dynamo nor a backend that it has called."""
    try:
        return symbolic_convert.InstructionTranslator.current_tx()
    except AttributeError:
        return None


def leave_to_python(why: str) -> Exception | None:
    """The exception that makes Dynamo run the current frame, and later ones of its code, in Python, and log why.

    What the frame calls is compiled all the same. `None` if Dynamo was asked for one graph (`fullgraph=True`).
    """
    translator = root_translator()
    if translator is None or translator.one_graph or translator.error_on_graph_break:
        return None
    return SkipFrame(why)


def leave_while_traced(_: object) -> None:
    """For `comptime` in traced code: leaves the frame to Python, from its start, if that is allowed."""
    why = leave_to_python("fsdp_compile: a sharded parameter is replaced by a tensor")
    if why is not None:
        raise why


def is_tracing_python() -> bool:
    """Whether Dynamo is tracing the user's code on this thread; what a backend traces after it does not count."""
    translator = root_translator()
    return translator is not None and not translator.output.should_exit


@torch.compiler.assume_constant_result  # type: ignore[no-untyped-call, unused-ignore]
def traces_a_forward() -> bool:
    """Whether what Dynamo traces here is a part of a module's forward; for code that it traces."""
    if any(frame.name in _FORWARDS for frame in TracingContext.extract_stack()):
        return True
    return any(f.f_code.co_name in _FORWARDS and isinstance(f.f_locals.get("self"), nn.Module) for f in stack())


def compiler_of_calls() -> Callable[..., Any] | None:
    """What compiles the Python frames that this thread enters (a backend with its settings), if Dynamo watches them."""
    callback = get_eval_frame_callback()
    return callback if callable(callback) else None


class GivenBackend(NamedTuple):
    """The function that was given to `torch.compile`, or found by the given name, with its options and mode."""

    function: object
    options: Mapping[str, Any] | None
    mode: str | None


def given_backend(wrapped: Any) -> GivenBackend:
    """What a context of `torch.compile`, or a callback of Dynamo for frames, compiles with."""
    wrapped = getattr(wrapped, "callback", wrapped)
    while hasattr(wrapped, "_torchdynamo_orig_backend"):
        wrapped = wrapped._torchdynamo_orig_backend
    if isinstance(splitter := getattr(wrapped, "__self__", None), DDPOptimizer):  # inside of a forward of DDP
        return given_backend(splitter.backend_compile_fn)
    given = getattr(wrapped, "kwargs", {})
    return GivenBackend(getattr(wrapped, "compiler_fn", wrapped), given.get("options"), given.get("mode"))


def after_each_compile_of_a_module(
    backend: object, call: Callable[[OptimizedModule, nn.Module, Mapping[str, Any] | None], None]
) -> None:
    """Calls a function when `torch.compile(module)` has made something for a backend: with it, the module, the options.

    torch tells of no compile, but this one registers the module as a child of what it makes.
    """

    def registered(module: nn.Module, name: str, child: nn.Module | None) -> None:
        if isinstance(module, OptimizedModule) and name == "_orig_mod" and child is not None:
            # It may still be in its `__init__`.
            calls = (f.f_locals for f in stack() if f.f_code is OptimizedModule.__init__.__code__)
            made = next((call["dynamo_ctx"] for call in calls if call["self"] is module), None)
            given = given_backend(vars(module).get("dynamo_ctx") or made)
            if given.function is backend:
                call(module, child, given.options)

    register_module_module_registration_hook(registered)


def is_of_torch(module: nn.Module) -> bool:
    """Whether the forward of a module is torch's own, in which Dynamo starts no graph: `torch.compile` wraps it."""
    return bool(trace_rules.check(module.forward))


def before_first_call(compiled: OptimizedModule, prepare: Callable[[OptimizedModule], None]) -> None:
    """Calls a function before what a compiled module is called with first reaches it, or any hook of it."""

    def called(*args: Any, **kwargs: Any) -> Any:
        prepare(compiled)
        del vars(compiled)["_compiled_call_impl"]
        return compiled._call_impl(*args, **kwargs)

    skip_code(called.__code__)
    vars(compiled)["_compiled_call_impl"] = called


def compile_parts_instead(compiled: OptimizedModule, parts: Sequence[nn.Module]) -> None:
    """Compiles parts of a module with the settings that it was compiled with, and leaves the module to Python."""
    # Parts of one class whose code reads what differs, as their number, take a graph each.
    dynamo_config.recompile_limit = max(dynamo_config.recompile_limit, 2 * len(parts))
    for part in parts:
        kind: Any = type(part)
        part._compiled_call_impl = functools.partial(compiled.dynamo_ctx(_call_of(kind)), part)
    vars(compiled)["forward"] = compiled._orig_mod.__call__


def _call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    # Dynamo starts no graph in the code of torch's own modules, but follows calls of it.
    return self._call_impl(*args, **kwargs)


@functools.cache
def _call_of(kind: type) -> Callable[..., Any]:
    """`_call` for the modules of one class: Dynamo counts compiles by code object, and by its name sizes that vary."""
    name = f"call of {kind.__module__}.{kind.__qualname__}"
    return types.FunctionType(_call.__code__.replace(co_name=name), globals())


class FrameToCompile(NamedTuple):
    """A frame that Dynamo compiles.

    Attributes:
        starts: The module whose forward the frame is, if it is one.
        modules: That one and those in its locals, in the variables that it closes over and in globals that it names:
            also in containers there, of methods, and in attributes of other objects that its code names.
    """

    starts: nn.Module | None
    modules: tuple[nn.Module, ...]


def before_each_compile(backend: object, call: Callable[[FrameToCompile], None]) -> None:
    """Calls a function with each frame before Dynamo compiles it, also if it then finds that it cannot or will not.

    An exception of the function ends the compile and reaches the caller of the compiled code. Frames that are compiled
    with another backend than `backend`, a function, are not described.
    """

    def describe() -> str:
        own = (f for f in stack() if f.f_code.co_filename == convert_frame.__file__)
        frame = next((f for f in own if f.f_code.co_name == "_compile"), None)
        given = None if frame is None else frame.f_locals
        if given is not None and given_backend(given["compiler_fn"]).function is backend:
            call(_frame_of(given["code"], given["locals"], given["globals"], given.get("closure")))
        return ""  # a user context, of which there is none

    # Callbacks at the start of a compile would not tell of frames past the recompile limit, and a reset forgets them.
    torch._dynamo.register_hook_for_recompile_user_context(describe)


def _frame_of(code: types.CodeType, passed: Any, namespace: Mapping[str, Any], closure: Any) -> FrameToCompile:
    passed = dict(passed)
    held = [*passed.values(), *(namespace[name] for name in code.co_names if name in namespace)]
    for cell in closure or ():
        with contextlib.suppress(ValueError):  # it is not set yet
            held.append(cell.cell_contents)
    unnamed: Sequence[object] = ()
    if code.co_flags & inspect.CO_VARARGS:
        # Those of a decorator's function in the place of a forward begin with the module.
        name = code.co_varnames[code.co_argcount + code.co_kwonlyargcount]
        unnamed = passed.get(name, ())  # a cell, which is no local, if a function inside reads it
    modules = (value for value in (*held, *unnamed) if isinstance(value, nn.Module))
    starts = next((each for each in modules if getattr(each.forward, "__code__", None) is code), None)

    held = [value.__self__ if isinstance(value, types.MethodType) else value for value in held]
    owners = [vars(value) for value in held if not isinstance(value, nn.Module) and hasattr(value, "__dict__")]
    found = [starts]
    for value in (*held, *(owner[name] for owner in owners for name in code.co_names if name in owner)):
        inside = value.values() if isinstance(value, dict) else value
        found += inside if isinstance(value, dict | list | tuple) else [value]
    return FrameToCompile(starts, tuple(dict.fromkeys(each for each in found if isinstance(each, nn.Module))))


def traced_module() -> nn.Module | None:
    """The module whose method is the frame that is compiled now; `None` in a function."""
    translator = root_translator()
    module = None if translator is None else translator.f_locals.get("self")
    return module if isinstance(module, nn.Module) else None


def ends_in_graph_break(gm: fx.GraphModule) -> bool:
    """Whether Dynamo's graph ends where Python goes on in the middle of the code, with another graph perhaps."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    return reason is not None and bool(reason.graph_break)


let_size_vary = torch._dynamo.maybe_mark_dynamic
"""Asks Dynamo to trace a dimension as a symbol; it may still find out that only one size is possible."""
keep_sizes_fixed = torch._dynamo.mark_static
"""Asks Dynamo to trace no size of a tensor as a symbol, as it never does for parameters."""


def symbol_of(size: int | torch.SymInt) -> sympy.Symbol | None:
    """The symbol that was made for a size, even if it turned out to have one value only."""
    made = size.node._expr if isinstance(size, torch.SymInt) else None
    return made if isinstance(made, sympy.Symbol) else None


def hint_of(size: torch.SymInt, largest_unknown: int) -> int:
    """The size at which a symbolic one was traced; of one that depends on data, the largest that is possible.

    Every rank must find the same number, so what the data was when it was traced does not count. `largest_unknown` is
    for symbols without a bound.
    """
    node = size.node
    if node.hint is not None:
        return int(node.hint)
    environment, values = node.shape_env, {}
    for symbol in node.expr.free_symbols:
        bound = environment.var_to_range[symbol].upper
        unknown = int(bound) if bound.is_finite and bound < largest_unknown else largest_unknown
        values[symbol] = environment.backed_var_to_val.get(symbol, unknown)
    return int(node.expr.xreplace(values))


def keep_address(tensor: torch.Tensor) -> None:
    """Tells compilers that a tensor stays where it is: CUDA graphs need not copy it, and Dynamo does not guard it."""
    torch._dynamo.mark_static_address(tensor, guard=False)  # type: ignore[no-untyped-call, unused-ignore]
