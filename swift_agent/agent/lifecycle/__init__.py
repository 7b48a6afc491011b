"""What an agent does next. Pure."""
