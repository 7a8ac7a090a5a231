"""The paper: registration algorithms, the networks inside them, and their files."""
