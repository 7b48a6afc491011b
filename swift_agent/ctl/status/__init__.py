"""Who is in a job, who is missing, what happened: once, or as a screen that follows it."""
