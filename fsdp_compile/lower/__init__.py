"""Compiles verified graphs to callables."""
