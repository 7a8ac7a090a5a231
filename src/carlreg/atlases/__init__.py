"""Templates of many scans, and labels for a scan from labelled atlases."""
