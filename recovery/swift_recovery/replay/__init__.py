"""Iterations that are repeated from logs."""
