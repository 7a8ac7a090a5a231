"""Training: stages, step and loop; images, batches and validation; what `carl train` does."""
