"""Training: stages, steps, the loop, and `carl train`."""
