"""The public functions: runs, tracks, their registry, and their reports."""
