"""A worker's line to its agent."""
