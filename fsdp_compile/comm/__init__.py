"""Meshes, process groups, and one-off collectives."""
