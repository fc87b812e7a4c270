"""Tests of `fsdp_compile/integrations`, and of frameworks that need nothing of it."""
