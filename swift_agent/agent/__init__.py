"""The process on each node: its loop, events in, commands out. Imports nothing of `worker`."""
