"""Benchmarks for one CUDA device, which plays rank 0 of an emulated world."""
