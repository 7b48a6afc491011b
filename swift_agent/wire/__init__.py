"""What an agent and its workers share: sockets, shared memory, environment variables, the store of a generation."""
