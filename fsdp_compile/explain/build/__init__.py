"""Makes a plan from planned graphs."""
