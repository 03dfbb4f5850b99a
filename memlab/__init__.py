"""memlab: a memory lab inside Jupyter for people who train PyTorch models."""

from __future__ import annotations

__version__ = "0.1.0.dev0"
