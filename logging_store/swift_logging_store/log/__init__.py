"""The log of one process."""
