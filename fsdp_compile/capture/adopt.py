"""Takes over models that torch's `fully_shard` has sharded, before their compiled form is traced or called first.

FSDP2 registers hooks on modules, which `torch.compile(model)` runs before the forward that it compiles. So a model that
is given to `torch.compile` is taken over when its compiled form is called, before they run. Others are taken over when
Dynamo is about to compile a frame that reaches them, if no hooks have run yet but those of the module whose forward it
is. Both are noticed by `watch_compiles`.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from fsdp_compile._torch.dynamo import caller_of_root_frame
from fsdp_compile.capture.first_call import modules_on_the_stack
from fsdp_compile.modules.forward import in_forward_until_return
from fsdp_compile.runtime.module_state import is_sharded
from fsdp_compile.sharding.adopt import is_wrapped
from fsdp_compile.sharding.fully_shard import adopt_wrapped


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
        if adopt_wrapped(module, starting) and starting is not None and is_sharded(starting):
            in_forward_until_return(caller_of_root_frame())
