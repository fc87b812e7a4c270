"""Measures a cluster once, for the plans of all jobs on it: `fsdp-compile calibrate`."""
