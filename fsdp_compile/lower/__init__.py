"""From verified graphs to callables."""
