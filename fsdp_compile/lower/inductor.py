"""Lowering by Inductor, through its own entry point: nothing global is changed and nothing in torch is patched.

Two passes over Inductor's kernels keep them in the order of the graph. Inductor fuses kernels that read the same
memory, however far apart they are, and puts the result where the first one was. All that the last one needs is then
done before that: waits, and the matmuls after them.

    planned    %a, start of a reduction, wait, mm, %b          %a and %b read the same
    without    wait, mm, [%a %b], start of a reduction         it starts late
    with       %a, start of a reduction, wait, mm, %b          not fused, if the reduction sends %a
               start of a reduction, wait, mm, [%a %b]         else

Before fusion, each call of an operator (collectives and their waits, matmuls, attention) is made to depend on the one
before it: Inductor then refuses what would move one across another. A call also depends on reductions before it that
read what is freed there, as those for gradients of norms do. After it, each kernel is put right before its first
reader, or where its last part was if that is earlier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import fx

from fsdp_compile._torch import inductor as private
from fsdp_compile._torch.dynamo import (
    CustomPartitionerFn,
    compile_fx,
    compile_fx_inner,
    functorch_config,
    inductor_config,
)
from fsdp_compile.errors import ConfigError
from fsdp_compile.ir.graph import Phase
from fsdp_compile.lower.before_inductor import call_lookups, keep_matmuls, open_dequantize, write_before_waits
from fsdp_compile.lower.compiled_step import Compiled
from fsdp_compile.lower.once import compile_once
from fsdp_compile.lower.region import Region
from fsdp_compile.lower.written_order import compare, planned_calls
from fsdp_compile.ops.effects import CHECK_MESSAGE, POISON, UPDATE


class _InSettings:
    """What Inductor's settings, and its cache, accept in the place of functions."""

    VERSION = 3
    """To be counted up when a pass, a mark on nodes or `_torch/inductor.py` changes: the cache looks at this alone."""

    def uuid(self) -> str:
        return f"fsdp_compile.{type(self).__name__}.{self.VERSION}"

    def __repr__(self) -> str:
        return self.uuid()  # the same in all processes, for what compares settings as text

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        # Some settings are pickled into the cache's key.
        return str, (self.uuid(),)


class FixCalls(_InSettings, private.CustomSchedulerPass):
    """Before fusion: lets calls of operators depend on each other in their order."""

    def __call__(self, nodes: list[Any]) -> list[Any]:
        """Returns the nodes as they are, with more dependencies."""
        if nodes:
            private.run_in_order([node for node in nodes if private.calls_operator(node)])
            private.reduce_in_place(nodes)
            private.note_dependencies(nodes)
        return nodes


class PlaceLate(_InSettings, private.CustomSchedulerPass):
    """After fusion: puts each kernel where its last part was, or right before its first reader."""

    def __call__(self, nodes: list[Any]) -> list[Any]:
        """Returns the nodes in their new order."""
        sources = private.sources_of(nodes)
        place = {node: node.max_order for node in nodes}
        for node in reversed(nodes):
            for source in sources[node]:
                place[source] = min(place[source], place[node])
        # No node is behind one that reads it, and among equals the order stays, in which none is either.
        return sorted(nodes, key=place.__getitem__)


KEEP_OUR_ORDER: Final = {
    "_pre_fusion_custom_pass": FixCalls(),
    "_post_fusion_custom_pass": PlaceLate(),
    "reorder_for_peak_memory": False,
    "reorder_for_locality": False,
    "reorder_for_compute_comm_overlap": False,
    **private.COMBO_KERNELS_UNCHECKED,
    **private.COMMUNICATION_KEPT,
}
FEW_LAUNCHES: Final = {"max_pointwise_cat_inputs": 64}
"""One kernel joins the gradients of a unit out of up to so many messages; by default it is one each, beyond eight."""
FREE_AT_LAST_USE: Final = {"allow_buffer_reuse": False}
"""Keeps to the estimate of memory: a buffer that Inductor reuses is not free between its two uses."""


class _Partitioner(_InSettings, CustomPartitionerFn):
    """Ours; it need not be in the cache's key, which has the text of graphs after our passes."""

    def __init__(self, region: Region) -> None:
        self._region = region

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
        return self._region.partition(gm, joint_inputs, **kwargs)


def compile_with_inductor(
    gm: fx.GraphModule, inputs: Sequence[Any], region: Region, settings: Mapping[str, Any]
) -> Any:
    """Compiles a Dynamo graph with the user's settings of Inductor; `region` receives the graphs.

    Raises:
        ConfigError: If they have a partitioner, which would be replaced by ours.
    """
    if settings.get("custom_partitioner_fn", inductor_config.custom_partitioner_fn) is not None:
        raise ConfigError(
            "a partitioner was given, but this backend needs its own, which gathers parameters again in backward",
            where="options={'inductor': {'custom_partitioner_fn': ...}}, or torch._inductor.config",
            instead="leave it out; use torch.utils.checkpoint.checkpoint() to recompute activations in backward",
        )

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
        private.compute_readers_first(operator)
    patches = {**KEEP_OUR_ORDER, **FEW_LAUNCHES, **settings, "custom_partitioner_fn": _Partitioner(region)}
    # Its key has neither our passes nor our options, and would find graphs that were made with others.
    with functorch_config.patch(enable_autograd_cache=False):
        return compile_fx(gm, list(inputs), inner_compile=inner_compile, config_patches=patches)


def _text(gm: fx.GraphModule, inputs: Sequence[Any], settings: Mapping[str, Any]) -> str:
    """What a compiled graph depends on: the same on ranks that may share it, and other than that of other graphs."""
    kept = {name: value for name, value in settings.items() if name != "custom_partitioner_fn"}
    described = (  # of a tensor all but its elements; ranks that use devices of their own compile for them
        f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.device}"
        if isinstance(value, torch.Tensor)
        else str(value)
        for value in inputs
    )
    return "\n".join([str(sorted(kept.items())), *described, gm.code])
