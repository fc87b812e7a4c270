"""Operators `torch.ops.fsdp_compile.*`: schemas, fakes, and kernels without state."""

from fsdp_compile.ops import comm_hook, effects, embedding, host_copy, post_forward, quantize, unshard

__all__ = ["comm_hook", "effects", "embedding", "host_copy", "post_forward", "quantize", "unshard"]
