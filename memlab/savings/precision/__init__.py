"""Fewer bits for a number, in training."""
