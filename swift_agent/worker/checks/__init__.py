"""Looks where ranks could part, or wait for each other for ever, without a word."""
