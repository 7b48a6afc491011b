"""The training state of one worker: described, copied, compared."""
