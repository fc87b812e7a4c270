"""Operators `torch.ops.fsdp_compile.*`: schemas, fakes, and kernels without state."""

from fsdp_compile.ops import (
    as_complex,
    comm_hook,
    effects,
    embedding,
    host_copy,
    post_forward,
    quantize,
    row_exchange,
    unshard,
)

__all__ = [
    "as_complex",
    "comm_hook",
    "effects",
    "embedding",
    "host_copy",
    "post_forward",
    "quantize",
    "row_exchange",
    "unshard",
]
