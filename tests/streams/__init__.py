"""Graphs run under a model of an accelerator's streams: nothing reads or reuses memory that another stream still uses."""
