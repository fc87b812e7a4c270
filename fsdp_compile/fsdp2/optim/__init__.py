"""Optimizers and clipping of sharded parameters."""
