"""What a script gets: `init()` and the `Job`."""
