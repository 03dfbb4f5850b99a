"""What the optimizer remembers, and when it steps."""
