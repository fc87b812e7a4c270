"""What both wings agree on: where parameters lie in flat buffers, and how messages are put together."""
