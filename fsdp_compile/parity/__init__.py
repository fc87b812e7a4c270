"""Trains a compiled model and a reference on real processes and reports how far apart they are."""
