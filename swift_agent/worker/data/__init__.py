"""What iterations are given, and how a replacement gets to the same place in it."""
