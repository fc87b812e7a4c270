"""Plans when collectives start and when they are waited for, over numbers alone: no graphs, no tensors."""
