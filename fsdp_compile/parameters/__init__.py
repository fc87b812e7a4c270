"""Sharded storage: units, aligned flat buffers, DTensor parameters and the reads that gather them."""
