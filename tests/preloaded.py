"""What ranks import, once for all of them: they are copies of the process that imports this. It starts no thread."""

from __future__ import annotations

import importlib

from tests.rank_worker import set_aside

for name in (
    "benchmarks._torch",
    "fsdp_compile.backend",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
):
    importlib.import_module(name)
set_aside()
