"""Checkpoints of a job: the directory, and the workers' part."""
