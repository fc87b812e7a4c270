"""Full values in and out."""
