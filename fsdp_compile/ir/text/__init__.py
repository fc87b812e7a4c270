"""The text of graphs and plans: written, read, compared."""
