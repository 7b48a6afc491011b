"""Inside a training process. Imports nothing of `agent`."""
