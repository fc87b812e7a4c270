"""Graphs run under a model of an accelerator's streams: no stream uses memory that another one still uses."""
