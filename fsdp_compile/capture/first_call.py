"""The first call of a compiled plain model: finds the model, and makes Dynamo trace it again.

A backend gets a graph and its inputs, not the model. The model is found on the Python stack below which Dynamo
compiles, and on the path on which Dynamo found a parameter. Both take private names of torch, see `_torch/dynamo.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx, nn
from torch.optim import LBFGS

from fsdp_compile._torch.dynamo import (
    OptimizedModule,
    arguments_of_modules,
    caller_of_root_frame,
    modules_being_called,
    optimizers_being_stepped,
    values_on_the_way,
)
from fsdp_compile._torch.tracing import restart_trace
from fsdp_compile.config.casts import FullPrecision
from fsdp_compile.errors import ConfigError
from fsdp_compile.modules.casts import changes_inputs
from fsdp_compile.modules.classes import original_class
from fsdp_compile.modules.forward import check_before_calls, in_forward_until_return
from fsdp_compile.runtime.module_state import state_of, stored_parameters


def compiled_modules() -> list[nn.Module]:
    """Modules that are being called right now by compiled code or as compiled modules, outermost first."""
    found: list[nn.Module] = []
    inside: list[nn.Module] = []
    # Where a graph break leaves a model's forward to Python, Dynamo compiles its children's forwards one by one: the
    # model is on the stack then, inside of the compiled call.
    for called in modules_being_called():
        if called is None:  # everything further in was called by compiled code
            found.extend(inside)
            inside.clear()
        elif isinstance(called, OptimizedModule):
            found.append(called._orig_mod)
        else:
            inside.append(called)
    return found[::-1]


def modules_on_the_stack() -> list[nn.Module]:
    """Modules that are being called right now, compiled or not, outermost first."""
    return [called for called in modules_being_called() if called is not None][::-1]


def check_compiled_calls(compiled: OptimizedModule, module: nn.Module) -> None:
    """Has the parameters of a module that was sharded after its compile checked before each call of its compiled form.

    Dynamo compiles the call of torch's own containers whole, and so the code that checks them in other forwards.
    """
    if (original_class(module).forward.__module__ or "").startswith("torch.nn."):
        check_before_calls(compiled, module)


def modules_on_the_way(placeholder: fx.Node) -> Iterator[nn.Module]:
    """Modules along the path on which Dynamo found a graph input, outermost first."""
    return (value for value in values_on_the_way(placeholder) if isinstance(value, nn.Module))


def refuse_missed_casts(sharded: nn.Module) -> None:
    """Refuses the call that has sharded a model whose inputs or outputs are to be cast: its forward has begun without.

    Raises:
        ConfigError: If the forward of a module in `sharded` runs already, and would have got or returned other dtypes.
    """
    for module, arguments in arguments_of_modules():
        state = state_of(module)
        if state is None or state.casts is None or module not in set(sharded.modules()):
            continue
        output = None if isinstance(state.casts, FullPrecision) else state.casts.output
        if changes_inputs(state.casts, module, arguments) or output is not None:
            raise ConfigError(
                "mixed precision casts what this module is called with or returns, and its first call had begun before "
                "it was sharded",
                where=f"{type(module).__name__}, options={{'mp_policy': ...}}",
                instead="fsdp_compile.fully_shard(model, mp_policy=...) before torch.compile(model, backend='fsdp')",
            )


def refuse_inside_lbfgs(module: nn.Module) -> None:
    """Raises `ConfigError` inside of a step of LBFGS that updates parameters of a module, which is about to be sharded.

    The step goes on with the plain parameters and with state that belongs to them.
    """
    for optimizer in optimizers_being_stepped():
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if isinstance(optimizer, LBFGS) and any(id(parameter) in held for parameter in stored_parameters(module)):
            raise ConfigError(
                "the first call of a compiled model shards it, in the middle of a step of LBFGS",
                where=f"LBFGS.step(closure), {type(module).__name__}",
                instead="fully_shard(model), or one call of the compiled model, before the first step",
            )


def trace_again() -> Exception:
    """The exception that makes Dynamo trace the frame again, which now reads from flat parameters."""
    # A forward that runs was entered before the model was sharded: until it returns, reads gather by themselves.
    if modules_on_the_stack():
        in_forward_until_return(caller_of_root_frame())
    return restart_trace()
