"""Where a measurement meets a view: runs, tracks, their registry, and how they show themselves."""
