"""Tests of `fsdp_compile/parameters`."""
