"""A plan for another number of ranks, or as formulas."""
