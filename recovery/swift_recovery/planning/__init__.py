"""From reports to a plan. Pure."""
