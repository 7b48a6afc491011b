"""One node in its job."""
