"""`fully_shard`: units and arguments for torch's function of that name."""
