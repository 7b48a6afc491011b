"""What a script may not track, and how that is found out: when it is tracked, and after the first steps."""
