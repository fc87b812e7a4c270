"""Tests of `fsdp_compile/capture`."""
