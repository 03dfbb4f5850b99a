"""Switches of PyTorch and its environment: what they do to memory, and what they do not."""
