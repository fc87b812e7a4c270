"""Tells of modules that are compiled: wrapped by `torch.compile(module)`, or in place by `module.compile()`.

torch tells of neither. Of the first there is a trace, since `torch.compile` registers the module as a child of the one
that it returns, in that one's `__init__`. `nn.Module.compile` is replaced by a function that calls the original and
then tells.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch._dynamo import trace_rules
from torch._dynamo.backends import registry
from torch._dynamo.eval_frame import innermost_fn
from torch._dynamo.external_utils import wrap_inline
from torch.nn.modules.module import register_module_module_registration_hook

from fsdp_compile._torch.dynamo import OptimizedModule, calls_under_way, given_backend


def after_each_compile_of_a_module(
    backend: object,
    wrapped: Callable[[OptimizedModule, nn.Module], None],
    in_place: Callable[[nn.Module, Mapping[str, Any]], None],
) -> None:
    """Tells of each module that is compiled from now on.

    Args:
        backend: The function that Dynamo calls.
        wrapped: Called with what `torch.compile(module)` is about to return, and the module, if it is for `backend`.
        in_place: Called with a module that `module.compile(...)` has compiled, or is about to, and the arguments, for
            every backend: it takes the place of an earlier one.
    """

    def registered(module: nn.Module, name: str, child: nn.Module | None) -> None:
        if isinstance(module, OptimizedModule) and name == "_orig_mod" and child is not None:
            # It may still be in its `__init__`.
            calls = calls_under_way(OptimizedModule.__init__.__code__)
            made = next((call["dynamo_ctx"] for call in calls if call["self"] is module), None)
            if given_backend(vars(module).get("dynamo_ctx") or made).function is backend:
                wrapped(module, child)

    original = nn.Module.compile

    @functools.wraps(original)
    def compile_in_place(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        in_place(self, kwargs)

    register_module_module_registration_hook(registered)
    nn.Module.compile = compile_in_place  # type: ignore[method-assign]
    # The first compile of a process may import this package, and is under way then.
    for variables in calls_under_way(original.__code__):
        in_place(variables["self"], variables["kwargs"])


def hooks_are_traced(module: nn.Module) -> bool:
    """Whether graphs start around a compiled module, of a class of torch: Dynamo starts none in its forward."""
    return bool(trace_rules.check(module.forward))


def compile_around(module: nn.Module, arguments: Mapping[str, Any], before: Callable[[nn.Module], None]) -> None:
    """Lets a graph start around a module of a class of torch, compiled in place.

    `torch.compile(module)` does so, too.

    Args:
        module: Left as it is if its class is the user's.
        arguments: Of `module.compile`.
        before: What runs in Python before each call.
    """
    in_place = module._compiled_call_impl
    if in_place is None or not hooks_are_traced(module) or not isinstance(innermost_fn(in_place), types.MethodType):
        return
    compiled = torch.compile(wrap_inline(module._call_impl), **arguments)

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        before(module)
        return compiled(*args, **kwargs)

    module._compiled_call_impl = call


def is_backend(given: object, backend: Callable[..., Any]) -> bool:
    """Whether `torch.compile(backend=given)` compiles with a backend, which has its own name.

    The first compile by name may import the backend, and is then about to register it: nothing is looked up here.
    """
    found = registry._COMPILER_FNS.get(backend.__name__, backend) if given == backend.__name__ else given
    return found is backend
