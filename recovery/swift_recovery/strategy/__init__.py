"""What a failure would cost, with each way to recover. Pure."""
