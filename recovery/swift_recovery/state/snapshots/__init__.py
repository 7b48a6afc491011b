"""What is kept of a training state at a point of the loop, so that what was cut can run again."""
