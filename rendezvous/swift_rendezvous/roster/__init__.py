"""Which nodes train together. Pure."""
