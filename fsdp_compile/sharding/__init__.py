"""`fully_shard`, and what it builds."""
