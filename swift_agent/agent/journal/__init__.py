"""What the cores of an agent were asked and answered: written down, and asked again."""
