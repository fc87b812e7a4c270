"""What happens to gradients between backward and the optimizer: clipping and unscaling."""
