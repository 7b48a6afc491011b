"""A state on its way: over a group, a socket, a file."""
