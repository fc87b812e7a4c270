"""Lowering operator by operator: the transformed graphs run as they are, neither decomposed nor fused."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import fx

from fsdp_compile._torch.dynamo import aot_autograd, functorch_config
from fsdp_compile.ir.graph import Phase
from fsdp_compile.lower.compiled_step import Compiled
from fsdp_compile.lower.region import Region


def compile_eagerly(gm: fx.GraphModule, inputs: Sequence[Any], region: Region) -> Any:
    """Makes a callable of a Dynamo graph that runs the transformed graphs; `region` receives the graphs."""

    def lower(gm: fx.GraphModule, _inputs: Sequence[Any], phase: Phase) -> Compiled:
        return region.finish(gm, phase, lambda _: boxed(fx.Interpreter(gm)))

    def inference(gm: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        region.inference(gm)
        return lower(gm, inputs, Phase.FORWARD)

    compiler = aot_autograd(
        fw_compiler=functools.partial(lower, phase=Phase.FORWARD),
        bw_compiler=functools.partial(lower, phase=Phase.BACKWARD),
        inference_compiler=inference,
        partition_fn=region.partition,
        decompositions={},
    )
    with functorch_config.patch(enable_autograd_cache=False):
        return compiler(gm, list(inputs))


def boxed(interpreter: fx.Interpreter) -> Compiled:
    """A callable that takes its arguments in a list and empties it, so that each is freed after its last use."""

    def run(args: list[Any]) -> Any:
        try:
            return interpreter.boxed_run(args)
        finally:
            # Else results would live until the next run, and autograd would copy gradients instead of taking them.
            interpreter.env.clear()

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
