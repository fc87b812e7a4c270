"""What stands on torch's FSDP2: its objects own parameters, hooks and state dicts."""
