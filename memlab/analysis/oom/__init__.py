"""An out-of-memory: what its message says, what was alive then, what it adds up to, and what would help."""
