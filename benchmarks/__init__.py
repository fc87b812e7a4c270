"""Benchmarks of `fsdp_compile` beside what torch offers, each one command; `python -m benchmarks` lists them."""
