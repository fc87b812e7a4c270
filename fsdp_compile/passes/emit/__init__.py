"""Nodes that passes insert: all-gathers, reductions, host copies."""
