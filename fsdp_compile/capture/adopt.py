"""Takes over models that torch's `fully_shard` has sharded, before their compiled form is traced or called first.

FSDP2 registers hooks on modules, which `torch.compile(model)` runs before the forward that it compiles. So a model that
is wrapped already is taken over when its compiled form is called, before they run. Others are taken over when Dynamo is
about to compile a frame that reaches them, if no hooks have run yet but those of the module whose forward it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from fsdp_compile._torch.dynamo import OptimizedModule, backend_of, caller_of_root_frame
from fsdp_compile.capture.first_call import check_before_compiled_calls, modules_on_the_stack
from fsdp_compile.modules.forward import in_forward_until_return
from fsdp_compile.runtime.module_state import is_sharded
from fsdp_compile.sharding.adopt import is_any_wrapped, is_wrapped
from fsdp_compile.sharding.fully_shard import adopt_wrapped
from fsdp_compile.sharding.views import pre_forward


def adopt_before_calls(backend: object) -> None:
    """Takes over each model that is given to `torch.compile` from now on, if torch's `fully_shard` has sharded it.

    Args:
        backend: The function that Dynamo calls; models of other backends are left alone.
    """

    def registered(module: nn.Module, _name: str, child: nn.Module | None) -> None:
        if isinstance(module, OptimizedModule) and child is not None and is_any_wrapped(child):
            _adopt_at_first_call(module, child, backend)

    register_module_module_registration_hook(registered)


def adopt_reached(modules: Iterable[nn.Module], starting: nn.Module | None = None) -> None:
    """Takes over what torch's `fully_shard` has sharded in some modules that compiled code reaches.

    Args:
        modules: These modules.
        starting: The one whose forward is about to be compiled, and called then.

    Raises:
        ConfigError: As `adopt_wrapped`; also if a module that is being called was sharded so and has begun its forward.
        UnsupportedModelError: As `adopt_wrapped`.
    """
    called = [module for module in modules_on_the_stack() if is_wrapped(module)]
    for module in (*called, *modules):
        if adopt_wrapped(module, starting):
            check_before_compiled_calls(module)
            if starting is not None and is_sharded(starting):
                in_forward_until_return(caller_of_root_frame())


def _adopt_at_first_call(compiled: nn.Module, module: nn.Module, backend: object) -> None:
    @torch.compiler.disable
    def before_call(caller: nn.Module, _args: Any) -> None:
        # When it was registered, the backend was not known yet.
        if isinstance(caller, OptimizedModule) and backend_of(caller) is backend:
            adopt_reached([module])
            if is_sharded(module):  # its class had no forward of ours yet when this call began
                pre_forward(module)
        handle.remove()

    handle = compiled.register_forward_pre_hook(before_call)
