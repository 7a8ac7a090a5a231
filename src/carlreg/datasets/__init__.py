"""Images on disk as training material: which there are (`manifest`), made ready once (`cache`), drawn (`pairs`)."""
