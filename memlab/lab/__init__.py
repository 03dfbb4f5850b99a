"""The Lab: a workload, techniques to switch on, a device, and what each really saves."""

from __future__ import annotations

from memlab.lab.lab import Lab

__all__ = ["Lab"]
