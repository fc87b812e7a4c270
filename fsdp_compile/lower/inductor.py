"""Lowering by Inductor, through its own entry point: nothing global is changed and nothing in torch is patched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import fx

from fsdp_compile._torch.dynamo import (
    CustomPartitionerFn,
    compile_fx,
    compile_fx_inner,
    functorch_config,
    inductor_config,
)
from fsdp_compile._torch.inductor import COMBO_KERNELS_UNCHECKED, COMMUNICATION_KEPT, compute_readers_first
from fsdp_compile.errors import ConfigError
from fsdp_compile.ir.graph import Phase
from fsdp_compile.lower.before_inductor import call_lookups, keep_matmuls, open_dequantize, write_before_waits
from fsdp_compile.lower.compiled_step import Compiled
from fsdp_compile.lower.keep_order import KEEP_CALLS_IN_ORDER
from fsdp_compile.lower.once import compile_once
from fsdp_compile.lower.region import Region
from fsdp_compile.lower.written_order import compare, planned_calls
from fsdp_compile.ops.effects import CHECK_MESSAGE, POISON, UPDATE

KEEP_OUR_ORDER: Final = {
    "reorder_for_peak_memory": False,
    "reorder_for_locality": False,
    "reorder_for_compute_comm_overlap": False,
    **KEEP_CALLS_IN_ORDER,
    **COMBO_KERNELS_UNCHECKED,
    **COMMUNICATION_KEPT,
}
FEW_LAUNCHES: Final = {"max_pointwise_cat_inputs": 64}
"""One kernel joins the gradients of a unit out of up to so many messages; by default it is one each, beyond eight."""
FREE_AT_LAST_USE: Final = {"allow_buffer_reuse": False}
"""Keeps to the estimate of memory: a buffer that Inductor reuses is not free between its two uses."""


class _Partitioner(CustomPartitionerFn):
    """Our partitioner in the form that Inductor's settings accept."""

    def __init__(self, region: Region) -> None:
        self._region = region

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
        return self._region.partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> str:
        # Inductor's cache looks graphs up by their text after our passes, so the partitioner need not be in its key.
        return "fsdp_compile"

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        # The same for the settings themselves, which the cache pickles into its key.
        return str, (self.uuid(),)


def compile_with_inductor(
    gm: fx.GraphModule, inputs: Sequence[Any], region: Region, settings: Mapping[str, Any]
) -> Any:
    """Compiles a Dynamo graph with the user's settings of Inductor; `region` receives the graphs.

    Raises:
        ConfigError: If they have a partitioner.
    """
    _refuse_partitioner(settings)

    def inner_compile(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        phase = Phase.BACKWARD if kwargs.get("is_backward") else Phase.FORWARD
        if not region.steps:
            region.inference(gm)

        def compile_graph(messages: Sequence[Any]) -> Compiled:
            inputs = [*example_inputs, *messages]
            open_dequantize(gm.graph)
            call_lookups(gm.graph)
            write_before_waits(gm.graph)
            keep_matmuls(gm.graph)
            gm.recompile()  # caches look graphs up by their code
            planned = planned_calls(gm.graph)  # Inductor changes the graph
            text = _text(gm, inputs, patches)
            compiled = compile_once(text, lambda: compile_fx_inner(gm, inputs, **kwargs), patches)
            compare(planned, getattr(compiled, "source_code", ""), phase.value)
            return compiled

        return region.finish(gm, phase, compile_graph)

    for operator in (UPDATE, POISON, CHECK_MESSAGE):
        compute_readers_first(operator)
    patches = {**KEEP_OUR_ORDER, **FEW_LAUNCHES, **settings, "custom_partitioner_fn": _Partitioner(region)}
    # Its key has neither our passes nor our options, and would find graphs that were made with others.
    with functorch_config.patch(enable_autograd_cache=False):
        return compile_fx(gm, list(inputs), inner_compile=inner_compile, config_patches=patches)


def _refuse_partitioner(settings: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for a partitioner of the user's, which would be replaced by ours."""
    if settings.get("custom_partitioner_fn", inductor_config.custom_partitioner_fn) is not None:
        raise ConfigError(
            "a partitioner was given, but this backend needs its own, which gathers parameters again in backward",
            where="options={'inductor': {'custom_partitioner_fn': ...}}, or torch._inductor.config",
            instead="leave it out; use torch.utils.checkpoint.checkpoint() to recompute activations in backward",
        )


def _text(gm: fx.GraphModule, inputs: Sequence[Any], settings: Mapping[str, Any]) -> str:
    """What a compiled graph depends on: the same on ranks that may share it, and other than that of other graphs."""
    kept = {name: value for name, value in settings.items() if name != "custom_partitioner_fn"}
    # Ranks that use devices of their own compile for them.
    return "\n".join([str(sorted(kept.items())), *map(_described, inputs), gm.code])


def _described(value: Any) -> str:
    """What code depends on of an input: all but the elements of a tensor."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.device}"
    return str(value)
