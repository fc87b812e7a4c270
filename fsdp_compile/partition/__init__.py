"""The joint graph, cut into forward and backward."""
