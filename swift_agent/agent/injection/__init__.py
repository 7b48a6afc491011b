"""Faults that a person has ordered, struck by the agent of their target. See README.md."""
