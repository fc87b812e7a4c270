"""Traces a model for ranks that do not exist."""
