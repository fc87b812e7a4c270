"""Tests of fsdp_compile; a package, so that rank processes can import them by name."""
