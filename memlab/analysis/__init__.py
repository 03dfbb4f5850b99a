"""Trace -> value: pure functions without torch, IPython or plotly."""
