"""Optimizer steps on whole flat shards."""
