"""Runs the ported tests in this process: uncompiled with this package's `fully_shard`, or compiled with torch's."""

from __future__ import annotations

import functools
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._dynamo import trace_rules
from torch._dynamo.external_utils import wrap_inline
from torch.distributed import _composable, fsdp
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.utils.checkpoint import checkpoint

import fsdp_compile
from fsdp_compile.fsdp2.unit import Unit

GATHERED = "a compiled graph gathered"
"""Note of a test in which that happened."""


@functools.wraps(torch_fully_shard)
def compiling(module: Any, **kwargs: Any) -> Any:
    """torch's `fully_shard`, which then compiles the module, and no longer those in it."""
    result = torch_fully_shard(module, **kwargs)
    if isinstance(module, nn.Module):
        for part in module.modules():
            part._compiled_call_impl = None
        call = module._call_impl
        # As torch.compile(module) does: Dynamo starts no graph in a forward of torch's.
        call = wrap_inline(call) if trace_rules.check(module.forward) else call
        module._compiled_call_impl = torch.compile(call, backend="fsdp", options={"lower": "eager"})
    return result


def checkpointed(module: nn.Module) -> nn.Module:
    """What composable `checkpoint` does, whose hooks repeat a compiled forward outside of compiled code."""
    forward = module.forward
    module.forward = lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)
    return module


def main() -> None:
    """`python -m tests.torch_fsdp2.patched KIND WORK ARGUMENTS...`: the arguments are those of the runner in WORK.

    KIND is `compiled`, where outermost modules are compiled, or `uncompiled`.
    """
    kind, work = sys.argv.pop(1), Path(sys.argv.pop(1))
    sys.path[:0] = [str(work / "shim"), str(work / "port")]
    import fsdp_shim  # type: ignore[import-not-found]
    import torch.distributed._composable.fsdp as older
    from torch.testing._internal import common_fsdp

    shard: Any = fsdp_compile.fully_shard
    if kind == "compiled":
        shard = compiling
        fsdp_shim.MODE = kind  # counts of collectives are notes then: a graph needs fewer
        _composable.checkpoint = checkpointed  # type: ignore[assignment]
        begin_graph = Unit.begin_graph

        def noting(self: Unit) -> None:
            fsdp_shim.NOTES.append(GATHERED)
            begin_graph(self)

        Unit.begin_graph = noting  # type: ignore[method-assign]
    for place in (fsdp, fsdp._fully_shard, common_fsdp, older):
        place.fully_shard = shard  # type: ignore[attr-defined]
    sys.argv[0] = str(work / "shim" / "runner.py")
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
