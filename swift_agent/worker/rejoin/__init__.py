"""Carries out a plan in one worker."""
