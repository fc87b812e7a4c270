"""Runs the ported tests in this process, after torch's `fully_shard` was made to compile outermost modules."""

from __future__ import annotations

import functools
import runpy
import sys
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp import fully_shard as shard


@functools.wraps(shard)
def fully_shard(module: Any, **kwargs: Any) -> Any:
    """torch's, which then compiles the module, and no longer those in it."""
    result = shard(module, **kwargs)
    if isinstance(module, nn.Module):
        for part in module.modules():
            part._compiled_call_impl = None
        module.compile(backend="fsdp", options={"lower": "eager"})
    return result


def main() -> None:
    """`python -m tests.torch_fsdp2.compiled WORK ARGUMENTS...`: the arguments are those of the runner in WORK."""
    work = Path(sys.argv.pop(1))
    sys.path[:0] = [str(work / "shim"), str(work / "port")]
    import fsdp_shim  # type: ignore[import-not-found]
    import torch.distributed._composable.fsdp as older
    from torch.testing._internal import common_fsdp

    fsdp_shim.MODE = "compiled"  # counts of collectives are notes then: a graph needs fewer
    for place in (fsdp, fsdp._fully_shard, common_fsdp, older):
        place.fully_shard = fully_shard  # type: ignore[attr-defined]
    sys.argv[0] = str(work / "shim" / "runner.py")
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
