"""What the records of jobs say, in words. Pure."""
