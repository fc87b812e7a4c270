"""The console script `fsdp-compile`: one module per command, listed in `main.py`."""
