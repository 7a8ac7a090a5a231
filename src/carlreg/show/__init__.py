"""Results to look at: the report and the viewer."""
