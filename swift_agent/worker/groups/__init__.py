"""Process groups that outlive their connections."""
