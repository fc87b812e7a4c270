"""Files of checkpoints: what is in them, whether it is right, and the same in another format; without a model."""
