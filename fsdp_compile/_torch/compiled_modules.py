"""Which modules are compiled: wrapped by `torch.compile(module)`, or in place by `module.compile()`.

torch tells of neither. Of the first there is a trace, since `torch.compile` registers the module as a child of the one
that it returns, in that one's `__init__`. The second leaves a compiled function in the module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch._dynamo import trace_rules
from torch.nn.modules.module import register_module_module_registration_hook

from fsdp_compile._torch.dynamo import GivenBackend, OptimizedModule, calls_under_way, given_backend


def after_each_compile_of_a_module(
    backend: object, call: Callable[[OptimizedModule, nn.Module, Mapping[str, Any] | None], None]
) -> None:
    """Tells of each module that is wrapped from now on.

    Args:
        backend: The function that Dynamo calls.
        call: Called with what `torch.compile(module)` is about to return, the module, and the options, if it is for
            `backend`.
    """

    def registered(module: nn.Module, name: str, child: nn.Module | None) -> None:
        if isinstance(module, OptimizedModule) and name == "_orig_mod" and child is not None:
            # It may still be in its `__init__`.
            calls = calls_under_way(OptimizedModule.__init__.__code__)
            made = next((call["dynamo_ctx"] for call in calls if call["self"] is module), None)
            given = given_backend(vars(module).get("dynamo_ctx") or made)
            if given.function is backend:
                call(module, child, given.options)

    register_module_module_registration_hook(registered)


def hooks_are_traced(module: nn.Module) -> bool:
    """Whether a module is of a class of torch: Dynamo starts no graph in its forward, but around its wrapped form."""
    return bool(trace_rules.check(module.forward))


def compiled_in_place(module: nn.Module) -> GivenBackend | None:
    """What `module.compile()` was given; `None` for other modules, and where no graph starts."""
    call = module._compiled_call_impl
    cells = dict(zip(call.__code__.co_freevars, getattr(call, "__closure__", None) or (), strict=False)) if call else {}
    if "callback" not in cells or hooks_are_traced(module):
        return None
    return given_backend(cells["callback"].cell_contents)
