"""The bytes of a log."""
