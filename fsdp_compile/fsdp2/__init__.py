"""What stands on torch's FSDP2: its shards in flat buffers, edges of autograd to them, and who gathers a unit."""
