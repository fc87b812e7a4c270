"""A model, traced for a world that does not exist."""
