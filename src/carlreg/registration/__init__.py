"""`register`: two scans in, a registration out."""
