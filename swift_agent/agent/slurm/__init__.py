"""Nodes that an operator drains in Slurm. See README.md."""
