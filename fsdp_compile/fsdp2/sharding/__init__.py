"""`fully_shard`: chooses units and calls torch's `fully_shard` for each."""
