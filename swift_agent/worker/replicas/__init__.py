"""Whether replicas hold the same, and what differs."""
