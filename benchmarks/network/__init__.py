"""Slow networks on one machine: an emulated one in one process, and a real one between two network namespaces."""
