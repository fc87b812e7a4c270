"""What sharded modules become: class, forward, casts, methods."""
