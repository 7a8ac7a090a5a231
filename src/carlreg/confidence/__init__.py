"""How far a registration can be trusted, judged without labels: evidence, calibration and verdict."""
