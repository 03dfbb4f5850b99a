"""Makers of traces: the only room that touches a running device."""
