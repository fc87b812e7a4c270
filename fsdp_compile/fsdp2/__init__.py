"""The package on top of torch's own FSDP2, whose objects own parameters, hooks and state dicts."""
