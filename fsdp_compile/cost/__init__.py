"""What a graph costs: time of each node and each collective, live bytes, and how the two lanes overlap."""
