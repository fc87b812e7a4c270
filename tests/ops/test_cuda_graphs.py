"""Which operators of the package a CUDA graph may record: those that do the same on the device at each call."""

from __future__ import annotations

import pytest
import torch

import fsdp_compile.backend  # noqa: F401  defines the operators

RECORDED = {
    *("block_scales", "quantize", "dequantize", "post_forward_part", "poison"),
    # Graphs have something else in their place when they are compiled.
    *("unshard", "reduce_grad", "reduce_rows", "reshard"),
    *("shard_post_forward", "unshard_post_forward"),
}
UNRECORDED = {
    # The host waits for numbers of the device.
    *("look_up", "average_rows", "check_message"),
    # Code of the user's, and optimizers, whose settings change.
    *("hook_scatter", "hook_scatter_coalesced", "hook_reduce", "hook_reduce_coalesced", "update"),
    # An event that the host keeps.
    *("start_copy", "wait_copy"),
}


def test_every_operator_is_known_here() -> None:
    defined = {
        name.partition("::")[2] for name in torch._C._dispatch_get_all_op_names() if name.startswith("fsdp_compile::")
    }
    of_torch = {"all_gather_copy_in", "chunk_cat", "copy_", "split_with_sizes_copy"}  # FSDP2's are under the same name
    assert defined - of_torch == RECORDED | UNRECORDED


@pytest.mark.parametrize("name", sorted(RECORDED | UNRECORDED))
def test_what_the_host_takes_part_in_is_not_recorded(name: str) -> None:
    operator = getattr(torch.ops.fsdp_compile, name).default
    assert (torch.Tag.cudagraph_unsafe in operator.tags) == (name in UNRECORDED)
