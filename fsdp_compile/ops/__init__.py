"""Operators `torch.ops.fsdp.*`: schemas, fakes, and kernels without state. Importing any of them registers all."""

from fsdp_compile.ops import comm_hook, effects, embedding, host_copy, post_forward, quantize, row_exchange, unshard

__all__ = ["comm_hook", "effects", "embedding", "host_copy", "post_forward", "quantize", "row_exchange", "unshard"]
