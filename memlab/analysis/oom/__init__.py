"""Out-of-memory errors: what the message says, what was alive, how the device was divided, and what would help."""
