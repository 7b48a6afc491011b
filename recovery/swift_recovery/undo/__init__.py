"""Taking back an update. Pure arithmetic."""
