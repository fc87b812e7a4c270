"""The graph of a step: how the other packages read and edit it."""
