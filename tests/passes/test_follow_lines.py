"""Which parameters of this rank's collectives are those in another rank's messages."""

from __future__ import annotations

from fsdp_compile.passes.bucketing.follow_lines import _keys


def test_parameters_of_one_name_in_one_message_have_the_keys_of_single_ones() -> None:
    (joined,) = _keys(["forward: all_gather_into_tensor of 0, 0 (128 float32)"])
    first, second = _keys(["forward: all_gather_into_tensor of 0 (64 float32)"] * 2)
    assert joined == [*first, *second]
    assert first != second
