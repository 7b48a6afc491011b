"""Who trains together. Pure."""
