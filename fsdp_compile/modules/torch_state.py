"""The state of a sharded module as torch's own functions for `FSDPModule`s use it.

`torch.distributed.fsdp.register_fsdp_forward_method` and `share_comm_ctx`, and the stages of
`torch.distributed.pipelining`, ask a module for its `FSDPState` and call a few of its methods.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fsdp_compile._torch.composable import note_fully_shard
from fsdp_compile._torch.dynamo import skip_code, stack
from fsdp_compile.config.casts import FullPrecision
from fsdp_compile.errors import ConfigError, UnsupportedModelError
from fsdp_compile.modules.casts import cast_inputs, cast_output
from fsdp_compile.modules.forward import enter_method, leave_method
from fsdp_compile.runtime.module_state import ensure_state, state_of
from fsdp_compile.runtime.post_backward import post_backward_final_callback
from fsdp_compile.runtime.units import ModelState


class TorchState:
    """What torch asks the `FSDPState` of a module for. Names and arguments are torch's."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        # Collectives run on the streams of their process groups, and their memory is that of the stream which computes:
        # there is nothing else that `share_comm_ctx` could share.
        self._comm_ctx: object = None

    @property
    def _fsdp_param_groups(self) -> Sequence[object]:
        """None: `_root_post_backward_final_callback` does the work of all groups."""
        return ()

    @property
    def _state_ctx(self) -> TorchState:
        return self

    @property
    def all_states(self) -> Sequence[TorchState]:
        """Of torch's `_state_ctx`: the states whose groups a pipeline stage reduces."""
        return (self,)

    def _root_post_backward_final_callback(self) -> None:
        """Reduces what the microbatches of a pipeline stage have accumulated."""
        module = self._module()
        model = None if module is None else ensure_state(module).model
        if model is not None:
            _refuse_split_backward(model)
            post_backward_final_callback(model)

    def _pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Enters a method that `register_fsdp_forward_method` made a forward, until torch's function returns."""
        if not torch.compiler.is_compiling():
            frames = stack()
            next(frames)  # this function's
            enter_method(module, next(frames))
        casts: Any = module._fsdp_casts
        if isinstance(casts, FullPrecision):
            raise ConfigError(
                "a module that mixed precision excludes has a registered forward method",
                where=f"register_fsdp_forward_method({type(module).__name__})",
                instead="the module's forward",
            )
        return (args, kwargs) if casts is None else cast_inputs(casts, module, (args, kwargs))

    def _post_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Leaves such a method, which has returned."""
        if not torch.compiler.is_compiling():
            frames = stack()
            next(frames)
            leave_method(next(frames))
        casts: Any = module._fsdp_casts
        return output if casts is None else cast_output(casts, (args, {}), output)


def _refuse_split_backward(model: ModelState) -> None:
    """Raises `UnsupportedModelError` if a pipeline stage ran backward passes that made no gradients of parameters."""
    # A stage calls set_is_last_backward(False) before each backward of a microbatch. Where a schedule splits backward,
    # it asks autograd for the gradients of inputs, and later of `module.parameters()`, which are no leaves of the
    # graph: the flat parameters are.
    announced, model.announced_backwards = model.announced_backwards, 0
    made, model.backwards_with_grads = model.backwards_with_grads, 0
    is_trained = any(group.flat_param.requires_grad for unit in model.units for group in unit.param_groups)
    if is_trained and announced > made:
        raise UnsupportedModelError(
            f"{announced - made} of {announced} backward passes of a pipeline stage made no gradients of parameters: "
            "the schedule splits backward into one for inputs and one for weights",
            where="torch.distributed.pipelining, a zero-bubble schedule",
            instead="a schedule with whole backward passes: ScheduleInterleaved1F1B, Schedule1F1B, ScheduleGPipe",
        )


def torch_state(module: nn.Module) -> TorchState | None:
    """The state of a module that `fully_shard` was called on."""
    state = state_of(module)
    return None if state is None else state.for_torch


def show_to_torch(module: nn.Module) -> None:
    """Gives a module the state that torch's functions for `FSDPModule`s use."""
    state = TorchState(module)
    ensure_state(module).for_torch = state
    note_fully_shard(module, state)


# Run eagerly they find the frame of their caller, which Dynamo cannot trace; inlined from other code they are traced.
skip_code(TorchState._pre_forward.__code__)
skip_code(TorchState._post_forward.__code__)
