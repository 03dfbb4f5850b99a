"""The commands of `memlab`, one per file."""
