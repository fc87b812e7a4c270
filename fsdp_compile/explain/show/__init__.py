"""A plan as tables, as a page, as a trace."""
