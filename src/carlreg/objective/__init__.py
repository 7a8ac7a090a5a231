"""Losses, metrics, and the optimisation of one pair."""
