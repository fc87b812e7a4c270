"""Which way to shard a model fits into memory, how fast it is, and what to write for it."""
