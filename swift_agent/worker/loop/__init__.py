"""Runs an iteration until it counts."""
