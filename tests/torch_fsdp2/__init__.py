"""PyTorch's own tests of FSDP2, run with the outermost module compiled."""
