"""Scripts of the user, unchanged: measured while they run, or predicted."""
