"""A plan, out of planned graphs."""
