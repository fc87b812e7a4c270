"""The cost model: time of each node and each collective, live bytes, and the overlap of compute and communication."""
